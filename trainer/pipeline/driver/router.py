"""What hub and chain routing share: the state of a micro-batch in flight, finding a worker, and counting exactly once.

Whether a micro-batch may be handed back, is lost, or has to be left to the ledger's keeper follows from two facts that
`MicroBatchInFlight` keeps: which stages have acknowledged that they counted it, and whether one may have counted it
without acknowledging.

`_OutcomeResolution` handles a request to count whose answer did not arrive. The same request is sent again: a worker
answers a repetition as it answered the first time, and counts nothing twice. A process that took its place in the
meantime counts the micro-batch itself, since what the other had counted died with it. Where the repetition is refused,
or after `patience_s`, the worker is asked whether it has counted the micro-batch, and told not to count it any more:
the process that answers that under the worker's key is the only one that could.

    counted, with the answer ── as if nothing had happened
    counted, answer gone ────── lost: nobody knows its gradient any more
    not counted, or gone ────── another worker may do it
    unclear ─────────────────── lost, or left to the ledger's keeper where the lease is over
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError, RpcError
from trainer.pipeline.driver.auditing import Auditor
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.failure_detector import LivenessProbe
from trainer.pipeline.driver.pool import Placement, StagePool
from trainer.pipeline.driver.results import Fate, HopTime, MicroBatchOutcome, MicroBatchResult, Verdict, verdict_of
from trainer.pipeline.driver.stage_caller import Answered, LinkForm, StageCaller
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.messages import StageAnswer
from trainer.pipeline.protocol.work import MicroBatch, StageCredit, boottime_s

__all__ = [
    "BACKWARD_UNITS",
    "FORWARD_UNITS",
    "QUESTION_S",
    "TAIL_UNITS",
    "MicroBatchEndedError",
    "MicroBatchInFlight",
    "RoutingContext",
    "patience_s",
]

FORWARD_UNITS, BACKWARD_UNITS, TAIL_UNITS = 1.0, 2.0, 3.0
"""Work per row: a backward pass takes twice as long as a forward pass."""
QUESTION_S = 5.0
"""Seconds to wait for a worker's answer to whether it has counted a micro-batch."""

_PATIENCE_S = 15.0
_FIRST_REPEAT_S = 0.05
_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_BUSY_TIMES = 6
"""How often a worker that has the forward pass is asked again before another one repeats the pass."""
_INVALID_DATA = frozenset(("malformed", "nonfinite"))
"""Refusals that the next driver would get as well."""

Asking = Callable[[StageWorker], Awaitable[Answered]]
"""Sends one request to a worker."""


class MicroBatchEndedError(Exception):
    """A micro-batch goes no further."""

    def __init__(self, outcome: MicroBatchOutcome) -> None:
        super().__init__(f"{outcome.fate}: {outcome.reason} at {outcome.stage}")
        self.outcome = outcome


class MicroBatchInFlight:
    """What is known so far of a micro-batch in flight, and so which outcomes are possible."""

    def __init__(self, micro_batch: MicroBatch, max_attempts: int, on_set_aside: Callable[[], None]) -> None:
        self.micro_batch = micro_batch
        self.num_retries = 0
        self.is_unclear = False
        """Whether a worker was asked to count it that has not answered yet."""
        self.is_set_aside = False
        """Whether it waits for a worker that does not answer; others may go on in its place meanwhile."""
        self._on_set_aside = on_set_aside
        self._max_attempts = max_attempts
        self._attempts: dict[str, float] = {}
        self._num_failed: Counter[str] = Counter()
        self._begun_s = time.monotonic()
        self._hops: list[HopTime] = []
        self._credits: dict[str, StageCredit] = {}
        self._loss_sum = 0.0
        self._num_tokens = 0

    def left_s(self) -> float:
        """Returns the seconds for which it may still be sent."""
        return self.micro_batch.send_before_s - boottime_s()

    def check_lease(self) -> None:
        """Raises MicroBatchEndedError if its lease is over, so that nothing of it is sent any more."""
        if self.left_s() <= 0:
            raise self.stopped("lease")

    def set_aside(self, is_set_aside: bool) -> None:
        """Notes that it begins to wait for a worker that does not answer, or goes on."""
        self.is_set_aside = is_set_aside
        if is_set_aside:
            self._on_set_aside()

    def passed(self, answered: Answered) -> None:
        """Notes an answered request."""
        self._hops.append(answered.hop)

    def counted(self, stage: str, body: StageAnswer) -> None:
        """Notes that a stage has counted it, with its answer."""
        fields = body.model_dump(include={"incarnation", "applied_number", "shared_through"})
        self.acknowledged(StageCredit(stage=stage, **fields))
        if body.loss_sum is not None:
            self._loss_sum, self._num_tokens = body.loss_sum, body.num_tokens

    def acknowledged(self, credit: StageCredit) -> None:
        """Notes that a stage is said to have counted it."""
        self._credits[credit.stage] = credit

    def num_failed(self, stage: str) -> int:
        """Returns how many requests in a stage have failed with nothing counted."""
        return self._num_failed[stage]

    def attempt_failed(self, stage: str, verdict: Verdict) -> None:
        """Notes a request that has failed with nothing counted.

        After the last attempt the micro-batch is handed back where no stage can have counted it, and is lost otherwise:
        as long as its lease is renewed, nobody else would ever find out.

        Raises:
            MicroBatchEndedError: it was the last attempt.
        """
        self.num_retries += 1
        self._num_failed[stage] += 1
        self._attempts[stage] = self._attempts.get(stage, 0.0) + verdict.attempts
        if self._attempts[stage] < self._max_attempts:
            return
        if self._credits or self.is_unclear or verdict.reason in _INVALID_DATA:
            raise self.lost(stage, verdict.reason)
        raise self.stopped(verdict.reason)

    def done(self) -> MicroBatchOutcome:
        """Returns the outcome if every stage has counted it."""
        return self._outcome("done")

    def lost(self, stage: str, reason: str) -> MicroBatchEndedError:
        """Returns the end of one not, or perhaps not, counted in a stage, while others have or may have."""
        return MicroBatchEndedError(self._outcome("lost", stage, reason))

    def stopped(self, reason: str) -> MicroBatchEndedError:
        """Returns the end of one that may no longer be sent: handed back if then nobody can count it twice."""
        is_touched = self.is_unclear or bool(self._credits)
        return MicroBatchEndedError(self._outcome("left" if is_touched else "handed-back", None, reason))

    def result(self, outcome: MicroBatchOutcome) -> MicroBatchResult:
        """Returns the outcome with what it took."""
        wall_s = time.monotonic() - self._begun_s
        return MicroBatchResult(self.micro_batch.key, outcome, wall_s, tuple(self._hops), self.num_retries)

    def _outcome(self, fate: Fate, stage: str | None = None, reason: str | None = None) -> MicroBatchOutcome:
        return MicroBatchOutcome(fate, tuple(self._credits.values()), self._loss_sum, self._num_tokens, stage, reason)


def patience_s(unclear_s: float) -> float:
    """Returns the seconds for which a request is only repeated, before the worker is told not to count it any more."""
    return min(_PATIENCE_S, unclear_s / 2)


@dataclass(frozen=True, slots=True)
class _OutcomeResolution:
    """Asks the worker that may have counted a micro-batch until it is clear whether it has."""

    caller: StageCaller
    liveness: LivenessProbe
    unclear_s: float
    """Seconds after which it stays unclear."""

    async def resolve(
        self, worker: StageWorker, micro_batch: MicroBatch, ask: Asking
    ) -> Answered | Literal["answer-gone", "not-counted", "unclear"]:
        """Finds out what has become of a request."""
        begun_s, pause_s, is_counted = time.monotonic(), _FIRST_REPEAT_S, False

        def lease_s() -> float:
            return micro_batch.send_before_s - boottime_s()

        def left_s() -> float:
            return min(self.unclear_s - (time.monotonic() - begun_s), lease_s())

        while (limit_s := left_s()) > 0:
            try:
                async with asyncio.timeout(limit_s):
                    return await ask(worker)
            except (RpcError, TimeoutError) as failure:
                error = failure
            is_silent = isinstance(error, PeerUnavailableError | TimeoutError)
            if is_silent and await self.liveness.probe(worker, min(QUESTION_S, limit_s)) == "gone":
                return "not-counted"
            may_come = isinstance(error, TimeoutError) or is_silent or verdict_of(error).blame == "rest"
            is_patient = time.monotonic() - begun_s < patience_s(self.unclear_s) <= lease_s()
            if not may_come or not is_patient:
                says = await self._is_counted(worker, micro_batch, left_s())
                if says is False or (says is True and _is_gone_for_good(error)):
                    return "answer-gone" if says else "not-counted"
                is_counted = is_counted or says is True
            worker = worker.unpinned()
            await asyncio.sleep(min(pause_s, max(0.0, left_s())))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return "answer-gone" if is_counted else "unclear"

    async def _is_counted(self, worker: StageWorker, micro_batch: MicroBatch, left_s: float) -> bool | None:
        """Returns what the worker says of itself; None if it says nothing."""
        if left_s <= 0:
            return None
        timeout_s = min(QUESTION_S, left_s)
        try:
            _, credit = await self.caller.applied(worker, micro_batch, refuse_from_now=True, timeout_s=timeout_s)
        except RpcError:
            return None
        return credit is not None


def _is_gone_for_good(error: RpcError | TimeoutError) -> bool:
    """Whether an answer that was given once will not be given again, or not better."""
    return isinstance(error, MalformedAnswerError) or (
        isinstance(error, RefusedError) and error.reason in ("already-applied", "counted-for-another")
    )


class RoutingContext:
    """What a driver's routing works with."""

    def __init__(
        self,
        pools: Mapping[str, StagePool],
        caller: StageCaller,
        liveness: LivenessProbe,
        form: LinkForm,
        config: DriverConfig,
        audit_seed: int | None = None,
    ) -> None:
        self.pools = pools
        self.caller = caller
        self.liveness = liveness
        self.form = form
        self.config = config
        self.failures: Counter[str] = Counter()
        """Failed requests by reason."""
        self.auditor = Auditor(pools, caller, form, config.audit_every, self.failures, audit_seed)
        self._resolution = _OutcomeResolution(caller, liveness, config.unclear_s)

    async def placed(self, in_flight: MicroBatchInFlight, stage: str, units: float, avoid: set[str]) -> Placement:
        """Waits for a worker for a micro-batch, and a while longer before it goes to the same ones again.

        Raises:
            MicroBatchEndedError: its lease is over.
        """
        if avoid and avoid.issuperset(worker.key for worker in self.pools[stage].usable()):
            await self._pause(in_flight, in_flight.num_failed(stage))  # All of them had it.
        placement = await self.pools[stage].acquire(units, avoid=avoid, left_s=in_flight.left_s)
        if placement is None:
            raise in_flight.stopped("lease")
        return placement

    async def count(
        self,
        in_flight: MicroBatchInFlight,
        placement: Placement | None,
        stage: str,
        units: float,
        placement_units: float,
        ask: Asking,
        held: Sequence[Placement] = (),
    ) -> tuple[Answered, StageWorker]:
        """Has a stage count a micro-batch, once; returns the answer, and the worker that gave it.

        Args:
            in_flight: the micro-batch.
            placement: its place in the stage, if it has one already.
            stage: which.
            units: work of the request.
            placement_units: work of a place at another worker.
            ask: sends the request to a worker.
            held: its places in other stages.

        Raises:
            MicroBatchEndedError: it goes no further.
        """
        avoid: set[str] = set()
        num_busy = 0
        while True:
            if placement is None:
                placement = await self.placed(in_flight, stage, placement_units, avoid)
            try:
                answered = await self._counted_at(in_flight, placement, units, ask, num_busy < _BUSY_TIMES, held)
            except BaseException:
                self.pools[stage].released(placement)
                raise
            if answered is not None:
                in_flight.passed(answered)
                self.pools[stage].done(placement)
                return answered, placement.worker
            if placement.reservation.open:  # The worker said that it is busy.
                await self._pause(in_flight, num_busy)
                num_busy += 1
            else:
                avoid.add(placement.worker.key)
                placement = None

    def noted(self, error: RpcError) -> Verdict:
        """Counts a failed request; returns the verdict on it."""
        verdict = verdict_of(error)
        self.failures[verdict.reason] += 1
        return verdict

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _counted_at(
        self,
        in_flight: MicroBatchInFlight,
        placement: Placement,
        units: float,
        ask: Asking,
        may_repeat: bool,
        held: Sequence[Placement],
    ) -> Answered | None:
        """Sends one request to count, and resolves its failure; raises MicroBatchEndedError if that ends it.

        Returns:
            None: nothing is counted there. The place is still open if the same worker may be asked again.
        """
        in_flight.check_lease()
        stage = placement.worker.stage
        pool = self.pools[stage]
        worker, asked_s = pool.current(placement.worker), time.monotonic()
        in_flight.is_unclear = True
        try:
            answered = await ask(worker)
        except RpcError as error:
            verdict = self.noted(error)
        else:
            pool.measured(placement, units, asked_s)
            pool.counted(placement)
            in_flight.is_unclear = False
            return answered
        if verdict.blame == "rest" and may_repeat:
            in_flight.is_unclear = False
            pool.blame(worker, verdict, asked_s)
            return None
        placement = Placement(worker, placement.reservation)
        if verdict.effect == "unclear":
            pool.blame(worker, verdict, asked_s)
            with self._set_aside(in_flight, held):
                found = await self._resolution.resolve(worker, in_flight.micro_batch, ask)
            if isinstance(found, Answered):
                in_flight.num_retries += 1
                in_flight.is_unclear = False
                pool.recovered(placement)
                return found
            if found == "unclear":
                pool.failed(placement, verdict, asked_s)
                in_flight.check_lease()
                raise in_flight.lost(stage, "unclear")
            if found == "answer-gone":
                verdict = Verdict(verdict.reason, "counted", verdict.blame)
        in_flight.is_unclear = False
        pool.failed(placement, verdict, asked_s)
        if verdict.effect == "counted":
            raise in_flight.lost(stage, "answer-gone")
        in_flight.attempt_failed(stage, verdict)
        return None

    @contextmanager
    def _set_aside(self, in_flight: MicroBatchInFlight, held: Sequence[Placement]) -> Iterator[None]:
        """Gives up the micro-batch's places, here and in other stages, while it waits for one worker."""
        released = [placement for placement in held if placement.reservation.open]
        for placement in released:
            self.pools[placement.worker.stage].released(placement)
        in_flight.set_aside(True)
        try:
            yield
        finally:
            in_flight.set_aside(False)
            for placement in released:
                self.pools[placement.worker.stage].resumed(placement)

    async def _pause(self, in_flight: MicroBatchInFlight, times: int) -> None:
        await asyncio.sleep(min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(times, 16), max(0.0, in_flight.left_s())))
