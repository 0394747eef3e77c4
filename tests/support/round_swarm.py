"""Runs actors (`tests.support.round_actor`) on this machine, and collects their outcomes."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.round_actor import RUN_ID, contribution_of, identity_of
from trainer.collective.planning import coordinator_order

_START_S = 60.0


@dataclass
class Actor:
    """One process."""

    number: int
    process: subprocess.Popen[str]
    lines: queue.Queue[str] = field(default_factory=queue.Queue)
    address: str = ""
    certificate: str | None = None

    @property
    def peer_id(self) -> str:
        return identity_of(self.number).peer_id

    def say(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next line from it; TimeoutError if there is none."""
        try:
            return json.loads(self.lines.get(timeout=timeout_s))
        except queue.Empty:
            raise TimeoutError(f"actor {self.number} says nothing within {timeout_s} s") from None

    def read(self) -> None:
        """Takes its lines as they come."""
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self.lines.put(line)
        except ValueError:
            return  # closed while it was read

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class RoundSwarm:
    """Actors 0 to n-1, with one set of settings; started again where one has died."""

    def __init__(self, folder: Path, num_actors: int, **settings: Any) -> None:
        self.folder = folder
        self.settings = {"stall_timeout_s": 2.5, **settings}
        self.actors: dict[int, Actor] = {}
        self.next_round = 0
        for step in (self._launch, self._await_start, self._make_ready):
            for number in range(num_actors):
                step(number)

    def close(self) -> None:
        for actor in self.actors.values():
            actor.kill()

    def order(self, round_index: int) -> list[int]:
        """Numbers in the order in which they would coordinate a round."""
        numbers = {actor.peer_id: number for number, actor in self.actors.items()}
        return [numbers[peer_id] for peer_id in coordinator_order(RUN_ID, round_index, numbers)]

    def begin(
        self, numbers: list[int], *, faults: Mapping[int, str] | None = None, each: Mapping[int, Any] | None = None
    ) -> int:
        """Lets these take part in the next round, each perhaps with options of its own; returns its number."""
        round_index = self.next_round
        self.next_round += 1
        command = {"round": round_index, "state": hashlib.sha256(f"state {round_index}".encode()).hexdigest()}
        for number in numbers:
            own = {"fault": (faults or {}).get(number, ""), "save_to": str(self._result_path(number))}
            own |= (each or {}).get(number, {})
            self.actors[number].say(peers=self._peers_of(number), **{**command, **own})
        return round_index

    def outcome(self, number: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """What became of the round at one of them."""
        return self.actors[number].hear(timeout_s)

    def result(self, number: int) -> torch.Tensor:
        """The vector it ended with."""
        return torch.load(self._result_path(number), weights_only=True)

    def restart(self, number: int) -> None:
        """A new process in the place of one that has died; at another port."""
        self.actors[number].kill()
        for step in (self._launch, self._await_start, self._make_ready):
            step(number)

    def _make_ready(self, number: int) -> None:
        """As a node that has taken up the others' state: invited to the next round, it will say that it comes."""
        self.actors[number].say(move_to=self.next_round, peers=self._peers_of(number))
        self.actors[number].hear(_START_S)

    def _peers_of(self, number: int) -> dict[str, tuple[str, str | None]]:
        return {
            actor.peer_id: (actor.address, actor.certificate) for other, actor in self.actors.items() if other != number
        }

    def _result_path(self, number: int) -> Path:
        return self.folder / f"result-{number}.pt"

    def _launch(self, number: int) -> None:
        with (self.folder / f"actor-{number}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.round_actor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        actor = self.actors[number] = Actor(number, process)
        threading.Thread(target=actor.read, daemon=True).start()
        actor.say(number=number, **self.settings)

    def _await_start(self, number: int) -> None:
        actor = self.actors[number]
        started = actor.hear(_START_S)
        actor.address, actor.certificate = started["address"], started["certificate"]


def mean_of(numbers: list[int], round_index: int) -> torch.Tensor:
    """The mean of contributions of equal weight."""
    return torch.stack([contribution_of(number, round_index) for number in numbers]).mean(0)
