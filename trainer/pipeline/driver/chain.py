"""Chain routing (spec P-12): each worker sends on to the next, and gradients come back the same way.

The driver sends ids and labels to the head and hears of the loss; an activation crosses one link once, from worker to
worker. A failed chain is tried again *by way of the same workers*: each answers what it has answered before, and does
only what was not done, so nothing is counted twice whichever of them did not answer. A worker leaves the route only if
its process is gone, or says that it has not counted the micro-batch, and from then on will not. What the head says is
done, the others are asked to confirm, with a message of some bytes each.

How long each stage takes is not told; a chain's time is shared out to its workers in the ratio of what was known of
them, which over many routes finds the slow ones. A worker named by another as the one that failed is banned for a
short time at most, since that is hearsay.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable

from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.pipeline.driver.asking import Answered
from trainer.pipeline.driver.hub import HubRouter
from trainer.pipeline.driver.in_flight import MicroBatchEndedError, MicroBatchInFlight
from trainer.pipeline.driver.outcome_resolution import patience_s
from trainer.pipeline.driver.pool import Placement
from trainer.pipeline.driver.results import Outcome, Verdict, verdict_of
from trainer.pipeline.driver.router import TAIL_UNITS, RoutingContext
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.work import StageCredit

__all__ = ["ChainRouter"]

logger = logging.getLogger(__name__)

_HOP = "hop"
_CONTRADICTED = Verdict("contradicted", "counted", "ban")
"""The head says that a stage has counted it, and the stage that it has not."""
_SHUT = Verdict("refused", "unclear", "ban")
"""The driver itself finds that no connection to it is taken."""
_NAMED = re.compile(r"\b(head|tail|body-[1-9][0-9]{0,3}) ([0-9a-f]{64})\b")
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0
_QUESTION_S = 5.0


class ChainRouter:
    """Takes micro-batches through the stages in one request each.

    Args:
        desk: the driver's.
    """

    def __init__(self, desk: RoutingContext) -> None:
        self._desk = desk
        self._hub = HubRouter(desk)

    async def take(self, journey: MicroBatchInFlight) -> Outcome:
        """See `Router.take`; one that is to be audited goes by hub."""
        if self._desk.auditor.draws():
            return await self._hub.take(journey, is_drawn=True)
        trip = _Trip(self._desk, journey)
        try:
            return await trip.run()
        except MicroBatchEndedError as end:
            return end.outcome
        finally:
            trip.release()


class _Trip:
    """One micro-batch's way along a route that changes as little as it can."""

    def __init__(self, desk: RoutingContext, journey: MicroBatchInFlight) -> None:
        self._desk = desk
        self._journey = journey
        self._route: dict[str, Placement] = {}
        self._avoid: dict[str, set[str]] = {stage: set() for stage in desk.pools}
        self._units = journey.micro_batch.input_ids.shape[0] * TAIL_UNITS
        self._pause_s = _FIRST_PAUSE_S
        self._unclear_since_s: float | None = None
        self._has_failed = False
        """From then on workers may have counted it that have not said so, or have restarted."""

    async def run(self) -> Outcome:
        """Until every stage has counted it.

        Raises:
            MicroBatchEndedError: it goes no further.
        """
        desk, journey = self._desk, self._journey
        given = desk.form.input_of(journey.micro_batch, None)
        while True:
            await self._complete()
            desk.may_send(journey)
            asked_s = time.monotonic()
            journey.is_unclear = True
            try:
                answered = await desk.caller.chain(self._workers(), journey.micro_batch, given)
            except RpcError as error:
                desk.noted(error)
                await self._after(error, asked_s)
                continue
            return await self._done(answered, asked_s)

    def release(self) -> None:
        """Gives up the places that are still held."""
        self._release(self._route)

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _complete(self) -> None:
        """Finds a worker for each stage that has none.

        Places are waited for in the order of the stages: while one is, those behind it are given up for so long. Two
        micro-batches, each with the place that the other one waits for, would wait until their leases end.

        Raises:
            MicroBatchEndedError: its lease is over.
        """
        stages = list(self._desk.pools)
        missing = [stage for stage in stages if stage not in self._route]
        if not missing:
            return
        self._journey.set_aside(False)
        self._release(stages[stages.index(missing[0]) :])
        for stage in missing:
            self._route[stage] = await self._desk.placed(self._journey, stage, self._units, self._avoid[stage])
        self._route = {stage: self._route[stage] for stage in stages}
        for stage, placement in self._route.items():
            self._desk.pools[stage].resumed(placement)

    def _release(self, stages: Iterable[str]) -> None:
        for stage in stages:
            if stage in self._route:
                self._desk.pools[stage].released(self._route[stage])

    def _workers(self) -> list[StageWorker]:
        placements = [self._route[stage] for stage in self._desk.pools]
        return [placement.worker.unpinned() if self._has_failed else placement.worker for placement in placements]

    async def _done(self, answered: Answered, asked_s: float) -> Outcome:
        """What the head says is done, confirmed by the others.

        Raises:
            MicroBatchEndedError: one of them denies it.
        """
        journey, took_s = self._journey, time.monotonic() - asked_s
        journey.is_unclear = False
        journey.passed(answered)
        head, *behind = self._desk.pools
        for credit in await asyncio.gather(*(self._credit(stage) for stage in behind)):
            if isinstance(credit, str):
                self._blame_all(asked_s)
                raise journey.lost(credit, _CONTRADICTED.reason)
            journey.acknowledged(credit)
        self._share_out(took_s)
        journey.counted(head, answered.body)
        return journey.done()

    def _blame_all(self, asked_s: float) -> None:
        """One of the route has lied, and which cannot be told: each of them vouches for those behind it.

        Whoever is honest is free again with its next chain; whoever is not, is banned for twice as long the next time.
        """
        for stage, placement in self._route.items():
            self._desk.pools[stage].blame(placement.worker, _CONTRADICTED, asked_s)

    def _share_out(self, took_s: float) -> None:
        estimates = {
            stage: self._desk.pools[stage].estimate_s(placement, self._units)
            for stage, placement in self._route.items()
        }
        in_all_s = sum(estimates.values())
        for stage, placement in self._route.items():
            share_s = took_s * (estimates[stage] / in_all_s if in_all_s > 0 else 1.0 / len(estimates))
            self._desk.pools[stage].told(placement, self._units, share_s)
            self._desk.pools[stage].done(placement)

    async def _credit(self, stage: str) -> StageCredit | str:
        """Of a stage behind the first; the stage's name if the process that should have counted it says it has not.

        One that has died since, or does not answer, is believed to have counted it, as the head says; what number it
        was there, is not known then.
        """
        worker, micro_batch = self._route[stage].worker.unpinned(), self._journey.micro_batch
        incarnation = worker.incarnation
        try:
            said = await self._desk.caller.applied(worker, micro_batch, refuse_from_now=False, timeout_s=_QUESTION_S)
        except RpcError as error:
            logger.info("%s does not say which process of it has counted %s: %s", worker, micro_batch.key, error)
        else:
            if said.credit is not None:
                return said.credit
            if said.incarnation == incarnation:
                return stage
        return StageCredit(stage=stage, incarnation=incarnation, applied_number=0)

    async def _after(self, error: RpcError, asked_s: float) -> None:
        """Makes the route fit to be tried again.

        Raises:
            MicroBatchEndedError: it goes no further.
        """
        stage, verdict = self._culprit(error)
        worker, pool = self._route[stage].worker, self._desk.pools[stage]
        is_first = not self._has_failed and stage == next(iter(self._route))
        if is_first and verdict.effect == "none":
            # What it refuses later, those behind it may have counted by then.
            self._journey.is_unclear = self._has_failed = verdict.blame not in ("rest", "leave")
            self._replace(stage, verdict, asked_s)
            if verdict.blame == "rest":
                await self._pause()
            return
        is_repeated, self._has_failed = self._has_failed, True
        if self._unclear_since_s is None:
            self._unclear_since_s = time.monotonic()
        self._journey.num_retries += 1
        if verdict.effect == "counted":
            if not is_repeated:
                pool.blame(worker, verdict, asked_s)
            raise self._journey.lost(stage, "answer-gone")
        found = await self._desk.deaths.found(worker, min(_QUESTION_S, self._left_s(stage)))
        if found == "gone":
            self._replace(stage, verdict, asked_s)
            return
        self._release(other for other in self._route if other != stage)  # The worker of that one is waited for.
        self._journey.set_aside(True)
        if found == "refused":
            pool.blame(worker, _SHUT, asked_s)  # It keeps what it has; nothing else is sent there.
        may_come = isinstance(error, PeerUnavailableError) or verdict.blame == "rest" or verdict.reason == _HOP
        if not may_come or not self._is_patient():
            await self._vacate(stage, verdict, asked_s)
        elif found == "unknown":  # If it is silent, nothing else is sent there; what it has may yet be answered.
            pool.blame(worker, verdict, asked_s)
        await self._pause()

    def _culprit(self, error: RpcError) -> tuple[str, Verdict]:
        """The stage whose worker has failed, as far as can be told, and how."""
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
        """Replaces a worker, if it says that it has not counted the micro-batch and will not.

        Raises:
            MicroBatchEndedError: it has, and its answer is not to be had.
        """
        timeout_s = min(_QUESTION_S, self._left_s(stage))
        worker, micro_batch = self._route[stage].worker.unpinned(), self._journey.micro_batch
        try:
            said = await self._desk.caller.applied(worker, micro_batch, refuse_from_now=True, timeout_s=timeout_s)
        except RpcError:
            return
        if said.credit is None:
            self._replace(stage, verdict, asked_s)
        elif verdict.reason in ("malformed", "malformed-answer"):
            self._desk.pools[stage].blame(worker, verdict, asked_s)
            raise self._journey.lost(stage, "answer-gone")

    def _replace(self, stage: str, verdict: Verdict, asked_s: float) -> None:
        placement = self._route.pop(stage)
        self._unclear_since_s = None  # It is clear now what this one has done.
        self._avoid[stage].add(placement.worker.key)
        self._desk.pools[stage].failed(placement, verdict, asked_s)
        self._journey.attempt_failed(stage, verdict)

    def _is_patient(self) -> bool:
        """Whether the same route is only tried again."""
        since_s = time.monotonic() if self._unclear_since_s is None else self._unclear_since_s
        limit_s = patience_s(self._desk.config.unclear_s)
        return time.monotonic() - since_s < limit_s <= self._journey.left_s()

    def _left_s(self, stage: str) -> float:
        """Seconds in which it can still become clear what a stage has done.

        Raises:
            MicroBatchEndedError: there are none.
        """
        since_s = time.monotonic() if self._unclear_since_s is None else self._unclear_since_s
        left_s = since_s + self._desk.config.unclear_s - time.monotonic()
        if self._journey.left_s() <= 0:
            raise self._journey.stopped("lease")
        if left_s <= 0:
            raise self._journey.lost(stage, "unclear")
        return min(left_s, self._journey.left_s())

    async def _pause(self) -> None:
        self._desk.may_send(self._journey)
        await asyncio.sleep(min(self._pause_s, max(0.0, self._journey.left_s())))
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
