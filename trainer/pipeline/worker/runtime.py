"""`Runtime`: the compute thread, the order of its jobs, and what it does between them.

Jobs come from the event loop, `WaitingJobs` chooses the next, and between two jobs `between` is called in the same
thread: there a stage steps, so no step ever falls into a pass. An exception of a job is that job's. An exception of
`between` (an optimizer or a round that cannot go on) ends the runtime, and `failure` passes it on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from trainer.errors import RefusedError, TrainerError
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.worker.admission import Computed, Job, Priority, WaitingJobs
from trainer.pipeline.worker.config import WorkerConfig

__all__ = ["Runtime", "RuntimeFigures"]

logger = logging.getLogger(__name__)

_MAX_BROKEN = 10
"""Computations in a row that end in an unforeseen error, after which the device is taken for lost."""
_IDLE_INTERVAL_S = 0.5
"""Between calls of `between` while there is nothing to compute."""
_AVERAGED_S = 30.0
"""Time constant of `busy` and `rows_per_s`."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class RuntimeFigures:
    """Load and speed of a runtime."""

    queued: int
    """Jobs that wait."""
    queued_bytes: int
    computed: int
    """Jobs done since the start."""
    batch_rows: float
    """Rows computed at once, a moving average."""
    compute_s: float
    """Seconds of a job, a moving average."""
    rows_per_s: float
    """While there was work, lately; 0: not known."""
    busy: float
    """Share of the recent time in which it computed."""


class Runtime:
    """Computes jobs, one batch at a time.

    Args:
        config: the bounds of its queue.
        clock: seconds; CLOCK_BOOTTIME but in tests.
        between: called in the compute thread between jobs, and now and then while there are none.
    """

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
        self._clock = clock
        self._waiting = WaitingJobs(config)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="genesis-compute", daemon=True)
        self._stopping = False
        self._refusing = False
        self._woken = False
        self._computed = 0
        self._num_broken = 0
        self._batch_rows = self._compute_s = self._rows = self._busy_s = 0.0
        self._averaged_s = 0.0
        self._decayed_s = clock()

    @property
    def now_s(self) -> float:
        """On its clock."""
        return self._clock()

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
        """Computes nothing but this node's own business (`control`) from now on, jobs that are ``owed`` included.

        Waiting and new jobs fail as ``stopping``; the current one ends. Any thread may call it: called in the compute
        thread, nothing is counted afterwards.
        """
        with self._changed:
            self._refusing = True
            refused = self._waiting.take_if(lambda job: job.priority is not Priority.CONTROL)
        for job in refused:
            _fail(job, _going_down())

    def wake(self) -> None:
        """Has `between` called soon, by the compute thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def check_room(self, priority: Priority, owner: str, size_bytes: int, *, owed: bool = False) -> None:
        """Checks that a job would be let in now, before work is put into its tensors; ``owed`` as in `submit`.

        Raises:
            RefusedError: ``busy`` or ``stopping``.
        """
        with self._changed:
            if self._stopping or (self._refusing and priority is not Priority.CONTROL):
                raise _going_down()
            if owed:
                return
            retry_s = min(60.0, max(0.1, self._compute_s * len(self._waiting)))
            self._waiting.check_room(priority, owner, size_bytes, retry_s)

    def submit(self, job: Job, *, owed: bool = False) -> None:
        """Queues a job; its future gets the result.

        Args:
            job: what to compute.
            owed: it ends what was begun (the way back of a chain), and is let in however full the queue is.

        Raises:
            RefusedError: ``busy`` or ``stopping``.
        """
        with self._changed:
            self.check_room(job.priority, job.owner, job.size_bytes, owed=owed)
            self._waiting.add(job, self._clock())
            self._changed.notify_all()

    async def compute(self, job: Job, *, owed: bool = False) -> Computed:
        """Queues a job and waits for it; removes it when cancelled.

        Raises:
            RefusedError: ``busy``, ``stopping``, ``expired``, or as the computation raised.
            TrainerError: the computation's own.
        """
        self.submit(job, owed=owed)
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

    def _work(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the compute thread cannot go on")
            self._end(error)
        else:
            self._end(None)

    def _turn(self) -> bool:
        """Computes one batch of jobs and calls `between`; returns whether to go on."""
        with self._changed:
            if not (self._waiting or self._woken or self._stopping):
                self._changed.wait(_IDLE_INTERVAL_S)
            self._woken = False
            if self._stopping:
                return False
            now_s = self._clock()
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
        began_s = self._clock()
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
        took_s, rows = self._clock() - began_s, sum(job.num_rows for job in jobs)
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
        weight = 0.1 if self._computed else 1.0
        self._batch_rows += weight * (rows - self._batch_rows)
        self._compute_s += weight * (took_s / len(jobs) - self._compute_s)
        self._computed += len(jobs)

    def _decay(self) -> None:
        """Lets past sums fade; the time they stand for grows to the time constant."""
        now_s = self._clock()
        passed_s, self._decayed_s = max(0.0, now_s - self._decayed_s), now_s
        factor = math.exp(-passed_s / _AVERAGED_S)
        self._rows *= factor
        self._busy_s *= factor
        self._averaged_s = self._averaged_s * factor + _AVERAGED_S * (1.0 - factor)

    def _end(self, error: Exception | None) -> None:
        with self._changed:
            self._stopping = True
            left = self._waiting.take_if(lambda job: True)
        for job in left:
            _fail(job, _going_down())
        if error is None:
            self.failure.set_result(None)
        else:
            self.failure.set_exception(error)


def _going_down() -> RefusedError:
    return RefusedError("stopping", "this worker is going down; ask another of its stage")


def _fail(job: Job, error: TrainerError) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(error)
