"""What waits to be computed: who is let in, and who is next. Arithmetic over jobs; no thread, no tensor.

Next is what ranks highest (backward before tail before forward: a backward pass frees memory and finishes work, where
a forward pass makes more of both), the oldest of it. That holds among drivers that had about the same compute; one that
is `max_compute_lead_s` ahead of the least served of those who wait goes behind these, whatever it asks for. So a driver
that floods with backward passes delays the others by that lead, once.

Let in is a request whose driver then has no more bytes waiting than are still free: one flooding driver fills half of
the queue, two a third each, and there is always room for somebody else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from trainer.errors import RefusedError
from trainer.pipeline.worker.config import WorkerConfig

__all__ = ["Computed", "Job", "Rank", "WaitingJobs"]

_FORWARD_SHARE = 0.75
"""Of the queue's bytes, for what only makes more work."""
_MAX_OWNERS = 1024
"""Whose compute is remembered."""


class Rank(IntEnum):
    """What goes first."""

    CONTROL = 0
    """This node's own business."""
    BACKWARD = 1
    TAIL = 2
    FORWARD = 3
    """Evaluations too: ranked lower they would never be had of a stage that is busy all the time."""


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What came of a job."""

    value: Any
    queue_s: float
    """It waited."""
    compute_s: float
    """It took; of jobs computed together, its share by rows."""


@dataclass(slots=True, eq=False)
class Job:
    """Something for the compute thread."""

    rank: Rank
    owner: str
    """Whose: the driver's key."""
    item: Any
    """What `compute` gets."""
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    """Computes items of jobs that may be computed together; gives for each its result, or an exception."""
    group: Hashable = None
    """Jobs of one rank and group may be computed together; None: alone."""
    num_rows: int = 1
    size_bytes: int = 0
    begin_before_s: float = float("inf")
    """On the runtime's clock: not begun by then, it is given up."""
    future: Future[Computed] = field(default_factory=Future)
    number: int = 0
    added_s: float = 0.0


class WaitingJobs:
    """Jobs that wait. For one thread at a time; the caller holds a lock.

    Args:
        config: the bounds.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._counts: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._served_s: dict[str, float] = {}
        self._floor_s = 0.0
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def check_room(self, rank: Rank, owner: str, size_bytes: int, retry_s: float) -> None:
        """Whether a job may come in.

        Raises:
            RefusedError: ``busy``; the text says when to try again.
        """
        if rank is Rank.CONTROL:
            return
        waiting = self._counts.get(owner, 0)
        if waiting >= self._config.max_queue_per_driver:
            raise _busy(f"this driver's {waiting} requests wait already, the most there may be", retry_s)
        share = _FORWARD_SHARE if rank >= Rank.FORWARD else 1.0
        left_bytes = int(self._config.max_queue_bytes * share) - self.size_bytes - size_bytes
        if left_bytes < (self._bytes[owner] + size_bytes if waiting else 0):
            raise _busy(f"{len(self._jobs)} requests of {self.size_bytes >> 20} MiB wait", retry_s)

    def add(self, job: Job, now_s: float) -> None:
        """Lets a job in; whether there is room was asked before."""
        job.number, job.added_s = next(self._numbers), now_s
        if job.owner not in self._counts:
            self._served_s[job.owner] = max(self._served_s.get(job.owner, 0.0), self._floor_s)
        self._jobs[job.number] = job
        self._counts[job.owner] = self._counts.get(job.owner, 0) + 1
        self._bytes[job.owner] = self._bytes.get(job.owner, 0) + job.size_bytes
        self.size_bytes += job.size_bytes

    def remove(self, job: Job) -> bool:
        """Takes a job out that is not wanted any more; False: it was not here."""
        if self._jobs.pop(job.number, None) is None:
            return False
        self.size_bytes -= job.size_bytes
        self._bytes[job.owner] -= job.size_bytes
        self._counts[job.owner] -= 1
        if not self._counts[job.owner]:
            del self._counts[job.owner], self._bytes[job.owner]
        return True

    def take_refused(self) -> list[Job]:
        """Takes out all but this node's own business."""
        refused = [job for job in self._jobs.values() if job.rank is not Rank.CONTROL]
        for job in refused:
            self.remove(job)
        return refused

    def take_expired(self, now_s: float) -> list[Job]:
        """Takes out those nobody waits for any more."""
        expired = [job for job in self._jobs.values() if job.begin_before_s < now_s]
        for job in expired:
            self.remove(job)
        return expired

    def take(self) -> list[Job]:
        """Takes out what is to be computed next: one job, or several of a group; none if none waits."""
        first = self._next()
        if first is None:
            return []
        taken, rows = [first], first.num_rows
        if first.group is not None:
            for job in sorted(self._fair(self._jobs.values()), key=_age):
                fits = rows + job.num_rows <= self._config.max_batch_size
                if job is not first and job.rank == first.rank and job.group == first.group and fits:
                    taken.append(job)
                    rows += job.num_rows
        for job in taken:
            self.remove(job)
        return taken

    def served(self, owner: str, seconds: float) -> None:
        """Counts compute that was spent on a driver's behalf."""
        self._served_s[owner] = self._served_s.get(owner, self._floor_s) + seconds
        if len(self._served_s) > _MAX_OWNERS:
            idle = sorted((o for o in self._served_s if o not in self._counts), key=lambda o: self._served_s[o])
            for name in idle[: _MAX_OWNERS // 2]:
                del self._served_s[name]

    def _next(self) -> Job | None:
        return min(self._fair(self._jobs.values()), key=lambda job: (job.rank, job.number), default=None)

    def _fair(self, jobs: Iterable[Job]) -> list[Job]:
        """Those whose driver is not too far ahead of the others who wait."""
        if not self._counts:
            return []
        self._floor_s = max(self._floor_s, min(self._served_s[owner] for owner in self._counts))
        limit_s = self._floor_s + self._config.max_compute_lead_s
        return [job for job in jobs if job.rank is Rank.CONTROL or self._served_s[job.owner] <= limit_s]


def _age(job: Job) -> int:
    return job.number


def _busy(found: str, retry_s: float) -> RefusedError:
    return RefusedError("busy", f"expected room in the queue, found that {found}; try again in {retry_s:.1f} s")
