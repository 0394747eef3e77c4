"""Passes of several processes in turn: A B C A B C …, one at a time, the others asleep."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from scripts.loader_bench.workspace import CONTESTANTS, Workspace, child_environment

_ANSWER_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who takes part, and how: the script `baselines/loader/{script}_batches.py` with these options."""

    script: str
    options: dict[str, Any] = field(default_factory=dict)
    one_shard: bool = False
    """A peer reads the ids of one shard only."""


@dataclass(slots=True)
class Rates:
    """What one contestant reached, in tokens a second."""

    first: list[float] = field(default_factory=list)
    """First passes, each of another process."""
    later: list[float] = field(default_factory=list)
    later_cpu: list[float] = field(default_factory=list)
    """Later passes, in tokens a second of processor time: what a busy machine changes less."""

    def summary(self) -> dict[str, float]:
        """Medians and the best."""
        return {
            "first": median(self.first),
            "later": median(self.later),
            "best": max(self.later),
            "cpu": median(self.later_cpu),
        }


def answer_of(process: subprocess.Popen[str], name: str, timeout_s: float) -> dict[str, Any]:
    """The next line that a process prints, which is JSON."""
    line = ""
    if process.stdout is not None:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(timeout_s) else ""
    if not line:
        raise SystemExit(f"{name} ended, or said nothing within {timeout_s:.0f} s")
    found: dict[str, Any] = json.loads(line)
    return found


class _Process:
    """A started contestant."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name = name
        self._process = process

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request; waits for its answer."""
        stdin = self._process.stdin
        if stdin is not None:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line of the process."""
        return answer_of(self._process, self._name, _ANSWER_TIMEOUT_S)

    def end(self) -> None:
        """Lets the process end by itself, so that it cleans up; not for long."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def started(name: str, contestant: Contestant, workspace: Workspace) -> Iterator[_Process]:
    """A contestant's process, ready for its first pass; ended afterwards."""
    script = CONTESTANTS / f"{contestant.script}_batches.py"
    options = {"data": str(workspace.data_of(contestant.script, one_shard=contestant.one_shard)), **contestant.options}
    command = [str(workspace.python_of(contestant.script)), str(script), "serve", json.dumps(options)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("BENCH_STDERR") else subprocess.DEVNULL,
        text=True,
        env=child_environment(),
    ) as process:
        opened = _Process(name, process)
        try:
            opened.answer()
            yield opened
        finally:
            opened.end()


def run_rounds(
    contestants: Mapping[str, Contestant], workspace: Workspace, *, rounds: int, passes: int, **request: Any
) -> dict[str, Rates]:
    """Starts everyone anew in every round and lets them make passes in turn: the first ones, then the later ones."""
    found = {name: Rates() for name in contestants}
    for _ in range(rounds):
        with ExitStack() as stack:
            running = {
                name: stack.enter_context(started(name, contestant, workspace))
                for name, contestant in contestants.items()
            }
            for number in range(1 + passes):
                for name, process in running.items():
                    result = process.ask(**request)
                    rate = result["tokens"] / result["seconds"]
                    (found[name].later if number else found[name].first).append(rate)
                    if number:
                        found[name].later_cpu.append(result["tokens"] / result["cpu_seconds"])
    return found


def load_average() -> str:
    """The machine's load of the last minute, with the time of day."""
    return f"{time.strftime('%H:%M')}, load average {os.getloadavg()[0]:.2f}"
