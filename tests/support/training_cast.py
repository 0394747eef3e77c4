"""Members of runs in two processes of `tests.support.training_actor`, one run after the other in the same two."""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support.training_actor import NUM_ROUNDS

_ROOT = Path(__file__).resolve().parents[2]
_NUM_PROCESSES = 2
_START_S = 60.0
_RUN_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    members: dict[int, dict[str, Any]]
    """By number, what `training_actor` says of each."""
    liars: tuple[int, ...]

    @property
    def honest(self) -> list[dict[str, Any]]:
        return [member for number, member in self.members.items() if number not in self.liars]

    @property
    def loss(self) -> float:
        assert len({member["digest"] for member in self.honest}) == 1
        assert all(not member["failed"] and len(member["reports"]) == NUM_ROUNDS for member in self.honest)
        return float(self.honest[0]["loss"])

    @property
    def reports(self) -> list[dict[str, Any]]:
        return list(self.honest[0]["reports"])

    def said_of_liars(self, field: str) -> list[set[int]]:
        """Of each round, the liars that ``dropped`` or ``validation`` of the report name."""
        numbers = {member["peer_id"]: number for number, member in self.members.items()}
        return [{numbers[who] for who, _ in report[field]} & set(self.liars) for report in self.reports]


class _Process:
    def __init__(self, log: Path) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.training_actor"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def say(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def hear(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"expected an actor to answer within {timeout_s:.0f} s; see {self._log.name}") from None
        assert line, f"expected an actor to answer, found that it has ended; see {self._log.name}"
        return dict(json.loads(line))

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait(30)
        self._reading.join(30)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


class TrainingCast:
    """Two processes for as many runs as there are; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[_Process] = []
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        self._processes = [_Process(self._folder / f"actor-{number}.log") for number in range(_NUM_PROCESSES)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.close()

    def run(self, num_members: int, rule: Mapping[str, Any], attack: str = "", num_liars: int = 0) -> Outcome:
        """One run to its end.

        Args:
            num_members: all of them, the liars, who have the highest numbers, included.
            rule: of `RuleConfig`.
            attack: of `training_actor.ATTACKS`.
            num_liars: how many.
        """
        liars = tuple(range(num_members - num_liars, num_members))
        described = {
            "run_id": f"run-{next(self._numbers)}",
            "num_members": num_members,
            "rule": dict(rule),
            "liars": dict.fromkeys(liars, attack),
        }
        for index, process in enumerate(self._processes):
            process.say({**described, "here": list(range(index, num_members, _NUM_PROCESSES))})
        everybody = {key: value for process in self._processes for key, value in process.hear(_START_S).items()}
        for process in self._processes:
            process.say(everybody)
        results = {int(key): value for process in self._processes for key, value in process.hear(_RUN_S).items()}
        for process in self._processes:
            process.say({})
        for process in self._processes:
            process.hear(_START_S)
        return Outcome(results, liars)
