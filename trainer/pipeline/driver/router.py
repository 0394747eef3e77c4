"""What hub and chain routing share: one micro-batch in flight, finding workers for it, and counting exactly once.

A request to count whose answer did not arrive is sent again: a worker answers a repetition as it did the first time,
and counts nothing twice. Where that is refused, or after `_PATIENCE_S`, the worker is asked whether it has counted, and
told not to count any more. If it has, and its answer is gone, the micro-batch is lost; if not, another worker may do
it; where it stays unclear, it is lost, or left to the ledger's keeper if the lease is over.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from trainer.errors import MalformedAnswerError, PeerUnavailableError, RpcError
from trainer.pipeline.driver.auditing import Auditor
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.failure_detector import LivenessProbe
from trainer.pipeline.driver.pool import Placement, StagePool
from trainer.pipeline.driver.results import Fate, HopTime, MicroBatchOutcome, MicroBatchResult, Verdict, verdict_of
from trainer.pipeline.driver.stage_caller import Answered, LinkForm, StageCaller
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.messages import StageAnswer
from trainer.pipeline.protocol.work import MicroBatch, StageCredit, boottime_s

FORWARD_UNITS, BACKWARD_UNITS, TAIL_UNITS = 1.0, 2.0, 3.0
"""Work per row: a backward pass takes twice as long as a forward pass."""
QUESTION_S = 5.0  # Seconds to wait for a worker's answer to whether it has counted a micro-batch.

_PATIENCE_S = 15.0
_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0
_BUSY_TIMES = 6  # How often a worker that has the forward pass is asked again before another one repeats the pass.
_INVALID_DATA = frozenset(("malformed", "nonfinite"))  # Refusals that the next driver would get as well.

Asking = Callable[[StageWorker], Awaitable[Answered]]  # Sends one request to a worker.


@dataclass(frozen=True, slots=True, eq=False)
class RoutingContext:
    """What the micro-batches of a driver share."""

    pools: Mapping[str, StagePool]
    caller: StageCaller
    liveness: LivenessProbe
    form: LinkForm
    config: DriverConfig
    failures: Counter[str]
    auditor: Auditor


class MicroBatchEndedError(Exception):
    """A micro-batch goes no further."""

    def __init__(self, outcome: MicroBatchOutcome) -> None:
        super().__init__(f"{outcome.fate}: {outcome.reason} at {outcome.stage}")
        self.outcome = outcome


@dataclass(eq=False, repr=False)
class MicroBatchInFlight(ABC):
    """A micro-batch on its way, and what is known of it.

    Whether it may be handed back, is lost, or is left to the ledger's keeper follows from two facts: which stages have
    acknowledged that they counted it, and whether one may have counted it without acknowledging.
    """

    context: RoutingContext
    micro_batch: MicroBatch
    on_set_aside: Callable[[], None]
    is_drawn: bool = False  # All its visits are audited.

    def __post_init__(self) -> None:
        self.is_set_aside = False
        """It waits for a worker that does not answer; others may go on in its place meanwhile."""
        self._pools = self.context.pools
        self._num_rows = self.micro_batch.input_ids.shape[0]
        self._places: dict[str, Placement] = {}  # Held, by stage.
        self._is_unclear = False  # A worker was asked to count it that has not answered yet.
        self._credits: dict[str, StageCredit] = {}
        self._attempts: defaultdict[str, float] = defaultdict(float)
        self._num_failed: Counter[str] = Counter()
        self._num_retries = 0
        self._hops: list[HopTime] = []
        self._loss_sum, self._num_tokens = 0.0, 0
        self._begun_s = time.monotonic()

    async def take(self) -> MicroBatchResult:
        """Takes it through all stages; returns what became of it, also when it is cancelled."""
        try:
            await self._run()
            outcome = self._outcome("done")
        except MicroBatchEndedError as end:
            outcome = end.outcome
        except asyncio.CancelledError:
            outcome = self._stopped("stopping").outcome
        finally:
            self._release(self._places)
        wall_s = time.monotonic() - self._begun_s
        return MicroBatchResult(self.micro_batch.key, outcome, wall_s, tuple(self._hops), self._num_retries)

    @abstractmethod
    async def _run(self) -> None:
        """Has every stage count it; raises MicroBatchEndedError if it goes no further."""

    def _lost(self, stage: str, reason: str) -> MicroBatchEndedError:
        """Returns the end of one not, or perhaps not, counted in a stage, while others have or may have."""
        return MicroBatchEndedError(self._outcome("lost", stage, reason))

    def _stopped(self, reason: str) -> MicroBatchEndedError:
        """Returns the end of one that may no longer be sent: handed back if then nobody can count it twice."""
        is_touched = self._is_unclear or bool(self._credits)
        return MicroBatchEndedError(self._outcome("left" if is_touched else "handed-back", None, reason))

    def _outcome(self, fate: Fate, stage: str | None = None, reason: str | None = None) -> MicroBatchOutcome:
        return MicroBatchOutcome(fate, tuple(self._credits.values()), self._loss_sum, self._num_tokens, stage, reason)

    def _counted(self, stage: str, body: StageAnswer) -> None:
        fields = body.model_dump(include={"incarnation", "applied_number", "shared_through"})
        self._credits[stage] = StageCredit(stage=stage, **fields)

    def _noted(self, error: RpcError) -> Verdict:
        verdict = verdict_of(error)
        self.context.failures[verdict.reason] += 1
        return verdict

    def _attempt_failed(self, stage: str, verdict: Verdict) -> None:
        """Notes a request that has failed with nothing counted; raises MicroBatchEndedError after the last attempt.

        The micro-batch is handed back where no stage can have counted it, and is lost otherwise: as long as its lease
        is renewed, nobody else would ever find out.
        """
        self._num_retries += 1
        self._num_failed[stage] += 1
        self._attempts[stage] += verdict.attempts
        if self._attempts[stage] < self.context.config.max_attempts:
            return
        if self._credits or self._is_unclear or verdict.reason in _INVALID_DATA:
            raise self._lost(stage, verdict.reason)
        raise self._stopped(verdict.reason)

    def _left_s(self) -> float:
        return self.micro_batch.send_before_s - boottime_s()

    def _check_lease(self) -> None:
        """Raises MicroBatchEndedError if its lease is over, so that nothing of it is sent any more."""
        if self._left_s() <= 0:
            raise self._stopped("lease")

    def _is_patient(self, waited_s: float) -> bool:
        """Whether a request is only repeated, before the worker is told not to count it any more."""
        return waited_s < min(_PATIENCE_S, self.context.config.unclear_s / 2) <= self._left_s()

    async def _pause(self, times: int, at_most_s: float = math.inf) -> None:
        pause_s = min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(times, 16), at_most_s, self._left_s())
        await asyncio.sleep(max(0.0, pause_s))

    def _set_aside(self, is_set_aside: bool) -> None:
        self.is_set_aside = is_set_aside
        if is_set_aside:
            self.on_set_aside()

    def _release(self, stages: Iterable[str]) -> None:
        for stage in stages:
            if stage in self._places:
                self._pools[stage].released(self._places[stage])

    async def _placed(self, stage: str, units: float, avoid: set[str]) -> Placement:
        """Waits for a worker, and a while longer before it goes to the same ones again."""
        pool = self._pools[stage]
        if avoid and avoid.issuperset(worker.key for worker in pool.usable()):
            await self._pause(1 + self._num_failed[stage])  # All of them had it.
        placement = await pool.acquire(units, avoid=avoid, left_s=self._left_s)
        if placement is None:
            raise self._stopped("lease")
        return placement

    async def _count(
        self, stage: str, units: float, placement_units: float, ask: Asking, placement: Placement | None = None
    ) -> tuple[Answered, StageWorker]:
        """Has a stage count it, once; returns the answer, and the worker that gave it.

        ``units`` is the work of the request, ``placement_units`` that of a place at another worker than ``placement``.
        """
        avoid: set[str] = set()
        num_busy = 0
        while True:
            if placement is None:
                placement = await self._placed(stage, placement_units, avoid)
            try:
                answered = await self._counted_at(placement, units, ask, num_busy < _BUSY_TIMES)
            except BaseException:
                self._pools[stage].released(placement)
                raise
            if answered is not None:
                self._hops.append(answered.hop)
                self._counted(stage, answered.body)
                self._pools[stage].done(placement)
                return answered, placement.worker
            if placement.reservation.open:  # The worker said that it is busy.
                num_busy += 1
                await self._pause(num_busy)
            else:
                avoid.add(placement.worker.key)
                placement = None

    async def _counted_at(self, placement: Placement, units: float, ask: Asking, may_repeat: bool) -> Answered | None:
        """Sends one request to count, and resolves its failure; raises MicroBatchEndedError if that ends it.

        None: nothing is counted there. The place is still open if the same worker may be asked again.
        """
        self._check_lease()
        stage = placement.worker.stage
        pool = self._pools[stage]
        worker, asked_s = pool.current(placement.worker), time.monotonic()
        self._is_unclear = True
        try:
            answered = await ask(worker)
        except RpcError as error:
            verdict = self._noted(error)
        else:
            pool.measured(placement, units, asked_s)
            pool.counted(placement)
            self._is_unclear = False
            return answered
        if verdict.blame == "rest" and may_repeat:
            self._is_unclear = False
            pool.blame(worker, verdict, asked_s)
            return None
        placement = Placement(worker, placement.reservation)
        if verdict.effect == "unclear":
            pool.blame(worker, verdict, asked_s)
            with self._waiting():
                found = await self._resolved(worker, ask)
            if isinstance(found, Answered):
                self._num_retries += 1
                self._is_unclear = False
                pool.recovered(placement)
                return found
            if found == "unclear":
                pool.failed(placement, verdict, asked_s)
                self._check_lease()
                raise self._lost(stage, "unclear")
            if found == "answer-gone":
                verdict = Verdict(verdict.reason, "counted", verdict.blame)
        self._is_unclear = False
        pool.failed(placement, verdict, asked_s)
        if verdict.effect == "counted":
            raise self._lost(stage, "answer-gone")
        self._attempt_failed(stage, verdict)
        return None

    async def _resolved(
        self, worker: StageWorker, ask: Asking
    ) -> Answered | Literal["answer-gone", "not-counted", "unclear"]:
        """Asks the worker that may have counted it until it is clear whether it has, for `unclear_s` at most."""
        begun_s, times, is_counted = time.monotonic(), 0, False

        def left_s() -> float:
            return min(self.context.config.unclear_s - (time.monotonic() - begun_s), self._left_s())

        while (limit_s := left_s()) > 0:
            try:
                async with asyncio.timeout(limit_s):
                    return await ask(worker)
            except TimeoutError:
                error: RpcError = PeerUnavailableError(
                    f"{worker}: expected an answer within {limit_s:.1f} s, found none"
                )
            except RpcError as failure:
                error = failure
            verdict, is_silent = verdict_of(error), isinstance(error, PeerUnavailableError)
            if is_silent and await self.context.liveness.probe(worker, min(QUESTION_S, limit_s)) == "gone":
                return "not-counted"
            may_come = is_silent or verdict.blame == "rest"
            if not (may_come and self._is_patient(time.monotonic() - begun_s)):
                says = await self._says_counted(worker, left_s())
                if says is False:
                    return "not-counted"
                is_counted = is_counted or says is True
                if says and (verdict.effect == "counted" or isinstance(error, MalformedAnswerError)):
                    return "answer-gone"
            worker = worker.unpinned()
            await self._pause(times, left_s())
            times += 1
        return "answer-gone" if is_counted else "unclear"

    async def _says_counted(self, worker: StageWorker, left_s: float) -> bool | None:
        """Tells a worker not to count it any more; returns whether it says that it has. None: it says nothing."""
        if left_s <= 0:
            return None
        try:
            _, credit = await self.context.caller.applied(
                worker, self.micro_batch, refuse_from_now=True, timeout_s=min(QUESTION_S, left_s)
            )
        except RpcError:
            return None
        return credit is not None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Gives up its places in other stages while it waits for one worker."""
        released = [stage for stage, placement in self._places.items() if placement.reservation.open]
        self._release(released)
        self._set_aside(True)
        try:
            yield
        finally:
            self._set_aside(False)
            for stage in released:
                self._pools[stage].resumed(self._places[stage])
