"""How a node's training is displayed: a bar on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Never

import typer
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from trainer.inner import StepResult
from trainer.outer.engine.strategy import OuterResult
from trainer.run.config import RunConfig
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import TrainingDisplay

__all__ = ["training_display"]

_EVERY_S = 10.0


@contextmanager
def training_display(
    config: RunConfig, stop: StopRequest, *, as_json: bool, is_first: bool = True
) -> Iterator[TrainingDisplay]:
    """Yields the display that suits the output; ranks of a cluster other than the first one display nothing.

    It asks ``stop`` when the reader of the JSON lines has gone.
    """
    if not is_first:
        yield _NoLines()
    elif as_json:
        yield _JsonLines(stop)
    elif sys.stderr.isatty():
        with tqdm(total=config.max_steps or None, unit="step", dynamic_ncols=True) as bar, logging_redirect_tqdm():
            yield _Bar(bar)
    else:
        lines = _PlainLines()
        try:
            yield lines
        finally:
            lines.end()


class _NoLines:
    """Displays nothing."""

    def step(self, result: StepResult) -> None:
        pass

    def outer(self, result: OuterResult) -> None:
        pass


class _PlainLines:
    """Prints a line every ten seconds, for the first and the last step, and for each round."""

    def __init__(self) -> None:
        self._latest: StepResult | None = None
        self._next_s = 0.0
        self._num_tokens = 0
        self._since_s: float | None = None

    def step(self, result: StepResult) -> None:
        self._latest = result
        self._num_tokens += result.num_tokens
        if time.monotonic() >= self._next_s:
            self._print(result)

    def end(self) -> None:
        """Prints the last step, if it was not printed."""
        if self._latest is not None:
            self._print(self._latest)

    def _print(self, result: StepResult) -> None:
        now_s = time.monotonic()
        since_s = self._since_s if self._since_s is not None else now_s - result.seconds
        speed = self._num_tokens / max(now_s - since_s, 1e-9)
        typer.echo(f"step {result.step + 1}  {_figures(result)}  {speed:,.0f} tokens/s", err=True)
        self._latest = None
        self._next_s, self._num_tokens, self._since_s = now_s + _EVERY_S, 0, now_s

    def outer(self, result: OuterResult) -> None:
        typer.echo(_round(result), err=True)


class _Bar:
    """Shows tqdm's bar."""

    def __init__(self, bar: tqdm[Never]) -> None:
        self._bar = bar

    def step(self, result: StepResult) -> None:
        if not self._bar.n and result.step:
            self._bar.initial = result.step
        self._bar.n = result.step  # Other drivers of a pipeline do steps too.
        self._bar.set_postfix_str(_figures(result), refresh=False)
        self._bar.update(1)

    def outer(self, result: OuterResult) -> None:
        self._bar.write(_round(result), file=sys.stderr)


class _JsonLines:
    """Prints one object a line; when the reader closes the pipe (such as ``head``), the node saves and ends."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop

    def step(self, result: StepResult) -> None:
        self._put(
            kind="step",
            step=result.step,
            loss=result.loss if math.isfinite(result.loss) else None,
            grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
            lr=result.lr,
            num_tokens=result.num_tokens,
            skipped=result.skipped,
            seconds=round(result.seconds, 6),
        )

    def outer(self, result: OuterResult) -> None:
        report = result.report
        self._put(
            kind="round",
            round_index=result.round_index,
            outer_step=result.outer_step,
            committed=result.committed,
            error=result.error,
            members=list(report.members) if report is not None else [],
            dropped=[list(entry) for entry in report.dropped] if report is not None else [],
            completeness=report.completeness if report is not None else 0.0,
            seconds=round(report.seconds, 6) if report is not None else round(result.waited_s, 6),
        )

    def _put(self, **fields: object) -> None:
        try:
            sys.stdout.write(json.dumps(fields, separators=(",", ":")) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            # What is still buffered would fail again, at the latest at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._stop.ask()


def _figures(result: StepResult) -> str:
    norm = f"  |g| {result.grad_norm:.2f}" if math.isfinite(result.grad_norm) or result.skipped else ""
    return f"loss {result.loss:.4f}  lr {result.lr:.2e}{norm}" + ("  skipped: not finite" if result.skipped else "")


def _round(result: OuterResult) -> str:
    if result.report is None:
        return f"outer step {result.outer_step}: round {result.round_index} failed: {result.error}"
    report = result.report
    text = (
        f"outer step {result.outer_step}: {len(report.members)} member{'s' * (len(report.members) != 1)}, "
        f"{100 * report.completeness:.0f} % complete, {report.seconds:.2f} s, "
        f"{report.sent_bytes / 1e6:.1f} MB out, {report.received_bytes / 1e6:.1f} MB in"
    )
    return "; ".join((text, *report.remarks()))
