"""Who is let in, which job is next, and the thread that computes: bounds on memory and compute, and `Runtime`.

A request is admitted if its driver then holds no more bytes than are still free: one flooding driver gets half, two a
third each, and there is always room for another. That holds for all requests under way (their size is computed from
their message, before a byte of their tensors is read) and for those that wait to be computed.

The next job is the oldest of the highest priority (backward before tail before forward: a backward pass frees memory, a
forward pass takes more) of the drivers that had about the same compute; one that is `max_compute_lead_s` ahead of the
least served waiting driver goes after the others, so a flood of backward passes delays them by that lead, once.

Between two jobs `between` is called in the same thread: there a stage steps, so no step ever falls into a pass. An
exception of a job is that job's; one of `between` ends the runtime, and `failure` passes it on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

from trainer.errors import RefusedError, TrainerError
from trainer.network.rpc import PeerId
from trainer.network.rpc.token_buckets import count_down, remember
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

_FORWARD_SHARE = 0.75  # Of the queue's bytes, for forward passes.
_MAX_OWNERS = 1024
_EVALUATION_SHARES = (0.25, "this driver"), (0.5, "all drivers")  # Seconds of compute a second.
_EVALUATION_BURST_S = 10.0
_ALL = ""
_MAX_BROKEN = 10  # Computations in a row that end in an unforeseen error, after which the device is taken for lost.
_IDLE_INTERVAL_S = 0.5  # Between calls of `between` while there is nothing to compute.
_AVERAGED_S = 30.0  # Time constant of `busy` and `rows_per_s`.

ResultT = TypeVar("ResultT")


class MemoryBudget:
    """Bytes held on behalf of drivers, ``max_bytes`` of all together. For one thread at a time."""

    def __init__(self, max_bytes: int) -> None:
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._by_owner: Counter[PeerId] = Counter()

    def has_room(self, owner: PeerId, size_bytes: int, *, share: float = 1.0) -> bool:
        """Returns whether a driver may hold so many more bytes, of this share of all."""
        left_bytes, own_bytes = int(self._max_bytes * share) - self.size_bytes - size_bytes, self._by_owner[owner]
        return left_bytes >= (own_bytes + size_bytes if own_bytes else 0)

    def change(self, owner: PeerId, size_bytes: int) -> None:
        """Counts bytes that a driver holds from now on; negative: holds no more."""
        self.size_bytes += size_bytes
        count_down(self._by_owner, owner, -size_bytes)

    @contextmanager
    def held(self, owner: PeerId, size_bytes: int) -> Iterator[None]:
        """Holds bytes within the block; raises RefusedError (``busy``) if there is no room."""
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
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()
        """Seconds of compute that were left, and when."""

    def check(self, driver: PeerId) -> None:
        """Checks that a driver may have an evaluation now; raises RefusedError (``busy``) if not."""
        for owner, (share, who) in zip((driver, _ALL), _EVALUATION_SHARES, strict=True):
            left_s = self._left_s(owner, share)
            if left_s <= 0:
                raise RefusedError(
                    "busy",
                    f"expected evaluations to take {share:.0%} of the time at most, found that those of {who} took "
                    f"more; try again in {-left_s / share + 0.1:.1f} s",
                )

    def spend(self, driver: PeerId, compute_s: float) -> None:
        """Counts an evaluation's compute."""
        for owner, (share, _) in zip((driver, _ALL), _EVALUATION_SHARES, strict=True):
            left_s = self._left_s(owner, share) - compute_s
            remember(self._buckets, owner, (left_s, self._clock()), _MAX_OWNERS)

    def _left_s(self, owner: PeerId, share: float) -> float:
        left_s, at_s = self._buckets.get(owner, (_EVALUATION_BURST_S, self._clock()))
        return min(_EVALUATION_BURST_S, left_s + share * (self._clock() - at_s))


class Priority(IntEnum):
    """What is computed first."""

    CONTROL = 0  # This node's own business.
    BACKWARD = 1
    TAIL = 2
    FORWARD = 3  # Evaluations too: with a lower priority a busy stage would never answer one.


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The result of a job."""

    value: Any
    queue_s: float
    compute_s: float  # Of jobs computed together, its share by rows.


@dataclass(slots=True, eq=False)
class Job:
    """Something for the compute thread, on behalf of the driver ``owner``."""

    priority: Priority
    owner: PeerId
    item: Any
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    """Computes the items of jobs of one group; returns a result or an exception for each."""
    group: Hashable = None  # Jobs of one priority and group may be computed together; None: alone.
    num_rows: int = 1
    size_bytes: int = 0
    begin_before_s: float = float("inf")  # On the runtime's clock: a job not begun by then is given up.
    is_owed: bool = False  # It ends what was begun (the way back of a chain), and is let in however full the queue is.
    future: Future[Computed] = field(default_factory=Future)
    number: int = 0
    added_s: float = 0.0


class WaitingJobs:
    """Jobs that wait. For one thread at a time; the caller holds a lock."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._memory = MemoryBudget(config.max_queue_bytes)
        self._jobs: dict[int, Job] = {}  # By number: the oldest first.
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
        """Checks that a job may come in; raises RefusedError (``busy``), whose text says when to try again."""
        waiting, share = self._counts[owner], _FORWARD_SHARE if priority >= Priority.FORWARD else 1.0
        if priority is Priority.CONTROL:
            return
        if waiting >= self._config.max_queue_per_driver:
            found = f"this driver's {waiting} requests wait already, the most there may be"
        elif not self._memory.has_room(owner, size_bytes, share=share):
            found = f"{len(self._jobs)} requests of {self.size_bytes >> 20} MiB wait"
        else:
            return
        raise RefusedError("busy", f"expected room in the queue, found that {found}; try again in {retry_s:.1f} s")

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
        count_down(self._counts, job.owner)

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


@dataclass(frozen=True, slots=True)
class RuntimeFigures:
    """Load and speed of a runtime; jobs that wait are queued."""

    queued: int
    queued_bytes: int
    computed: int
    batch_rows: float  # Rows computed at once, a moving average.
    compute_s: float  # Seconds of a job, a moving average.
    rows_per_s: float  # While there was work, lately; 0: not known.
    busy: float  # Share of the recent time in which it computed.


class Runtime:
    """Computes jobs, one batch at a time; calls ``between`` in the same thread, now and then also if there are none."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        clock: Callable[[], float] = boottime_s,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.failure: Future[None] = Future()
        """Gets an exception when the runtime cannot go on, a result when it was stopped."""
        self._between = between
        self.clock = clock
        self._waiting = WaitingJobs(config)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="genesis-compute", daemon=True)
        self._stopping = self._refusing = self._woken = False
        self._computed = self._num_broken = 0
        self._batch_rows = self._compute_s = self._rows = self._busy_s = self._averaged_s = self._computed_s = 0.0
        self._decayed_s = clock()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Refuses waiting jobs and lets the current one end; returns whether the thread ended in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def refuse_jobs(self) -> None:
        """Refuses waiting and new jobs as ``stopping`` from now on, owed ones too, but for `control`.

        The current one ends. Any thread may call it: called in the compute thread, nothing is counted afterwards.
        """
        with self._changed:
            self._refusing = True
        self._refuse(lambda job: job.priority is not Priority.CONTROL)

    def wake(self) -> None:
        """Has `between` called soon, by the compute thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def check_room(self, priority: Priority, owner: str, size_bytes: int, *, is_owed: bool = False) -> None:
        """Checks that a job would be let in now, before work is put into its tensors; raises as `submit`."""
        with self._changed:
            if self._stopping or (self._refusing and priority is not Priority.CONTROL):
                raise _going_down()
            if not is_owed:
                retry_s = min(60.0, max(0.1, self._compute_s * len(self._waiting)))
                self._waiting.check_room(priority, owner, size_bytes, retry_s)

    def submit(self, job: Job) -> None:
        """Queues a job; its future gets the result. Raises RefusedError: ``busy`` or ``stopping``."""
        with self._changed:
            self.check_room(job.priority, job.owner, job.size_bytes, is_owed=job.is_owed)
            self._waiting.add(job, self.clock())
            self._changed.notify_all()

    async def compute(self, job: Job) -> Computed:
        """Queues a job and waits for it; removes it when cancelled. Raises as `submit`, and as the computation does."""
        self.submit(job)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            with self._changed:
                self._waiting.remove(job)
            raise

    async def control(self, function: Callable[[], ResultT]) -> ResultT:
        """Calls ``function`` in the compute thread, before any waiting job of a driver."""
        done = await self.compute(Job(Priority.CONTROL, "", None, lambda _: [function()]))
        result: ResultT = done.value
        return result

    @property
    def figures(self) -> RuntimeFigures:
        """Load and speed now."""
        with self._changed:
            self._decay()
            return RuntimeFigures(
                queued=len(self._waiting),
                queued_bytes=self._waiting.size_bytes,
                computed=self._computed,
                batch_rows=self._batch_rows,
                compute_s=self._compute_s,
                rows_per_s=self._rows / self._busy_s if self._busy_s > 1e-6 else 0.0,
                busy=min(1.0, self._busy_s / self._averaged_s) if self._averaged_s > 1e-6 else 0.0,
            )

    @property
    def computed_s(self) -> float:
        """Seconds in which it computed for drivers, since it was made."""
        return self._computed_s

    def _work(self) -> None:
        failure: Exception | None = None
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the compute thread cannot go on")
            failure = error
        with self._changed:
            self._stopping = True
        self._refuse(lambda job: True)
        if failure is None:
            self.failure.set_result(None)
        else:
            self.failure.set_exception(failure)

    def _refuse(self, condition: Callable[[Job], bool]) -> None:
        with self._changed:
            refused = self._waiting.take_if(condition)
        for job in refused:
            _fail(job, _going_down())

    def _turn(self) -> bool:
        """Computes one batch of jobs and calls `between`; returns whether to go on."""
        with self._changed:
            if not (self._waiting or self._woken or self._stopping):
                self._changed.wait(_IDLE_INTERVAL_S)
            self._woken = False
            if self._stopping:
                return False
            now_s = self.clock()
            expired, jobs = self._waiting.take_if(lambda job: job.begin_before_s < now_s), self._waiting.take()
        for job in expired:
            _fail(job, RefusedError("expired", "not begun within the time the request allows; nothing was counted"))
        jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
        if jobs:
            self._run(jobs)
        if self._between is not None:
            self._between()
        return True

    def _run(self, jobs: Sequence[Job]) -> None:
        began_s = self.clock()
        try:
            results = jobs[0].compute([job.item for job in jobs])
        except TrainerError as error:
            results = [error] * len(jobs)
        except Exception as error:
            logger.exception("computing for %s failed", jobs[0].owner[:12] or "this node")
            refusal = RefusedError("internal", f"the computation failed ({type(error).__name__}); the log says how")
            results = [refusal] * len(jobs)
            self._num_broken += 1
        else:
            self._num_broken = 0
        took_s, rows = self.clock() - began_s, sum(job.num_rows for job in jobs)
        with self._changed:
            self._count(jobs, rows, took_s)
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, BaseException):
                job.future.set_exception(result)
            else:
                job.future.set_result(Computed(result, began_s - job.added_s, took_s * job.num_rows / rows))
        if self._num_broken >= _MAX_BROKEN:
            raise TrainerError(
                f"expected computations to succeed, found {self._num_broken} in a row broken off by errors that are "
                "no fault of a request; the log has them (a device that is lost?)"
            )

    def _count(self, jobs: Sequence[Job], rows: int, took_s: float) -> None:
        if jobs[0].priority is Priority.CONTROL:
            return
        for job in jobs:
            self._waiting.served(job.owner, took_s * job.num_rows / rows)
        self._decay()
        self._rows += rows
        self._busy_s += took_s
        self._computed_s += took_s
        weight = 0.1 if self._computed else 1.0
        self._batch_rows += weight * (rows - self._batch_rows)
        self._compute_s += weight * (took_s / len(jobs) - self._compute_s)
        self._computed += len(jobs)

    def _decay(self) -> None:
        """Lets past sums fade; the time they stand for grows to the time constant."""
        now_s = self.clock()
        passed_s, self._decayed_s = max(0.0, now_s - self._decayed_s), now_s
        factor = math.exp(-passed_s / _AVERAGED_S)
        self._rows *= factor
        self._busy_s *= factor
        self._averaged_s = self._averaged_s * factor + _AVERAGED_S * (1.0 - factor)


def _going_down() -> RefusedError:
    return RefusedError("stopping", "this worker is going down; ask another of its stage")


def _fail(job: Job, error: TrainerError) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(error)
