"""Hub routing (spec P-11): every activation returns to the driver, which passes it to the next stage's worker.

Forward passes change nothing, so one that fails is repeated at another worker. The tail counts, and answers with the
gradient; from there on the stages are asked backwards to count, each at the worker that ran the forward pass, which
needs the gradient only, or at another one, which gets the stage's input too and runs the pass again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.pipeline.driver.auditing import Visit
from trainer.pipeline.driver.failure_detector import is_refused
from trainer.pipeline.driver.pool import Placement
from trainer.pipeline.driver.results import MicroBatchOutcome
from trainer.pipeline.driver.router import (
    BACKWARD_UNITS,
    FORWARD_UNITS,
    TAIL_UNITS,
    MicroBatchEndedError,
    MicroBatchInFlight,
    RoutingContext,
)
from trainer.pipeline.driver.stage_caller import Answered
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, part_of

__all__ = ["HubRouter"]

_QUICK_S = 1.0
"""A request that breaks off sooner was cut off by the network rather than by a worker that went silent."""
_LISTENS_S = 1.0


@dataclass(frozen=True, slots=True)
class _Passed:
    """A stage that a micro-batch has passed forwards."""

    stage: str
    placement: Placement
    given: Mapping[str, Tensor]
    """The stage's input."""
    answered: Answered
    """With its output."""


class HubRouter:
    """Takes micro-batches through the stages one hop at a time."""

    def __init__(self, context: RoutingContext) -> None:
        self._context = context

    async def take(self, in_flight: MicroBatchInFlight, *, is_drawn: bool = False) -> MicroBatchOutcome:
        """Takes a micro-batch through all stages, or returns why not; audits all its visits if ``is_drawn``."""
        *others, tail = self._context.pools
        passed: list[_Passed] = []
        activation: dict[str, Tensor] | None = None
        try:
            for stage in others:
                passed.append(await self._forward(in_flight, stage, activation))
                activation = part_of(ACTIVATION, passed[-1].answered.tensors)
            gradient, num_tokens = await self._tail(in_flight, tail, activation, passed, is_drawn)
            while passed:
                gradient = await self._backward(in_flight, passed, gradient, num_tokens, is_drawn)
                passed.pop()
            return in_flight.done()
        except MicroBatchEndedError as end:
            return end.outcome
        finally:
            for each in passed:
                self._context.pools[each.stage].released(each.placement)

    async def _forward(
        self, in_flight: MicroBatchInFlight, stage: str, activation: Mapping[str, Tensor] | None
    ) -> _Passed:
        context, pool, micro_batch = self._context, self._context.pools[stage], in_flight.micro_batch
        num_rows = micro_batch.input_ids.shape[0]
        given = context.form.input_of(micro_batch, activation)
        avoid: set[str] = set()
        repeated: set[str] = set()
        placement: Placement | None = None
        while True:
            if placement is None:
                placement = await context.placed(in_flight, stage, num_rows * (FORWARD_UNITS + BACKWARD_UNITS), avoid)
            worker, asked_s = placement.worker, time.monotonic()
            try:
                in_flight.check_lease()
                answered = await context.caller.forward(worker, micro_batch, given)
            except RpcError as error:
                verdict = context.noted(error)
                if worker.key not in repeated and await _was_cut_off(worker, error, asked_s):
                    repeated.add(worker.key)
                    in_flight.num_retries += 1
                    continue
                avoid.add(worker.key)
                pool.failed(placement, verdict, asked_s)
                in_flight.attempt_failed(stage, verdict)
                placement = None
            except BaseException:
                pool.released(placement)
                raise
            else:
                pool.measured(placement, num_rows * FORWARD_UNITS, asked_s)
                in_flight.passed(answered)
                return _Passed(stage, placement, given, answered)

    async def _tail(
        self,
        in_flight: MicroBatchInFlight,
        tail: str,
        activation: Mapping[str, Tensor] | None,
        passed: Sequence[_Passed],
        is_drawn: bool,
    ) -> tuple[dict[str, Tensor], int]:
        context, micro_batch = self._context, in_flight.micro_batch
        given = context.form.input_of(micro_batch, activation)
        units = micro_batch.input_ids.shape[0] * TAIL_UNITS

        async def ask(worker: StageWorker) -> Answered:
            return await context.caller.tail(worker, micro_batch, given)

        held = [each.placement for each in passed]
        answered, worker = await context.count(in_flight, None, tail, units, units, ask, held)
        in_flight.counted(tail, answered.body)
        context.auditor.visited(Visit(worker, micro_batch, given, (answered,)), is_drawn=is_drawn)
        return part_of(GRADIENT, answered.tensors), answered.body.num_tokens

    async def _backward(
        self,
        in_flight: MicroBatchInFlight,
        passed: Sequence[_Passed],
        gradient: Mapping[str, Tensor],
        num_tokens: int,
        is_drawn: bool,
    ) -> dict[str, Tensor]:
        *before, last = passed
        context, micro_batch, stage = self._context, in_flight.micro_batch, last.stage
        num_rows = micro_batch.input_ids.shape[0]

        async def send(worker: StageWorker, given: Mapping[str, Tensor]) -> Answered:
            return await context.caller.backward(
                worker, micro_batch, given, forward_version=last.answered.body.version, num_tokens=num_tokens
            )

        async def ask(worker: StageWorker) -> Answered:
            if worker.key == last.placement.worker.key:
                try:
                    return await send(worker, gradient)
                except RefusedError as error:
                    if error.reason != "no-input":
                        raise
            return await send(worker, {**last.given, **gradient})

        first: Placement | None = last.placement
        if context.pools[stage].is_banned(last.placement.worker):
            context.pools[stage].released(last.placement)
            first = None
        units, placement_units = num_rows * BACKWARD_UNITS, num_rows * (FORWARD_UNITS + BACKWARD_UNITS)
        held = [each.placement for each in before]
        answered, worker = await context.count(in_flight, first, stage, units, placement_units, ask, held)
        in_flight.counted(stage, answered.body)
        answers = (last.answered, answered) if worker.key == last.placement.worker.key else (answered,)
        visit = Visit(worker, micro_batch, last.given, answers, gradient if before else None)
        context.auditor.visited(visit, is_drawn=is_drawn)
        return part_of(GRADIENT, answered.tensors)


async def _was_cut_off(worker: StageWorker, error: RpcError, asked_s: float) -> bool:
    """Whether the connection broke while the worker is still there: worth another try at once."""
    if not isinstance(error, PeerUnavailableError) or time.monotonic() - asked_s > _QUICK_S:
        return False
    return not await is_refused(worker.peer.address, _LISTENS_S)
