"""Keeps several micro-batches in flight, from where they are leased to where their outcomes are settled."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeVar

from trainer.errors import TrainerUsageError
from trainer.network.rpc import Endpoint
from trainer.pipeline.driver.auditing import Auditor
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.failure_detector import LivenessProbe
from trainer.pipeline.driver.pool import StagePool
from trainer.pipeline.driver.results import DriverStatus, Fate, MicroBatchResult, StepLoss
from trainer.pipeline.driver.router import MicroBatchInFlight, RoutingContext
from trainer.pipeline.driver.routes import ChainRoute, HubRoute
from trainer.pipeline.driver.stage_caller import LinkForm, StageCaller
from trainer.pipeline.driver.watching import StallDetector, StepBarrier
from trainer.pipeline.driver.workers import StageDirectory, StageWorker
from trainer.pipeline.protocol.work import MicroBatch, Settlement, Work

logger = logging.getLogger(__name__)

_MOST_ASIDE = 2  # Times `DriverConfig.max_in_flight`: micro-batches set aside beside those that go on.

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class PipelineDriver:
    """Drives micro-batches through the stages of a run; ``endpoint`` is the driver's own, started.

    ``target_tokens`` is of a stage's optimizer step; 0: unknown, so no losses by step, and not synchronous.
    ``audit_seed`` is of the audits' draws, unpredictable if None.
    """

    endpoint: Endpoint
    stages: Sequence[str]
    directory: StageDirectory
    work: Work
    form: LinkForm
    config: DriverConfig
    _: KW_ONLY
    target_tokens: int = 0
    on_result: Callable[[MicroBatchResult], None] | None = None
    on_step: Callable[[StepLoss], None] | None = None
    on_ban: Callable[[StageWorker, float, str], None] | None = None
    audit_seed: int | None = None

    def __post_init__(self) -> None:
        form, config = self.form, self.config
        if config.synchronous and self.target_tokens < 1:
            raise TrainerUsageError("driver.synchronous: expected the tokens of a step to be known, found 0")
        self._pools = {stage: StagePool(stage, config) for stage in self.stages}
        if self.on_ban is not None:
            for pool in self._pools.values():
                pool.on_ban = self.on_ban
        self._failures: Counter[str] = Counter()
        caller, liveness = StageCaller(self.endpoint, self.stages, form, config), LivenessProbe(self.directory)
        self._auditor = Auditor(self._pools, caller, form, config.audit_every, self._failures, self.audit_seed)
        self._context = RoutingContext(self._pools, caller, liveness, form, config, self._failures, self._auditor)
        self._stalls = StallDetector(self.endpoint, self._pools)
        self._step = StepLoss(0, 0.0, 0, 0)
        """Sums of the step to come. With several drivers, each sees its own share of every step."""
        self._barrier = StepBarrier(self.endpoint, self._pools, config.request_timeout_s)
        self._fates: Counter[Fate] = Counter()
        self._lost_by: Counter[str] = Counter()
        self._tokens = 0
        self._failed: list[BaseException] = []
        self._tasks: dict[asyncio.Task[None], MicroBatchInFlight] = {}
        self._has_ended = asyncio.Event()
        """Set when a micro-batch has ended or was set aside, so that there may be room for another."""
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Drives until there is no more work or `stop`, then until all in flight has ended, for `drain_s` at most.

        What is still in flight then is handed back where nobody can have counted it, and else left to the ledger's
        keeper. Raises TrainerError if micro-batches cannot be had or settled.
        """
        watching = asyncio.create_task(self._watch(), name="driver-watch")
        stopping = asyncio.create_task(self._stopping.wait(), name="driver-stop")
        stalls = asyncio.create_task(self._stalls.watch(), name="driver-stalls")
        try:
            while (micro_batch := await self._next(watching, stopping)) is not None:
                self._begin(micro_batch)
            await self._drain(stopping)
        finally:
            for task in (watching, stopping, stalls, *self._tasks):
                task.cancel()
            await asyncio.gather(watching, stopping, stalls, *self._tasks, return_exceptions=True)
            await self._auditor.close()

    def stop(self) -> None:
        """Begins nothing new; `run` returns soon."""
        self._stopping.set()

    def status(self) -> DriverStatus:
        """Returns the driver's state and counters."""
        return DriverStatus(
            in_flight=len(self._tasks),
            done=self._fates["done"],
            lost=self._fates["lost"],
            handed_back=self._fates["handed-back"],
            left=self._fates["left"],
            tokens=self._tokens,
            failures=dict(self._failures),
            lost_by=dict(self._lost_by),
            stalls={stage: pool.stalled_s() for stage, pool in self._pools.items()},
            stages=tuple(pool.status() for pool in self._pools.values()),
            audit=self._auditor.status(),
            silent=self._stalls.silent(),
        )

    async def _watch(self) -> None:
        """Passes the announced workers to the stages' pools, again and again."""
        while True:
            found = tuple(self.directory.workers())
            for stage, pool in self._pools.items():
                pool.update(worker for worker in found if worker.stage == stage)
            await asyncio.sleep(self.config.refresh_s)

    async def _next(self, watching: asyncio.Task[None], stopping: asyncio.Task[bool]) -> MicroBatch | None:
        """Returns the next micro-batch when there is room for it; None: nothing is begun any more."""
        while not self._stopping.is_set():
            if not self._has_room():
                self._has_ended.clear()
                is_step_over = not self._tasks and self.config.synchronous
                room = self._barrier.passed() if is_step_over else self._has_ended.wait()
                await self._first_of(room, watching, stopping)
            elif self.config.synchronous and not self._barrier.is_ready:
                await self._first_of(self._barrier.prepare(), watching, stopping)
            else:
                return await self._first_of(self.work.next(), watching, stopping)
        return None

    async def _first_of(
        self, coroutine: Coroutine[Any, Any, T], watching: asyncio.Task[None], stopping: asyncio.Task[bool]
    ) -> T | None:
        """Returns what ``coroutine`` returns, or raises; None if the driver is to stop first."""
        task = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait({task, watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _has_room(self) -> bool:
        most = self.config.max_in_flight
        num_aside = sum(in_flight.is_set_aside for in_flight in self._tasks.values())
        if len(self._tasks) - min(num_aside, _MOST_ASIDE * most) >= most:
            return False
        return not self.config.synchronous or self._barrier.begun_tokens < self.target_tokens

    def _begin(self, micro_batch: MicroBatch) -> None:
        self._barrier.begun_tokens += micro_batch.num_tokens
        is_chained = self.config.routing == "chain"
        is_drawn = is_chained and self._auditor.draws()
        kind = ChainRoute if is_chained and not is_drawn else HubRoute
        in_flight = kind(self._context, micro_batch, self._has_ended.set, is_drawn=is_drawn)
        task = asyncio.create_task(self._take(in_flight), name=f"micro-batch {micro_batch.key}")
        self._tasks[task] = in_flight
        task.add_done_callback(self._ended)

    async def _take(self, in_flight: MicroBatchInFlight) -> None:
        """Takes a micro-batch through the stages, settles it, and reports what became of it."""
        result, micro_batch = await in_flight.take(), in_flight.micro_batch
        outcome, fate = result.outcome, result.outcome.fate
        self._fates[fate] += 1
        if fate == "handed-back":
            self.work.hand_back(micro_batch)
        elif fate != "left":
            self.work.settle(
                Settlement(
                    micro_batch=micro_batch.key,
                    outcome=fate,
                    credits=outcome.credits,
                    num_tokens=outcome.num_tokens,
                    lost_at=outcome.stage,
                    reason=outcome.reason,
                )
            )
        if fate == "lost":
            self._lost_by[f"{outcome.stage}: {outcome.reason}"] += 1
            logger.warning("micro-batch %s is lost at %s (%s)", result.micro_batch, outcome.stage, outcome.reason)
        if fate != "done":
            self._barrier.begun_tokens -= micro_batch.num_tokens  # Others make up for it.
        if self.on_result is not None:
            self.on_result(result)
        if fate == "done":
            self._tokens += outcome.num_tokens
            self._add_to_step(outcome.loss_sum, outcome.num_tokens)

    def _add_to_step(self, loss_sum: float, num_tokens: int) -> None:
        """Adds a micro-batch's loss to its step, and reports the step if that completes it."""
        was = self._step
        sums = StepLoss(was.step, was.loss + loss_sum, was.num_tokens + num_tokens, was.micro_batches + 1)
        self._step = sums
        if not self.target_tokens or sums.num_tokens < self.target_tokens:
            return
        self._step = StepLoss(sums.step + 1, 0.0, 0, 0)
        if self.on_step is not None:
            self.on_step(replace(sums, loss=sums.loss / sums.num_tokens))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._has_ended.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.append(error)
            self._stopping.set()

    async def _drain(self, stopping: asyncio.Task[bool]) -> None:
        """Waits until all in flight has ended, after `stop` for `drain_s` at most; raises what one of them raised."""
        while self._tasks and not self._stopping.is_set():
            await asyncio.wait({*self._tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.drain_s)
        if self._failed:
            raise self._failed[0]
