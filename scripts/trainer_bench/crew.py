"""Members of a benchmark: processes that are asked all at once, and are all gone at the end, whatever happens.

Each is the leader of a process group, so that the helpers a peer starts (a libp2p daemon and averagers, three to five
processes a member with hivemind) end with it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = ROOT / "scripts" / "baselines" / "trainer"

_HEAD_START_S = 0.05
_END_S = 2.0

Answer = dict[str, Any]


class Crew:
    """So many members of one kind."""

    def __init__(self, kind: str, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._kind = kind
        self._processes = processes

    def __len__(self) -> int:
        return len(self._processes)

    def each(
        self, do: str, requests: Sequence[dict[str, Any]], *, first: int = 0, timeout_s: float = 120.0
    ) -> list[Answer]:
        """Gives members, from the ``first`` on, a request of its own each; all begin at one moment."""
        at_s = time.monotonic() + _HEAD_START_S
        asked = self._processes[first : first + len(requests)]
        for process, request in zip(asked, requests, strict=True):
            if process.stdin is not None:
                process.stdin.write(json.dumps({"do": do, "at": at_s, **request}) + "\n")
                process.stdin.flush()
        deadline_s = at_s + timeout_s
        return [self._answer(rank, process, do, deadline_s) for rank, process in enumerate(asked, first)]

    def all(self, do: str, *, timeout_s: float = 120.0, **request: Any) -> list[Answer]:
        """Gives all members the same request."""
        return self.each(do, [request] * len(self), timeout_s=timeout_s)

    def _answer(self, rank: int, process: subprocess.Popen[str], do: str, deadline_s: float) -> Answer:
        line = ""
        if process.stdout is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if selector.select(max(0.0, deadline_s - time.monotonic())):
                    line = process.stdout.readline()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_HEAD_START_S)  # One that has closed its output is about to end.
            state = "gave no answer in time" if process.poll() is None else f"ended with status {process.returncode}"
            raise SystemExit(f"{self._kind}, member {rank}: {do}: {state}; BENCH_STDERR=1 shows what it says")
        answer: Answer = json.loads(line)
        return answer


@contextmanager
def crew(
    kind: str,
    count: int,
    prefixes: Sequence[Sequence[str]] = (),
    *,
    folder: Path = MEMBERS,
    threads: int = 1,
    spins: bool = True,
) -> Iterator[Crew]:
    """Starts `{kind}_member.py` so many times.

    Args:
        kind: of the members.
        count: of them.
        prefixes: a command for each that runs its process in a namespace.
        folder: where the file is.
        threads: OpenMP's, of each.
        spins: whether they wait for each other busily, as is the default, or let others run meanwhile.
    """
    command = [sys.executable, str(folder / f"{kind}_member.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    if not spins:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(count):
            process = subprocess.Popen(
                [*(prefixes[rank] if prefixes else ()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("BENCH_STDERR") else subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                env=environment,
            )
            processes.append(process)  # One by one: those that were started end, whatever becomes of the next.
        yield Crew(kind, processes)
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
    deadline_s = time.monotonic() + _END_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.05, deadline_s - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def load_average() -> str:
    """The machine's load of the last minute, with the time of day."""
    return f"{time.strftime('%H:%M')}, load average {os.getloadavg()[0]:.2f}"


def progress(line: str) -> None:
    """Says what takes its time, beside the results."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
