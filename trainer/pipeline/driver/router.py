"""What hub and chain have in common: finding a worker, and going on after a request has failed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from trainer.errors import RpcError
from trainer.pipeline.driver.asking import Answered, StageCaller
from trainer.pipeline.driver.auditing import Auditor
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.failure_detector import Deaths
from trainer.pipeline.driver.in_flight import MicroBatchInFlight
from trainer.pipeline.driver.links import LinkForm
from trainer.pipeline.driver.outcome_resolution import OutcomeResolution
from trainer.pipeline.driver.pool import Placement, StagePool
from trainer.pipeline.driver.results import Outcome, Verdict, verdict_of
from trainer.pipeline.driver.workers import StageWorker

__all__ = ["BACKWARD_UNITS", "FORWARD_UNITS", "TAIL_UNITS", "Asking", "Router", "RoutingContext"]

FORWARD_UNITS, BACKWARD_UNITS, TAIL_UNITS = 1.0, 2.0, 3.0
"""Work a row: a backward pass takes twice as long as a forward pass."""

_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_BUSY_TIMES = 6
"""How often a worker that has the forward pass is asked again before another one does it anew."""

Asking = Callable[[StageWorker], Awaitable[Answered]]


class Router(Protocol):
    """A way through the stages."""

    async def take(self, journey: MicroBatchInFlight) -> Outcome:
        """Takes a micro-batch through all stages, or says why not."""


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """What a driver's routing works with."""

    pools: Mapping[str, StagePool]
    """By stage, in order."""
    caller: StageCaller
    deaths: Deaths
    clearing: OutcomeResolution
    auditor: Auditor
    form: LinkForm
    config: DriverConfig
    failures: Counter[str]
    """Requests that failed, by reason."""

    @classmethod
    def of(
        cls,
        pools: Mapping[str, StagePool],
        caller: StageCaller,
        deaths: Deaths,
        form: LinkForm,
        config: DriverConfig,
        audit_seed: int | None = None,
    ) -> RoutingContext:
        """One with nothing on it."""
        failures = Counter[str]()
        auditor = Auditor(pools, caller, form, config.audit_every, failures, audit_seed)
        clearing = OutcomeResolution(caller, deaths, config.unclear_s)
        return cls(pools, caller, deaths, clearing, auditor, form, config, failures)

    async def placed(self, journey: MicroBatchInFlight, stage: str, units: float, avoid: set[str]) -> Placement:
        """A worker for a micro-batch; waits for one, and a while before it goes to the same ones again.

        Raises:
            MicroBatchEndedError: its lease is over.
        """
        if avoid and avoid.issuperset(worker.key for worker in self.pools[stage].usable()):
            await self._pause(journey, journey.num_failed(stage))  # All of them had it: there is no hurry now.
        placement = await self.pools[stage].acquire(units, avoid=avoid, left_s=journey.left_s)
        if placement is None:
            raise journey.stopped("lease")
        return placement

    async def count(
        self,
        journey: MicroBatchInFlight,
        placement: Placement | None,
        stage: str,
        units: float,
        grant_units: float,
        ask: Asking,
        held: Sequence[Placement] = (),
    ) -> tuple[Answered, StageWorker]:
        """Has a stage count a micro-batch, once.

        Args:
            journey: of the micro-batch.
            placement: where it has a place already; None: anywhere.
            stage: which.
            units: work of the request.
            grant_units: work of a place at another worker.
            ask: sends it to a worker.
            held: its places in other stages.

        Returns:
            The answer, and whose it is.

        Raises:
            MicroBatchEndedError: it cannot be had.
        """
        avoid, num_busy = set[str](), 0
        while True:
            placement = placement or await self.placed(journey, stage, grant_units, avoid)
            try:
                answered = await self._counted_at(journey, placement, units, ask, num_busy < _BUSY_TIMES, held)
            except BaseException:
                self.pools[stage].released(placement)
                raise
            if answered is not None:
                journey.passed(answered)
                self.pools[stage].done(placement)
                return answered, placement.worker
            if placement.grant.open:  # It was told to come again.
                await self._pause(journey, num_busy)
                num_busy += 1
            else:
                avoid.add(placement.worker.key)
                placement = None

    def noted(self, error: RpcError) -> Verdict:
        """Counts a failure."""
        verdict = verdict_of(error)
        self.failures[verdict.reason] += 1
        return verdict

    def may_send(self, journey: MicroBatchInFlight) -> None:
        """Looks at the lease before anything is sent.

        Raises:
            MicroBatchEndedError: it is over.
        """
        if journey.left_s() <= 0:
            raise journey.stopped("lease")

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _counted_at(
        self,
        journey: MicroBatchInFlight,
        placement: Placement,
        units: float,
        ask: Asking,
        may_repeat: bool,
        held: Sequence[Placement],
    ) -> Answered | None:
        """One request to count, and what became of it; None: nothing is counted, and it may be tried again.

        Raises:
            MicroBatchEndedError: it goes no further.
        """
        self.may_send(journey)
        pool = self.pools[placement.worker.stage]
        worker, asked_s = pool.current(placement.worker), time.monotonic()
        journey.is_unclear = True
        try:
            answered = await ask(worker)
        except RpcError as error:
            verdict = self.noted(error)
            if verdict.blame == "rest" and may_repeat:
                journey.is_unclear = False
                pool.blame(worker, verdict, asked_s)
                return None
            return await self._cleared(journey, Placement(worker, placement.grant), verdict, ask, asked_s, held)
        pool.measured(placement, units, asked_s)
        pool.counted(placement)
        journey.is_unclear = False
        return answered

    async def _cleared(
        self,
        journey: MicroBatchInFlight,
        placement: Placement,
        verdict: Verdict,
        ask: Asking,
        asked_s: float,
        held: Sequence[Placement],
    ) -> Answered | None:
        """What has become of a request to count that has failed; None: it is not counted there, and may go elsewhere.

        Raises:
            MicroBatchEndedError: it may be counted there, or is, and the answer is not to be had; or too much
                failed.
        """
        stage, pool = placement.worker.stage, self.pools[placement.worker.stage]
        if verdict.effect == "unclear":
            pool.blame(placement.worker, verdict, asked_s)
            with self._set_aside(journey, held):
                cleared = await self.clearing.clear(placement.worker, journey.micro_batch, ask)
            if cleared.answered is not None:
                journey.num_retries += 1
                journey.is_unclear = False
                pool.recovered(placement)
                return cleared.answered
            if cleared.fate == "unclear":
                pool.failed(placement, verdict, asked_s)
                raise journey.stopped("lease") if journey.left_s() <= 0 else journey.lost(stage, "unclear")
            if cleared.fate == "answer-gone":
                verdict = Verdict(verdict.reason, "counted", verdict.blame)
        journey.is_unclear = False
        pool.failed(placement, verdict, asked_s)
        if verdict.effect == "counted":
            raise journey.lost(stage, "answer-gone")
        journey.attempt_failed(stage, verdict)
        return None

    @contextmanager
    def _set_aside(self, journey: MicroBatchInFlight, held: Sequence[Placement]) -> Iterator[None]:
        """While one worker is waited for, neither the driver nor the workers of other stages keep a place for it."""
        released = [placement for placement in held if placement.grant.open]
        for placement in released:
            self.pools[placement.worker.stage].released(placement)
        journey.set_aside(True)
        try:
            yield
        finally:
            journey.set_aside(False)
            for placement in released:
                self.pools[placement.worker.stage].resumed(placement)

    async def _pause(self, journey: MicroBatchInFlight, times: int) -> None:
        await asyncio.sleep(min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(times, 16), max(0.0, journey.left_s())))
