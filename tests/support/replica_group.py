"""Replicas in threads of one process that average in lockstep: the simplest collective with somebody to wait for.

Sums are in fp64 in the order of the ranks, so the mean is the exactly rounded one for a few fp32 values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from trainer.errors import RoundFailedError
from trainer.outer.engine.collective import Contribution, RoundReport, RoundResult

WAIT_S = 60.0
T = TypeVar("T")


class ReplicaGroup:
    """What `n` replicas meet at.

    Args:
        num_replicas: all of them take part in every round.
        failing_rounds: numbers of the meetings (from 0) that end without a result.
    """

    def __init__(self, num_replicas: int, failing_rounds: Sequence[int] = ()) -> None:
        self._barrier = threading.Barrier(num_replicas)
        self._brought: list[Contribution | None] = [None] * num_replicas
        self._failing = frozenset(failing_rounds)
        self.history: list[list[Contribution]] = []

    def meet(self, rank: int, contribution: Contribution) -> RoundResult:
        self._brought[rank] = contribution
        if self._barrier.wait(WAIT_S) == 0:
            self.history.append([brought for brought in self._brought if brought is not None])
        self._barrier.wait(WAIT_S)
        meeting, brought = len(self.history) - 1, self.history[-1]
        if meeting in self._failing:
            raise RoundFailedError(f"meeting {meeting} was to fail")
        mean = torch.stack([other.vector.double() for other in brought]).mean(dim=0).float()
        members = tuple(f"replica-{other}" for other in range(len(brought)))
        return RoundResult(vector=mean, report=RoundReport(round_index=contribution.round_index, members=members))


class MeetingCollective:
    """One replica's side of a `ReplicaGroup`."""

    def __init__(self, group: ReplicaGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def reduce(self, contribution: Contribution) -> RoundResult:
        return self._group.meet(self._rank, contribution)

    def requested(self) -> bool:
        return False

    def close(self) -> None: ...


def run_replicas(replicas: Sequence[Callable[[], T]]) -> list[T]:
    """Run each in a thread of its own; the first error of any is raised."""
    with ThreadPoolExecutor(len(replicas)) as pool:
        futures = [pool.submit(replica) for replica in replicas]
        return [future.result(WAIT_S) for future in futures]
