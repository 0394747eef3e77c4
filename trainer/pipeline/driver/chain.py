"""Chain routing (spec P-12): each worker sends on to the next, and gradients come back the same way.

The driver sends ids and labels to the head and receives the loss; an activation crosses one link once, from worker to
worker. A failed chain is repeated *by way of the same workers*: each gives the answer it gave before, and does only
what was not done, so nothing is counted twice whichever of them did not answer. A worker leaves the route only if its
process is gone, or says that it has not counted the micro-batch and from then on will not. What the head reports as
done, the other workers are asked to confirm, with a message of a few bytes each.

How long each stage takes is not reported. A chain's time is shared out to its workers in the ratio of their estimates,
which over many routes finds the slow ones. A worker that another names as the one that failed is banned for a short
time at most, since that is hearsay.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable

from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.pipeline.driver.hub import HubRouter
from trainer.pipeline.driver.pool import Placement
from trainer.pipeline.driver.results import MicroBatchOutcome, Verdict, verdict_of
from trainer.pipeline.driver.router import (
    QUESTION_S,
    TAIL_UNITS,
    MicroBatchEndedError,
    MicroBatchInFlight,
    RoutingContext,
    patience_s,
)
from trainer.pipeline.driver.stage_caller import Answered
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.work import StageCredit

__all__ = ["ChainRouter"]

logger = logging.getLogger(__name__)

_HOP = "hop"
_CONTRADICTED = Verdict("contradicted", "counted", "ban")
"""The head says that a stage has counted it, and the stage that it has not."""
_SHUT = Verdict("refused", "unclear", "ban")
"""The driver itself finds that the worker accepts no connection."""
_NAMED = re.compile(r"\b(head|tail|body-[1-9][0-9]{0,3}) ([0-9a-f]{64})\b")
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0


class ChainRouter:
    """Takes micro-batches through the stages in one request each."""

    def __init__(self, context: RoutingContext) -> None:
        self._context = context
        self._hub = HubRouter(context)

    async def take(self, in_flight: MicroBatchInFlight) -> MicroBatchOutcome:
        """Takes a micro-batch through all stages, or returns why not; one that is to be audited goes by hub."""
        if self._context.auditor.draws():
            return await self._hub.take(in_flight, is_drawn=True)
        run = _ChainRun(self._context, in_flight)
        try:
            return await run.run()
        except MicroBatchEndedError as end:
            return end.outcome
        finally:
            run.release()


class _ChainRun:
    """One micro-batch's way along a route that changes as little as possible."""

    def __init__(self, context: RoutingContext, in_flight: MicroBatchInFlight) -> None:
        self._context = context
        self._in_flight = in_flight
        self._pools = context.pools
        self._route: dict[str, Placement] = {}
        self._avoid: dict[str, set[str]] = {stage: set() for stage in context.pools}
        self._units = in_flight.micro_batch.input_ids.shape[0] * TAIL_UNITS
        self._pause_s = _FIRST_PAUSE_S
        self._unclear_since_s: float | None = None
        self._has_failed = False
        """From then on workers may have counted it that have not said so, or have restarted."""

    async def run(self) -> MicroBatchOutcome:
        """Repeats the chain until every stage has counted it; raises MicroBatchEndedError if it goes no further."""
        context, in_flight = self._context, self._in_flight
        given = context.form.input_of(in_flight.micro_batch, None)
        while True:
            await self._complete()
            in_flight.check_lease()
            asked_s = time.monotonic()
            in_flight.is_unclear = True
            try:
                answered = await context.caller.chain(self._workers(), in_flight.micro_batch, given)
            except RpcError as error:
                context.noted(error)
                await self._after(error, asked_s)
                continue
            return await self._done(answered, asked_s)

    def release(self) -> None:
        """Gives up the places that are still held."""
        self._release(self._route)

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _complete(self) -> None:
        """Finds a worker for each stage that has none.

        Places are waited for in the order of the stages; those of later stages are given up meanwhile. Otherwise two
        micro-batches, each holding the place that the other needs, would wait until their leases end.
        """
        stages = list(self._pools)
        missing = [stage for stage in stages if stage not in self._route]
        if not missing:
            return
        self._in_flight.set_aside(False)
        self._release(stages[stages.index(missing[0]) :])
        for stage in missing:
            self._route[stage] = await self._context.placed(self._in_flight, stage, self._units, self._avoid[stage])
        self._route = {stage: self._route[stage] for stage in stages}
        for stage, placement in self._route.items():
            self._pools[stage].resumed(placement)

    def _release(self, stages: Iterable[str]) -> None:
        for stage in stages:
            if stage in self._route:
                self._pools[stage].released(self._route[stage])

    def _workers(self) -> list[StageWorker]:
        placements = [self._route[stage] for stage in self._pools]
        return [placement.worker.unpinned() if self._has_failed else placement.worker for placement in placements]

    async def _done(self, answered: Answered, asked_s: float) -> MicroBatchOutcome:
        """Has the others confirm what the head reports as done; raises MicroBatchEndedError if one denies it."""
        in_flight, took_s = self._in_flight, time.monotonic() - asked_s
        in_flight.is_unclear = False
        in_flight.passed(answered)
        head, *behind = self._pools
        for credit in await asyncio.gather(*map(self._credit, behind)):
            if isinstance(credit, str):
                # One of the route has lied, and which cannot be told: each vouches for those behind it. An honest one
                # is free again with its next chain; a liar is banned for twice as long the next time.
                for stage, placement in self._route.items():
                    self._pools[stage].blame(placement.worker, _CONTRADICTED, asked_s)
                raise in_flight.lost(credit, _CONTRADICTED.reason)
            in_flight.acknowledged(credit)
        estimates = {stage: self._pools[stage].estimate_s(it, self._units) for stage, it in self._route.items()}
        total_s = sum(estimates.values())
        for stage, placement in self._route.items():
            share_s = took_s * (estimates[stage] / total_s if total_s > 0 else 1.0 / len(estimates))
            self._pools[stage].timed(placement, self._units, share_s)
            self._pools[stage].done(placement)
        in_flight.counted(head, answered.body)
        return in_flight.done()

    async def _credit(self, stage: str) -> StageCredit | str:
        """Asks a worker behind the first for its credit; returns the stage's name if it denies having counted.

        One that has died since, or does not answer, is believed to have counted it, as the head says; its number of the
        micro-batch stays unknown.
        """
        worker, micro_batch = self._route[stage].worker.unpinned(), self._in_flight.micro_batch
        try:
            incarnation, credit = await self._context.caller.applied(
                worker, micro_batch, refuse_from_now=False, timeout_s=QUESTION_S
            )
        except RpcError as error:
            logger.info("%s does not say which process of it has counted %s: %s", worker, micro_batch.key, error)
        else:
            if credit is not None or incarnation == worker.incarnation:
                return credit or stage
        return StageCredit(stage=stage, incarnation=worker.incarnation, applied_number=0)

    async def _after(self, error: RpcError, asked_s: float) -> None:
        """Changes the route as far as needed to repeat it; raises MicroBatchEndedError if that is not possible."""
        stage, verdict = self._culprit(error)
        worker, pool = self._route[stage].worker, self._pools[stage]
        is_first = not self._has_failed and stage == next(iter(self._route))
        if is_first and verdict.effect == "none":
            # What it refuses later, those behind it may have counted by then.
            self._in_flight.is_unclear = self._has_failed = verdict.blame not in ("rest", "leave")
            self._replace(stage, verdict, asked_s)
            if verdict.blame == "rest":
                await self._pause()
            return
        is_repeated, self._has_failed = self._has_failed, True
        if self._unclear_since_s is None:
            self._unclear_since_s = time.monotonic()
        self._in_flight.num_retries += 1
        if verdict.effect == "counted":
            if not is_repeated:
                pool.blame(worker, verdict, asked_s)
            raise self._in_flight.lost(stage, "answer-gone")
        found = await self._context.liveness.probe(worker, min(QUESTION_S, self._left_s(stage)))
        if found == "gone":
            self._replace(stage, verdict, asked_s)
            return
        self._release(other for other in self._route if other != stage)  # The worker of that one is waited for.
        self._in_flight.set_aside(True)
        if found == "refused":
            pool.blame(worker, _SHUT, asked_s)  # It keeps what it has; nothing else is sent there.
        may_come = isinstance(error, PeerUnavailableError) or verdict.blame == "rest" or verdict.reason == _HOP
        if not may_come or not self._is_patient():
            await self._vacate(stage, verdict, asked_s)
        elif found == "unknown":  # If it is silent, nothing else is sent there; what it has may yet be answered.
            pool.blame(worker, verdict, asked_s)
        await self._pause()

    def _culprit(self, error: RpcError) -> tuple[str, Verdict]:
        """Returns the stage whose worker has failed, as far as can be told, and the verdict on it."""
        head = next(iter(self._route))
        if not isinstance(error, RefusedError) or not (error.reason == _HOP or error.reason.startswith(_HOP + "-")):
            return head, verdict_of(error)
        named = [match.groups() for match in _NAMED.finditer(str(error))]
        stages = [stage for stage, key in named if stage in self._route and self._route[stage].worker.key == key]
        stage = stages[-1] if stages else head
        if error.reason == _HOP:
            return stage, Verdict(_HOP, "unclear", "ban")
        said = verdict_of(RefusedError(error.reason.removeprefix(_HOP + "-"), str(error)))
        blame = "ban" if said.blame in ("firm-ban", "long-ban") else said.blame
        return stage, Verdict(said.reason, said.effect, blame, said.attempts)

    async def _vacate(self, stage: str, verdict: Verdict, asked_s: float) -> None:
        """Replaces a worker that says it neither has counted it nor will; ends it if the worker's answer is gone."""
        timeout_s = min(QUESTION_S, self._left_s(stage))
        worker, micro_batch = self._route[stage].worker.unpinned(), self._in_flight.micro_batch
        try:
            _, credit = await self._context.caller.applied(
                worker, micro_batch, refuse_from_now=True, timeout_s=timeout_s
            )
        except RpcError:
            return
        if credit is None:
            self._replace(stage, verdict, asked_s)
        elif verdict.reason in ("malformed", "malformed-answer"):
            self._pools[stage].blame(worker, verdict, asked_s)
            raise self._in_flight.lost(stage, "answer-gone")

    def _replace(self, stage: str, verdict: Verdict, asked_s: float) -> None:
        placement = self._route.pop(stage)
        self._unclear_since_s = None  # It is clear now what this one has done.
        self._avoid[stage].add(placement.worker.key)
        self._pools[stage].failed(placement, verdict, asked_s)
        self._in_flight.attempt_failed(stage, verdict)

    def _unclear_for_s(self) -> float:
        return 0.0 if self._unclear_since_s is None else time.monotonic() - self._unclear_since_s

    def _is_patient(self) -> bool:
        """Whether the same route is only repeated."""
        return self._unclear_for_s() < patience_s(self._context.config.unclear_s) <= self._in_flight.left_s()

    def _left_s(self, stage: str) -> float:
        """Returns the seconds left to find out what a stage has done; raises MicroBatchEndedError if there are none."""
        left_s = self._context.config.unclear_s - self._unclear_for_s()
        self._in_flight.check_lease()
        if left_s <= 0:
            raise self._in_flight.lost(stage, "unclear")
        return min(left_s, self._in_flight.left_s())

    async def _pause(self) -> None:
        self._in_flight.check_lease()
        await asyncio.sleep(min(self._pause_s, max(0.0, self._in_flight.left_s())))
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
