"""How a node's training and a swarm are displayed: redrawn on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Never, TextIO

import typer

from trainer.monitor.speed import speed_text
from trainer.monitor.status import SpeedStatus, StageStatus, SwarmAccount, SwarmStages, WorkerStatus

if TYPE_CHECKING:
    from tqdm import tqdm

    from trainer.evaluation import Evaluation, HeldOutLoss, SourceLoss
    from trainer.inner import StepResult
    from trainer.outer.engine.strategy import OuterResult
    from trainer.run.config import RunConfig
    from trainer.run.node.stopping import StopRequest
    from trainer.run.node.training import TrainingDisplay
    from trainer.run.swarm.running import Display, ProcessCount, SwarmSnapshot

_BOLD, _RED, _RESET = "\x1b[1m", "\x1b[31m", "\x1b[0m"
_TERMINAL_EVERY_S, _LINE_EVERY_S = 1.0, 10.0
_MOST_TROUBLES = 8
_OLD_S = 25.0  # A live worker announces itself twice in 10 s, unless the run file says otherwise.
_AWAY_S = 5.0  # A keeper that is restarted is away for as long as its process takes to begin.
_UNKNOWN = f"{'–':>9}{'–':>7}{'–':>8}"  # In the place of `_load_text`.


@contextmanager
def training_display(
    config: RunConfig, stop: StopRequest, *, as_json: bool, is_first: bool = True
) -> Iterator[TrainingDisplay]:
    """Yields the display that suits the output; ranks of a cluster other than the first one display nothing.

    It asks ``stop`` when the reader of the JSON lines has gone.
    """
    if not is_first:
        yield NoLines()
    elif as_json:
        yield _JsonLines(stop)
    elif sys.stderr.isatty():
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        with tqdm(total=config.max_steps or None, unit="step", dynamic_ncols=True) as bar, logging_redirect_tqdm():
            yield _Bar(bar)
    else:
        lines = _PlainLines()
        try:
            yield lines
        finally:
            lines.end()


class _WithSpeed:
    """Knows what to ask for the speed of training."""

    _speed: Callable[[], SpeedStatus | None] = staticmethod(lambda: None)

    def speed_from(self, speed: Callable[[], SpeedStatus | None]) -> None:
        """Takes what to ask."""
        self._speed = speed


class NoLines(_WithSpeed):
    """Displays nothing."""

    def step(self, result: StepResult) -> None:
        """Displays nothing."""

    def outer(self, result: OuterResult) -> None:
        """Displays nothing."""

    def evaluation(self, found: Evaluation) -> None:
        """Displays nothing."""


class _PlainLines(_WithSpeed):
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
        found = self._speed()
        utilisation = f"  {speed_text(found)}" if found is not None else ""
        typer.echo(f"step {result.step + 1}  {_figures(result)}  {speed:,.0f} tokens/s{utilisation}", err=True)
        self._latest = None
        self._next_s, self._num_tokens, self._since_s = now_s + _LINE_EVERY_S, 0, now_s

    def outer(self, result: OuterResult) -> None:
        typer.echo(_round(result), err=True)

    def evaluation(self, found: Evaluation) -> None:
        for line in evaluation_lines(found):
            typer.echo(line, err=True)


class _Bar(_WithSpeed):
    """Shows tqdm's bar."""

    def __init__(self, bar: tqdm[Never]) -> None:
        self._bar = bar
        self._utilisation = ""

    def step(self, result: StepResult) -> None:
        if not self._bar.n and result.step:
            self._bar.initial = result.step
        self._bar.n = result.step  # Other drivers of a pipeline do steps too.
        found = self._speed() if result.step % 10 == 0 or not self._utilisation else None
        if found is not None:
            self._utilisation = f"  {speed_text(found)}"
        self._bar.set_postfix_str(_figures(result) + self._utilisation, refresh=False)
        self._bar.update(1)

    def outer(self, result: OuterResult) -> None:
        self._bar.write(_round(result), file=sys.stderr)

    def evaluation(self, found: Evaluation) -> None:
        for line in evaluation_lines(found):
            self._bar.write(line, file=sys.stderr)


class _JsonLines(_WithSpeed):
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
            seconds=round(report.seconds if report is not None else result.waited_s, 6),
            **({"stage": result.part} if result.part else {}),
        )

    def evaluation(self, found: Evaluation) -> None:
        if found.held_out is not None:
            self._put(kind="held_out", step=found.step, **held_out_json(found.held_out))
        for sample in found.samples:
            self._put(kind="sample", step=found.step, prompt=sample.prompt, text=sample.text)

    def _put(self, **fields: object) -> None:
        try:
            typer.echo(json.dumps(fields, separators=(",", ":")))
        except BrokenPipeError:
            # What is still buffered would fail again, at the latest at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._stop.ask()


def _figures(result: StepResult) -> str:
    norm = f"  |g| {result.grad_norm:.2f}" if math.isfinite(result.grad_norm) or result.skipped else ""
    return f"loss {result.loss:.4f}  lr {result.lr:.2e}{norm}" + ("  skipped: not finite" if result.skipped else "")


def _round(result: OuterResult) -> str:
    which = f" of {result.part}" if result.part else ""
    if result.report is None:
        return f"outer step {result.outer_step}{which}: round {result.round_index} failed: {result.error}"
    report = result.report
    text = (
        f"outer step {result.outer_step}{which}: {len(report.members)} member{'s' * (len(report.members) != 1)}, "
        f"{100 * report.completeness:.0f} % complete, {report.seconds:.2f} s, "
        f"{report.sent_bytes / 1e6:.1f} MB out, {report.received_bytes / 1e6:.1f} MB in"
    )
    bits = report.bits_per_value
    if bits is not None and report.sent_bytes:
        text += f" ({bits[0]:.2f} and {bits[1]:.2f} bits a parameter)"
    return "; ".join((text, *report.remarks()))


def evaluation_lines(found: Evaluation) -> list[str]:
    """Returns a measurement, a line each; sampled text is spelt as Python does, without what moves a cursor."""
    lines = []
    if found.held_out is not None:
        lines.append(f"after step {found.step}: {held_out_text(found.held_out)}")
    for sample in found.samples:
        behind = f" behind {sample.prompt!r}" if sample.prompt else ""
        lines.append(f"after step {found.step} it writes{behind}: {sample.text!r}")
    return lines


def held_out_text(found: HeldOutLoss) -> str:
    """Returns the loss on held-out shards in one line, that of each source too where there are several."""
    whole = found.whole
    text = f"held out {_loss_text(whole)} ({whole.num_tokens:,} tokens, {found.seconds:.1f} s)"
    if len(found.by_source) > 1:
        text += "; " + ", ".join(f"{name} {_loss_text(part)}" for name, part in found.by_source.items())
    return text


def held_out_json(found: HeldOutLoss) -> dict[str, object]:
    """Returns the loss on held-out shards as fields of an object."""
    by_source = {name: _loss_json(part) for name, part in found.by_source.items()}
    return {**_loss_json(found.whole), "by_source": by_source, "seconds": round(found.seconds, 6)}


def _loss_text(loss: SourceLoss) -> str:
    return f"{loss.nats_per_token:.4f} nats a token, {loss.bits_per_byte:.4f} bits a byte"


def _loss_json(loss: SourceLoss) -> dict[str, object]:
    figures = {"loss": loss.nats_per_token, "bits_per_byte": loss.bits_per_byte}
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return {**finite, "num_tokens": loss.num_tokens, "num_bytes": loss.num_bytes}


def swarm_display(*, as_json: bool) -> Display:
    """Returns the display that suits the output."""
    if as_json:
        return _SwarmJson(sys.stdout)
    if sys.stderr.isatty():
        return _Table(sys.stderr, is_coloured=not os.environ.get("NO_COLOR"))
    return _SwarmLines(sys.stderr)


def stage_table(snapshot: SwarmSnapshot, *, is_coloured: bool = False) -> list[str]:
    """Returns the stages, a line each under a heading, then loss, speed and account.

    Processes are a column only where they are known, which those on other machines are not.
    """
    counts = {count.name: count for count in snapshot.processes}
    stages = {stage.stage: stage for stage in snapshot.stages.stages} if snapshot.stages is not None else {}
    processes = f"{'processes':>11}" if counts else ""
    heading = f"{'stage':<12}{processes}{'serving':>9}{'version':>9}{'rows/s':>9}{'busy':>7}{'queued':>8}"
    lines = [(_BOLD, heading)]
    for name in dict.fromkeys([*stages, *counts]):
        stage = stages.get(name)
        is_empty = stage is not None and not stage.num_serving
        lines.append((_RED if is_empty else "", _shown(_row(name, counts, stage))))
    if counts:  # Else a table of the workers has them.
        lines += [(_RED, trouble) for trouble in _troubles(snapshot.stages)]
    return [
        *(f"{colour}{text}{_RESET}" if is_coloured and colour else text for colour, text in lines),
        *_keeper_troubles(snapshot.stages),
        _progress_text(snapshot),
        account_text(snapshot.account),
    ]


def account_text(account: SwarmAccount | None) -> str:
    """Returns the account in one line."""
    if account is None:
        return "account: not heard of yet"
    found = account.micro_batches
    text = f"micro-batches: {found.leased:,} leased = {found.done:,} done + {found.lost:,} lost + {found.open:,} open"
    if not (found.adds_up and account.tokens.adds_up):
        text += " (does NOT add up)"
    if account.reissued:
        text += f"; {account.reissued:,} given again"
    perished = max((share.micro_batches for share in account.perished), default=0)
    return text + (f"; at most {perished:,} of them perished in a stage" if perished else "")


def settled_text(account: SwarmAccount, num_steps: int) -> str:
    """Returns the account a keeper left after ``num_steps`` steps.

    Micro-batches that are open then no driver had begun, or they stay leased since a worker may have counted them.
    """
    found = account.micro_batches
    handed_back = min(account.waiting, found.open)
    text = f"step {num_steps}; {found.leased:,} micro-batches leased = {found.done:,} done + {found.lost:,} lost"
    if handed_back:
        text += f" + {handed_back:,} handed back (the next start leases them again)"
    if found.open > handed_back:
        text += f" + {found.open - handed_back:,} begun and not settled (the next start asks the workers)"
    return text if found.adds_up and account.tokens.adds_up else f"{text} (does NOT add up)"


def workers_table(stages: SwarmStages, account: SwarmAccount | None) -> list[str]:
    """Returns each worker, then what was lost and why, a line each."""
    lines = [f"{'worker':<16}{'node':<20}{'status':<10}{'version':>9}{'rows/s':>9}{'busy':>7}{'queued':>8}"]
    for worker in (worker for stage in stages.stages for worker in stage.workers):
        status = "silent" if worker.silent_s else worker.status
        text = f"{worker.uid:<16}{worker.node_id[:19]:<20}{status:<10}{worker.version:>9}"
        text += _UNKNOWN if worker.silent_s else _load_text(worker.rows_per_s, worker.busy, worker.queued)
        notes = [f"not asked for {worker.banned_for_s:,.0f} s"] if worker.banned_for_s else []
        lines.append(_shown("  ".join([text, *notes, *_troubles_of(worker)])))
    if account is not None:
        lines += [_shown(f"lost at {it.stage}: {it.micro_batches:,} ({it.reason})") for it in account.lost]
        lines += [_shown(f"perished at {it.stage}: {it.micro_batches:,}") for it in account.perished]
    return lines


def status_json(stages: SwarmStages, account: SwarmAccount | None) -> str:
    """Returns all of it as one JSON object."""
    return json.dumps(_plain(stages, account))


def _plain(stages: SwarmStages | None, account: SwarmAccount | None) -> dict[str, object]:
    parts = {"stages": stages, "account": account}
    return {name: None if part is None else part.model_dump(mode="json") for name, part in parts.items()}


def _shown(text: str) -> str:
    """Replaces characters that would move a terminal's cursor: the driver may be anybody's."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _row(name: str, counts: Mapping[str, ProcessCount], stage: StageStatus | None) -> str:
    count = counts.get(name)
    text = f"{name:<12}"
    if counts:
        text += f"{'–' if count is None else f'{count.running}/{count.wanted}':>11}"
    if stage is not None:
        heard = [worker for worker in stage.workers if not worker.silent_s]
        version = "–" if stage.version is None else str(stage.version)
        serving = f"{stage.num_serving}/{len(stage.workers)}"
        text += f"{serving:>9}{version:>9}"
        if stage.workers and not heard:
            text += _UNKNOWN
        else:
            busy = max((worker.busy for worker in heard), default=0.0)
            text += _load_text(stage.rows_per_s, busy, sum(worker.queued for worker in heard))
        if stage.empty_for_s > 0:
            text += f"  empty for {stage.empty_for_s:.0f} s"
    if count is not None and count.restarts:
        text += f"  restarts: {count.restarts}"
    return text


def _load_text(rows_per_s: float, busy: float, queued: int) -> str:
    return f"{rows_per_s:>9,.1f}{100 * busy:>6.0f}%{queued:>8,}"


def _troubles(stages: SwarmStages | None) -> list[str]:
    """Returns what is wrong with workers, a line each, up to a limit."""
    workers = [worker for stage in stages.stages for worker in stage.workers] if stages is not None else []
    found = [_shown(f"{worker.node_id}: {trouble}") for worker in workers for trouble in _troubles_of(worker)]
    left = len(found) - _MOST_TROUBLES
    return found if left <= 0 else [*found[:_MOST_TROUBLES], f"and {left} more of this kind: see swarm status"]


def _troubles_of(worker: WorkerStatus) -> list[str]:
    found = []
    if worker.silent_s:
        found.append(f"has not answered for {worker.silent_s:,.0f} s; micro-batches wait for it ({worker.in_flight})")
    if worker.age_s > _OLD_S:
        found.append(f"last heard of {worker.age_s:,.0f} s ago")
    if worker.differs_from:
        found.append(f"computes something else than {', '.join(worker.differs_from)}; one of them is wrong")
    if worker.unsaved_because:
        found.append(f"no checkpoint for {worker.unsaved_s:,.0f} s: {worker.unsaved_because}")
    return found


def _keeper_troubles(stages: SwarmStages | None) -> list[str]:
    if stages is None or stages.keeper_away_s < _AWAY_S:
        return []
    goes_on = f"goes on with {stages.held:,} micro-batches" if stages.held else "has none left and waits for it"
    away = f"the keeper of the account, {stages.keeper[:64]}, has not answered for {stages.keeper_away_s:,.0f} s"
    return [_shown(f"{away}; {stages.node_id} {goes_on}")]


def _progress_text(snapshot: SwarmSnapshot) -> str:
    if snapshot.stages is None:
        return "no driver answers yet"
    loss = "–" if snapshot.stages.loss is None else f"{snapshot.stages.loss:.4f}"
    text = f"step {snapshot.stages.step}  loss {loss}  {snapshot.tokens_per_s:,.0f} tokens/s"
    return text + (" when last heard; no driver answers now" if snapshot.is_stale else "")


class _Table:
    """Redrawn in place; what happens scrolls by above it."""

    every_s = _TERMINAL_EVERY_S

    def __init__(self, stream: TextIO, *, is_coloured: bool) -> None:
        self._stream = stream
        self._is_coloured = is_coloured
        self._lines: Sequence[str] = ()

    def event(self, text: str) -> None:
        self._erase()
        self._stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self._draw()

    def show(self, snapshot: SwarmSnapshot) -> None:
        self._erase()
        self._lines = stage_table(snapshot, is_coloured=self._is_coloured)
        self._draw()

    def _erase(self) -> None:
        if self._lines:
            self._stream.write(f"\x1b[{len(self._lines)}F\x1b[J")

    def _draw(self) -> None:
        # A wrapped line would take two lines to erase. Codes of colours take no width.
        width = shutil.get_terminal_size().columns - 1
        for line in self._lines:
            codes = len(_BOLD) + len(_RESET) if line.startswith("\x1b") else 0
            cut = line if len(line) - codes <= width else line[:width] + (_RESET if codes else "")
            self._stream.write(f"{cut}\n")
        self._stream.flush()


class _SwarmLines:
    """One line for all."""

    every_s = _LINE_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def event(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=self._stream, flush=True)

    def show(self, snapshot: SwarmSnapshot) -> None:
        running = sum(count.running for count in snapshot.processes)
        wanted = sum(count.wanted for count in snapshot.processes)
        empty = [stage.stage for stage in snapshot.stages.stages if not stage.num_serving] if snapshot.stages else []
        text = f"{_progress_text(snapshot)}  {running}/{wanted} processes  {account_text(snapshot.account)}"
        text += f"  nobody serves {', '.join(empty)}" if empty else ""
        troubles = [*_troubles(snapshot.stages), *_keeper_troubles(snapshot.stages)]
        print("; ".join([text, *troubles]), file=self._stream, flush=True)


class _SwarmJson:
    """One object a line on standard output."""

    every_s = _LINE_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def event(self, text: str) -> None:
        self._put({"kind": "event", "text": text})

    def show(self, snapshot: SwarmSnapshot) -> None:
        figures = {"tokens_per_s": snapshot.tokens_per_s, "is_stale": snapshot.is_stale}
        processes = {"processes": [asdict(count) for count in snapshot.processes]}
        self._put({"kind": "swarm", **figures, **processes, **_plain(snapshot.stages, snapshot.account)})

    def _put(self, content: dict[str, object]) -> None:
        print(json.dumps(content, separators=(",", ":")), file=self._stream, flush=True)
