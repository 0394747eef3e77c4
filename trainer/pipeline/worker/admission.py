"""Admission and order of requests: how much memory and compute drivers may take, and which job is computed next.

A request is admitted if its driver then holds no more bytes than are still free: one flooding driver gets half, two a
third each, and there is always room for another. That holds for all requests under way (their size is computed from
their message, before a byte of their tensors is read) and for those that wait to be computed.

The next job is the oldest of the highest priority (backward before tail before forward: a backward pass frees memory
and finishes work, a forward pass makes more of both). That holds among drivers that had about the same compute; one
that is `max_compute_lead_s` ahead of the least served of the waiting drivers goes after these, whatever it asks for. So
a driver that floods with backward passes delays the others by that lead, once.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from trainer.errors import RefusedError
from trainer.network.rpc import PeerId
from trainer.pipeline.worker.config import WorkerConfig

__all__ = ["Computed", "EvaluationBudget", "Job", "MemoryBudget", "Priority", "WaitingJobs"]

_FORWARD_SHARE = 0.75
"""Of the queue's bytes, for forward passes."""
_MAX_OWNERS = 1024
"""Drivers whose compute is remembered."""
_EVALUATION_SHARE, _EVALUATION_SHARE_OF_ALL = 0.25, 0.5
"""Seconds of compute a second, of one driver and of all."""
_EVALUATION_BURST_S = 10.0
_ALL = ""


class MemoryBudget:
    """Bytes held on behalf of drivers. For one thread at a time.

    Args:
        max_bytes: of all drivers.
    """

    def __init__(self, max_bytes: int) -> None:
        self.size_bytes = 0
        """Held now."""
        self._max_bytes = max_bytes
        self._by_owner: Counter[PeerId] = Counter()

    def has_room(self, owner: PeerId, size_bytes: int, *, share: float = 1.0) -> bool:
        """Returns whether a driver may hold so many more bytes, of this share of all."""
        left_bytes, own_bytes = int(self._max_bytes * share) - self.size_bytes - size_bytes, self._by_owner[owner]
        return left_bytes >= (own_bytes + size_bytes if own_bytes else 0)

    def change(self, owner: PeerId, size_bytes: int) -> None:
        """Counts bytes that a driver holds from now on; negative: holds no more."""
        self.size_bytes += size_bytes
        self._by_owner[owner] += size_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    @contextmanager
    def held(self, owner: PeerId, size_bytes: int) -> Iterator[None]:
        """Holds bytes within the block.

        Raises:
            RefusedError: ``busy``.
        """
        if not self.has_room(owner, size_bytes):
            raise RefusedError(
                "busy",
                f"expected room for {size_bytes >> 20} MiB, found {self.size_bytes >> 20} MiB of requests here, "
                f"{self._by_owner[owner] >> 20} MiB of this driver; try again in 1.0 s",
            )
        self.change(owner, size_bytes)
        try:
            yield
        finally:
            self.change(owner, -size_bytes)


class EvaluationBudget:
    """The share of compute that drivers may have for evaluations, which train nothing. For one event loop.

    A token bucket in seconds of compute for each driver, and one for all. A driver whose evaluations took more than its
    share is refused until time has made up for it. A driver that compares workers as `DriverConfig.audit_every` says
    uses some hundredth of that.

    Args:
        clock: seconds; any monotonic one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()
        """Seconds of compute that were left, and when."""

    def check(self, driver: PeerId) -> None:
        """Checks that a driver may have an evaluation now.

        Raises:
            RefusedError: ``busy``.
        """
        for owner, share, who in (
            (driver, _EVALUATION_SHARE, "this driver"),
            (_ALL, _EVALUATION_SHARE_OF_ALL, "all drivers"),
        ):
            left_s = self._left_s(owner, share)
            if left_s <= 0:
                raise RefusedError(
                    "busy",
                    f"expected evaluations to take {share:.0%} of the time at most, found that those of {who} took "
                    f"more; try again in {-left_s / share + 0.1:.1f} s",
                )

    def spend(self, driver: PeerId, compute_s: float) -> None:
        """Counts an evaluation's compute."""
        for owner, share in ((driver, _EVALUATION_SHARE), (_ALL, _EVALUATION_SHARE_OF_ALL)):
            self._buckets[owner] = (self._left_s(owner, share) - compute_s, self._clock())
            self._buckets.move_to_end(owner)
        while len(self._buckets) > _MAX_OWNERS:
            self._buckets.popitem(last=False)

    def _left_s(self, owner: PeerId, share: float) -> float:
        left_s, at_s = self._buckets.get(owner, (_EVALUATION_BURST_S, self._clock()))
        return min(_EVALUATION_BURST_S, left_s + share * (self._clock() - at_s))


class Priority(IntEnum):
    """What is computed first."""

    CONTROL = 0
    """This node's own business."""
    BACKWARD = 1
    TAIL = 2
    FORWARD = 3
    """Evaluations too: with a lower priority a busy stage would never answer one."""


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The result of a job."""

    value: Any
    queue_s: float
    """Time it waited."""
    compute_s: float
    """Time it took; of jobs computed together, its share by rows."""


@dataclass(slots=True, eq=False)
class Job:
    """Something for the compute thread."""

    priority: Priority
    owner: PeerId
    """The driver it is for."""
    item: Any
    """Argument of `compute`."""
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    """Computes the items of jobs of one group; returns a result or an exception for each."""
    group: Hashable = None
    """Jobs of one priority and group may be computed together; None: alone."""
    num_rows: int = 1
    size_bytes: int = 0
    begin_before_s: float = float("inf")
    """On the runtime's clock: a job not begun by then is given up."""
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
        self._memory = MemoryBudget(config.max_queue_bytes)
        self._jobs: dict[int, Job] = {}
        """By number: the oldest first."""
        self._numbers = itertools.count(1)
        self._counts: Counter[PeerId] = Counter()
        self._served_s: dict[PeerId, float] = {}
        self._floor_s = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def size_bytes(self) -> int:
        """Of all jobs."""
        return self._memory.size_bytes

    def check_room(self, priority: Priority, owner: PeerId, size_bytes: int, retry_s: float) -> None:
        """Checks that a job may come in.

        Raises:
            RefusedError: ``busy``; the text says when to try again.
        """
        if priority is Priority.CONTROL:
            return
        waiting = self._counts[owner]
        if waiting >= self._config.max_queue_per_driver:
            raise _busy(f"this driver's {waiting} requests wait already, the most there may be", retry_s)
        share = _FORWARD_SHARE if priority >= Priority.FORWARD else 1.0
        if not self._memory.has_room(owner, size_bytes, share=share):
            raise _busy(f"{len(self._jobs)} requests of {self.size_bytes >> 20} MiB wait", retry_s)

    def add(self, job: Job, now_s: float) -> None:
        """Adds a job; the caller has checked that there is room."""
        job.number, job.added_s = next(self._numbers), now_s
        if job.owner not in self._counts:
            self._served_s[job.owner] = max(self._served_s.get(job.owner, 0.0), self._floor_s)
        self._jobs[job.number] = job
        self._counts[job.owner] += 1
        self._memory.change(job.owner, job.size_bytes)

    def remove(self, job: Job) -> None:
        """Removes a job if it is here."""
        if self._jobs.pop(job.number, None) is None:
            return
        self._memory.change(job.owner, -job.size_bytes)
        self._counts[job.owner] -= 1
        if not self._counts[job.owner]:
            del self._counts[job.owner]

    def take_if(self, condition: Callable[[Job], bool]) -> list[Job]:
        """Removes and returns the jobs that meet a condition."""
        found = [job for job in self._jobs.values() if condition(job)]
        for job in found:
            self.remove(job)
        return found

    def take(self) -> list[Job]:
        """Removes and returns what is to be computed next: one job, several of a group, or none."""
        fair = self._fair()
        if not fair:
            return []
        first = min(fair, key=lambda job: (job.priority, job.number))
        taken, rows = [first], first.num_rows
        for job in fair if first.group is not None else ():
            fits = rows + job.num_rows <= self._config.max_batch_size
            if job is not first and (job.priority, job.group) == (first.priority, first.group) and fits:
                taken.append(job)
                rows += job.num_rows
        for job in taken:
            self.remove(job)
        return taken

    def served(self, owner: PeerId, seconds: float) -> None:
        """Counts compute that was spent for a driver."""
        self._served_s[owner] = self._served_s.get(owner, self._floor_s) + seconds
        if len(self._served_s) > _MAX_OWNERS:
            idle = sorted((o for o in self._served_s if o not in self._counts), key=lambda o: self._served_s[o])
            for name in idle[: _MAX_OWNERS // 2]:
                del self._served_s[name]

    def _fair(self) -> list[Job]:
        """Returns the jobs whose driver is not too far ahead of the other waiting drivers."""
        if not self._counts:
            return []
        self._floor_s = max(self._floor_s, min(self._served_s[owner] for owner in self._counts))
        limit_s = self._floor_s + self._config.max_compute_lead_s
        jobs = self._jobs.values()
        return [job for job in jobs if job.priority is Priority.CONTROL or self._served_s[job.owner] <= limit_s]


def _busy(found: str, retry_s: float) -> RefusedError:
    return RefusedError("busy", f"expected room in the queue, found that {found}; try again in {retry_s:.1f} s")
