"""The two routings: by hub, every activation returns to the driver, which passes it to the next stage's worker (spec
P-11); by chain, each worker sends on to the next, and gradients come back the same way (spec P-12).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.pipeline.driver.auditing import Visit
from trainer.pipeline.driver.failure_detector import is_refused
from trainer.pipeline.driver.pool import Placement
from trainer.pipeline.driver.results import Verdict, verdict_of
from trainer.pipeline.driver.router import BACKWARD_UNITS, FORWARD_UNITS, QUESTION_S, TAIL_UNITS, MicroBatchInFlight
from trainer.pipeline.driver.stage_caller import Answered
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, part_of
from trainer.pipeline.protocol.work import StageCredit

logger = logging.getLogger(__name__)

_QUICK_S = 1.0  # A request that breaks off sooner, of a worker that still listens, was cut off by the network.
_LISTENS_S = 1.0
_HOP = "hop"
_CONTRADICTED = Verdict("contradicted", "counted", "ban")
"""The head says that a stage has counted it, and the stage that it has not."""
_SHUT = Verdict("refused", "unclear", "ban")  # The driver itself finds that the worker accepts no connection.
_NAMED = re.compile(r"\b(head|tail|body-[1-9][0-9]{0,3}) ([0-9a-f]{64})\b")


class HubRoute(MicroBatchInFlight):
    """A micro-batch that goes through the stages one hop at a time.

    Forward passes change nothing, so one that fails is repeated at another worker. From the tail on the stages are
    asked to count, each at the worker that ran the forward pass, which needs the gradient only, or at another one,
    which gets the stage's input too and runs the pass again.
    """

    async def _run(self) -> None:
        *others, tail = self._pools
        # Inputs of the stages, and answers with their outputs; each is let go of once its stage has counted.
        passed: list[tuple[Mapping[str, Tensor], Answered]] = []
        activation: dict[str, Tensor] | None = None
        for stage in others:
            given = self.context.form.input_of(self.micro_batch, activation)
            passed.append((given, await self._forward(stage, given)))
            activation = part_of(ACTIVATION, passed[-1][1].tensors)
        gradient = await self._tail(tail, self.context.form.input_of(self.micro_batch, activation))
        while passed:
            gradient = await self._backward(*passed.pop(), gradient)

    async def _forward(self, stage: str, given: Mapping[str, Tensor]) -> Answered:
        pool, units = self._pools[stage], self._num_rows * (FORWARD_UNITS + BACKWARD_UNITS)
        avoid: set[str] = set()
        repeated: set[str] = set()
        placement: Placement | None = None
        while True:
            if placement is None:
                placement = self._places[stage] = await self._placed(stage, units, avoid)
            worker, asked_s = placement.worker, time.monotonic()
            self._check_lease()
            try:
                answered = await self.context.caller.forward(worker, self.micro_batch, given)
            except RpcError as error:
                verdict = self._noted(error)
                is_cut_off = isinstance(error, PeerUnavailableError) and time.monotonic() - asked_s <= _QUICK_S
                if is_cut_off and worker.key not in repeated and not await is_refused(worker.peer.address, _LISTENS_S):
                    repeated.add(worker.key)
                    self._num_retries += 1
                    continue
                avoid.add(worker.key)
                pool.failed(placement, verdict, asked_s)
                self._attempt_failed(stage, verdict)
                placement = None
            else:
                pool.measured(placement, self._num_rows * FORWARD_UNITS, asked_s)
                self._hops.append(answered.hop)
                return answered

    async def _tail(self, tail: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        units = self._num_rows * TAIL_UNITS
        ask = partial(self.context.caller.tail, micro_batch=self.micro_batch, given=given)
        answered, worker = await self._count(tail, units, units, ask)
        self._loss_sum, self._num_tokens = answered.body.loss_sum or 0.0, answered.body.num_tokens
        self.context.auditor.visited(Visit(worker, self.micro_batch, given, (answered,)), is_drawn=self.is_drawn)
        return part_of(GRADIENT, answered.tensors)

    async def _backward(
        self, given: Mapping[str, Tensor], forward: Answered, gradient: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        stage, key = forward.hop.stage, forward.hop.key

        async def send(worker: StageWorker, tensors: Mapping[str, Tensor]) -> Answered:
            fields = {"forward_version": forward.body.version, "num_tokens": self._num_tokens}
            return await self.context.caller.backward(worker, self.micro_batch, tensors, **fields)

        async def ask(worker: StageWorker) -> Answered:
            if worker.key == key:
                try:
                    return await send(worker, gradient)
                except RefusedError as error:
                    if error.reason != "no-input":
                        raise
            return await send(worker, {**given, **gradient})

        place: Placement | None = self._places.pop(stage)
        if place is not None and self._pools[stage].is_banned(place.worker):
            self._pools[stage].released(place)
            place = None
        units, placement_units = self._num_rows * BACKWARD_UNITS, self._num_rows * (FORWARD_UNITS + BACKWARD_UNITS)
        answered, worker = await self._count(stage, units, placement_units, ask, place)
        answers = (forward, answered) if worker.key == key else (answered,)
        visit = Visit(worker, self.micro_batch, given, answers, gradient if self._places else None)
        self.context.auditor.visited(visit, is_drawn=self.is_drawn)
        return part_of(GRADIENT, answered.tensors)


class ChainRoute(MicroBatchInFlight):
    """A micro-batch that goes through all stages in one request, along a route that changes as little as possible.

    A failed chain is repeated *by way of the same workers*: each gives the answer it gave before, and does only what
    was not done. A worker leaves the route only if its process is gone, or says that it has not counted the micro-batch
    and from then on will not. A chain's time is shared out to its workers in the ratio of their estimates, which over
    many routes finds the slow ones. A worker that another names as failed is banned for a short time at most.
    """

    _has_failed = False  # From then on workers may have counted it that have not said so, or have restarted.
    _unclear_since_s: float | None = None
    _num_pauses = 0

    async def _run(self) -> None:
        self._avoid: dict[str, set[str]] = {stage: set() for stage in self._pools}
        self._units = self._num_rows * TAIL_UNITS
        given = self.context.form.input_of(self.micro_batch, None)
        while True:
            await self._complete()
            self._check_lease()
            asked_s = time.monotonic()
            self._is_unclear = True
            workers = [self._places[stage].worker for stage in self._pools]
            route = [worker.unpinned() for worker in workers] if self._has_failed else workers
            try:
                answered = await self.context.caller.chain(route, self.micro_batch, given)
            except RpcError as error:
                self._noted(error)
                await self._after(error, asked_s)
                continue
            await self._done(answered, asked_s)
            return

    async def _complete(self) -> None:
        """Finds a worker for each stage that has none.

        Places are waited for in the order of the stages; those of later stages are given up meanwhile. Otherwise two
        micro-batches, each holding the place that the other needs, would wait until their leases end.
        """
        stages = list(self._pools)
        missing = [stage for stage in stages if stage not in self._places]
        if not missing:
            return
        self._set_aside(False)
        self._release(stages[stages.index(missing[0]) :])
        for stage in missing:
            self._places[stage] = await self._placed(stage, self._units, self._avoid[stage])
        for stage, placement in self._places.items():
            self._pools[stage].resumed(placement)

    async def _done(self, answered: Answered, asked_s: float) -> None:
        """Has the others confirm what the head reports as done; raises MicroBatchEndedError if one denies it."""
        took_s = time.monotonic() - asked_s
        self._is_unclear = False
        self._hops.append(answered.hop)
        head, *behind = self._pools
        for credit in await asyncio.gather(*map(self._credit, behind)):
            if isinstance(credit, str):
                # One of the route has lied, and which cannot be told: each vouches for those behind it. An honest one
                # is free again with its next chain; a liar is banned for twice as long the next time.
                for stage, placement in self._places.items():
                    self._pools[stage].blame(placement.worker, _CONTRADICTED, asked_s)
                raise self._lost(credit, _CONTRADICTED.reason)
            self._credits[credit.stage] = credit
        estimates = {
            stage: self._pools[stage].balancer.estimate_s(placement.worker.key, self._units)
            for stage, placement in self._places.items()
        }
        total_s = sum(estimates.values())
        for stage, placement in self._places.items():
            share_s = took_s * (estimates[stage] / total_s if total_s > 0 else 1.0 / len(estimates))
            self._pools[stage].timed(placement, self._units, share_s)
            self._pools[stage].done(placement)
        self._counted(head, answered.body)
        self._loss_sum, self._num_tokens = answered.body.loss_sum or 0.0, answered.body.num_tokens

    async def _credit(self, stage: str) -> StageCredit | str:
        """Asks a worker behind the first for its credit; returns the stage's name if it denies having counted.

        One that has died since, or does not answer, is believed to have counted it, as the head says; its number of the
        micro-batch stays unknown.
        """
        worker = self._places[stage].worker.unpinned()
        try:
            incarnation, credit = await self.context.caller.applied(
                worker, self.micro_batch, refuse_from_now=False, timeout_s=QUESTION_S
            )
        except RpcError as error:
            logger.info("%s does not say which process of it has counted %s: %s", worker, self.micro_batch.key, error)
        else:
            if credit is not None or incarnation == worker.incarnation:
                return credit or stage
        return StageCredit(stage=stage, incarnation=worker.incarnation, applied_number=0)

    async def _after(self, error: RpcError, asked_s: float) -> None:
        """Changes the route as far as needed to repeat it; raises MicroBatchEndedError if that is not possible."""
        stage, verdict = self._culprit(error)
        worker, pool = self._places[stage].worker, self._pools[stage]
        if not self._has_failed and stage == next(iter(self._pools)) and verdict.effect == "none":
            # What it refuses later, those behind it may have counted by then.
            self._is_unclear = self._has_failed = verdict.blame not in ("rest", "leave")
            self._replace(stage, verdict, asked_s)
            if verdict.blame == "rest":
                await self._pause_longer()
            return
        is_repeated, self._has_failed = self._has_failed, True
        if self._unclear_since_s is None:
            self._unclear_since_s = time.monotonic()
        self._num_retries += 1
        if verdict.effect == "counted":
            if not is_repeated:
                pool.blame(worker, verdict, asked_s)
            raise self._lost(stage, "answer-gone")
        found = await self.context.liveness.probe(worker, min(QUESTION_S, self._resolvable_s(stage)))
        if found == "gone":
            self._replace(stage, verdict, asked_s)
            return
        self._release(other for other in self._places if other != stage)  # The worker of that one is waited for.
        self._set_aside(True)
        if found == "refused":
            pool.blame(worker, _SHUT, asked_s)  # It keeps what it has; nothing else is sent there.
        may_come = isinstance(error, PeerUnavailableError) or verdict.blame == "rest" or verdict.reason == _HOP
        if not (may_come and self._is_patient(self._unclear_for_s())):
            says = await self._says_counted(worker.unpinned(), self._resolvable_s(stage))
            if says is False:
                self._replace(stage, verdict, asked_s)
            elif says and verdict.reason in ("malformed", "malformed-answer"):
                pool.blame(worker, verdict, asked_s)
                raise self._lost(stage, "answer-gone")
        elif found == "unknown":  # If it is silent, nothing else is sent there; what it has may yet be answered.
            pool.blame(worker, verdict, asked_s)
        await self._pause_longer()

    def _culprit(self, error: RpcError) -> tuple[str, Verdict]:
        """Returns the stage whose worker has failed, as far as can be told, and the verdict on it."""
        head = next(iter(self._pools))
        if not isinstance(error, RefusedError) or not (error.reason == _HOP or error.reason.startswith(_HOP + "-")):
            return head, verdict_of(error)
        named = [match.groups() for match in _NAMED.finditer(str(error))]
        stages = [stage for stage, key in named if stage in self._places and self._places[stage].worker.key == key]
        stage = stages[-1] if stages else head
        if error.reason == _HOP:
            return stage, Verdict(_HOP, "unclear", "ban")
        said = verdict_of(RefusedError(error.reason.removeprefix(_HOP + "-"), str(error)))
        blame = "ban" if said.blame in ("firm-ban", "long-ban") else said.blame
        return stage, Verdict(said.reason, said.effect, blame, said.attempts)

    def _replace(self, stage: str, verdict: Verdict, asked_s: float) -> None:
        """Leaves out a worker that has not counted it and will not."""
        placement = self._places.pop(stage)
        self._unclear_since_s = None  # It is clear now what this one has done.
        self._avoid[stage].add(placement.worker.key)
        self._pools[stage].failed(placement, verdict, asked_s)
        self._attempt_failed(stage, verdict)

    def _unclear_for_s(self) -> float:
        return 0.0 if self._unclear_since_s is None else time.monotonic() - self._unclear_since_s

    def _resolvable_s(self, stage: str) -> float:
        """Returns the seconds left to find out what a stage has done; raises MicroBatchEndedError if there are none."""
        left_s = self.context.config.unclear_s - self._unclear_for_s()
        self._check_lease()
        if left_s <= 0:
            raise self._lost(stage, "unclear")
        return min(left_s, self._left_s())

    async def _pause_longer(self) -> None:
        self._check_lease()
        await self._pause(self._num_pauses)
        self._num_pauses += 1
