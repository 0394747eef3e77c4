"""Hub routing (spec P-11): every activation comes back to the driver, which hands it to the next stage's worker.

Forward passes change nothing, so one that fails is done again at another worker. The tail counts, and answers with the
gradient; from there on the stages are asked backwards to count, each at the worker that ran the forward pass, which
needs to be sent the gradient only, or at another one, which gets the stage's input too and runs the pass again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.pipeline.driver.asking import Answered
from trainer.pipeline.driver.auditing import Visit
from trainer.pipeline.driver.failure_detector import is_refused
from trainer.pipeline.driver.in_flight import MicroBatchEndedError, MicroBatchInFlight
from trainer.pipeline.driver.pool import Placement
from trainer.pipeline.driver.results import Outcome
from trainer.pipeline.driver.router import BACKWARD_UNITS, FORWARD_UNITS, TAIL_UNITS, RoutingContext
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, part_of

__all__ = ["HubRouter"]

_QUICK_S = 1.0
"""A request that breaks off sooner was cut off by the network rather than by a worker that has fallen silent."""
_LISTENS_S = 1.0


@dataclass(frozen=True, slots=True)
class _Visit:
    """A stage that a micro-batch has passed forwards."""

    stage: str
    placement: Placement
    given: Mapping[str, Tensor]
    """The stage's input."""
    answered: Answered
    """With its output."""


class HubRouter:
    """Takes micro-batches through the stages one hop at a time.

    Args:
        desk: the driver's.
    """

    def __init__(self, desk: RoutingContext) -> None:
        self._desk = desk

    async def take(self, journey: MicroBatchInFlight, *, is_drawn: bool = False) -> Outcome:
        """See `Router.take`; ``is_drawn``: all its visits are audited."""
        *others, tail = self._desk.pools
        visits: list[_Visit] = []
        activation: dict[str, Tensor] | None = None
        try:
            for stage in others:
                visit, answered = await self._forward(journey, stage, activation)
                visits.append(visit)
                activation = part_of(ACTIVATION, answered.tensors)
            gradient, num_tokens = await self._tail(journey, tail, activation, visits, is_drawn)
            while visits:
                gradient = await self._backward(journey, visits, gradient, num_tokens, is_drawn)
                visits.pop()
            return journey.done()
        except MicroBatchEndedError as end:
            return end.outcome
        finally:
            for visit in visits:
                self._desk.pools[visit.stage].released(visit.placement)

    async def _forward(
        self, journey: MicroBatchInFlight, stage: str, activation: Mapping[str, Tensor] | None
    ) -> tuple[_Visit, Answered]:
        desk, pool, micro_batch = self._desk, self._desk.pools[stage], journey.micro_batch
        num_rows = micro_batch.input_ids.shape[0]
        given, avoid, repeated = desk.form.input_of(micro_batch, activation), set[str](), set[str]()
        again: Placement | None = None
        while True:
            placement = again or await desk.placed(journey, stage, num_rows * (FORWARD_UNITS + BACKWARD_UNITS), avoid)
            again = None
            asked_s = time.monotonic()
            try:
                desk.may_send(journey)
                answered = await desk.caller.forward(placement.worker, micro_batch, given)
            except RpcError as error:
                verdict = desk.noted(error)
                if placement.worker.key not in repeated and await self._was_cut_off(placement.worker, error, asked_s):
                    repeated.add(placement.worker.key)
                    journey.num_retries += 1
                    again = placement
                    continue
                avoid.add(placement.worker.key)
                pool.failed(placement, verdict, asked_s)
                journey.attempt_failed(stage, verdict)
                continue
            except BaseException:
                pool.released(placement)
                raise
            pool.measured(placement, num_rows * FORWARD_UNITS, asked_s)
            journey.passed(answered)
            return _Visit(stage, placement, given, answered), answered

    async def _tail(
        self,
        journey: MicroBatchInFlight,
        tail: str,
        activation: Mapping[str, Tensor] | None,
        visits: Sequence[_Visit],
        is_drawn: bool,
    ) -> tuple[dict[str, Tensor], int]:
        desk, micro_batch = self._desk, journey.micro_batch
        given = desk.form.input_of(micro_batch, activation)
        units = micro_batch.input_ids.shape[0] * TAIL_UNITS

        async def ask(worker: StageWorker) -> Answered:
            return await desk.caller.tail(worker, micro_batch, given)

        held = [visit.placement for visit in visits]
        answered, worker = await desk.count(journey, None, tail, units, units, ask, held)
        journey.counted(tail, answered.body)
        desk.auditor.visited(Visit(worker, micro_batch, given, (answered,)), is_drawn=is_drawn)
        return part_of(GRADIENT, answered.tensors), answered.body.num_tokens

    async def _backward(
        self,
        journey: MicroBatchInFlight,
        visits: Sequence[_Visit],
        gradient: Mapping[str, Tensor],
        num_tokens: int,
        is_drawn: bool,
    ) -> dict[str, Tensor]:
        *before, visit = visits
        desk, micro_batch, stage = self._desk, journey.micro_batch, visit.stage
        num_rows = micro_batch.input_ids.shape[0]

        async def send(worker: StageWorker, given: Mapping[str, Tensor]) -> Answered:
            return await desk.caller.backward(
                worker, micro_batch, given, forward_version=visit.answered.body.version, num_tokens=num_tokens
            )

        async def ask(worker: StageWorker) -> Answered:
            if worker.key == visit.placement.worker.key:
                try:
                    return await send(worker, gradient)
                except RefusedError as error:
                    if error.reason != "no-input":
                        raise
            return await send(worker, {**visit.given, **gradient})

        first: Placement | None = visit.placement
        if desk.pools[stage].is_banned(visit.placement.worker):
            desk.pools[stage].released(visit.placement)
            first = None
        units, grant_units = num_rows * BACKWARD_UNITS, num_rows * (FORWARD_UNITS + BACKWARD_UNITS)
        held = [each.placement for each in before]
        answered, worker = await desk.count(journey, first, stage, units, grant_units, ask, held)
        journey.counted(stage, answered.body)
        answers = (visit.answered, answered) if worker.key == visit.placement.worker.key else (answered,)
        is_head = stage == next(iter(desk.pools))
        audited = Visit(worker, micro_batch, visit.given, answers, None if is_head else gradient)
        desk.auditor.visited(audited, is_drawn=is_drawn)
        return part_of(GRADIENT, answered.tensors)

    @staticmethod
    async def _was_cut_off(worker: StageWorker, error: RpcError, asked_s: float) -> bool:
        """Whether the connection broke while the worker is still there: worth another try at once."""
        if not isinstance(error, PeerUnavailableError) or time.monotonic() - asked_s > _QUICK_S:
            return False
        return not await is_refused(worker.peer.address, _LISTENS_S)
