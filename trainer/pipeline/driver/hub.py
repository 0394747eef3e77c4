"""Hub routing (spec P-11): every activation returns to the driver, which passes it to the next stage's worker.

Forward passes change nothing, so one that fails is repeated at another worker. The tail counts, and answers with the
gradient; from there on the stages are asked backwards to count, each at the worker that ran the forward pass, which
needs the gradient only, or at another one, which gets the stage's input too and runs the pass again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.pipeline.driver.auditing import Visit
from trainer.pipeline.driver.failure_detector import is_refused
from trainer.pipeline.driver.pool import Placement
from trainer.pipeline.driver.router import BACKWARD_UNITS, FORWARD_UNITS, TAIL_UNITS, MicroBatchInFlight
from trainer.pipeline.driver.stage_caller import Answered
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, part_of

__all__ = ["HubRoute"]

_QUICK_S = 1.0
"""A request that breaks off sooner was cut off by the network rather than by a worker that went silent."""
_LISTENS_S = 1.0


class HubRoute(MicroBatchInFlight):
    """A micro-batch that goes through the stages one hop at a time."""

    async def _run(self) -> None:
        *others, tail = self._pools
        passed: list[
            tuple[Mapping[str, Tensor], Answered]
        ] = []  # Inputs of the stages, and answers with their outputs.
        activation: dict[str, Tensor] | None = None
        for stage in others:
            given = self._context.form.input_of(self.micro_batch, activation)
            passed.append((given, await self._forward(stage, given)))
            activation = part_of(ACTIVATION, passed[-1][1].tensors)
        gradient = await self._tail(tail, self._context.form.input_of(self.micro_batch, activation))
        for stage_input, answered in reversed(passed):
            gradient = await self._backward(stage_input, answered, gradient)

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
                answered = await self._context.caller.forward(worker, self.micro_batch, given)
            except RpcError as error:
                verdict = self._noted(error)
                if worker.key not in repeated and await _was_cut_off(worker, error, asked_s):
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
        async def ask(worker: StageWorker) -> Answered:
            return await self._context.caller.tail(worker, self.micro_batch, given)

        units = self._num_rows * TAIL_UNITS
        answered, worker = await self._count(tail, units, units, ask)
        self._loss_sum, self._num_tokens = answered.body.loss_sum or 0.0, answered.body.num_tokens
        self._context.auditor.visited(Visit(worker, self.micro_batch, given, (answered,)), is_drawn=self._is_drawn)
        return part_of(GRADIENT, answered.tensors)

    async def _backward(
        self, given: Mapping[str, Tensor], forward: Answered, gradient: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        stage, key = forward.hop.stage, forward.hop.key

        async def send(worker: StageWorker, tensors: Mapping[str, Tensor]) -> Answered:
            fields = {"forward_version": forward.body.version, "num_tokens": self._num_tokens}
            return await self._context.caller.backward(worker, self.micro_batch, tensors, **fields)

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
        self._context.auditor.visited(visit, is_drawn=self._is_drawn)
        return part_of(GRADIENT, answered.tensors)


async def _was_cut_off(worker: StageWorker, error: RpcError, asked_s: float) -> bool:
    """Whether the connection broke while the worker is still there: worth another try at once."""
    if not isinstance(error, PeerUnavailableError) or time.monotonic() - asked_s > _QUICK_S:
        return False
    return not await is_refused(worker.peer.address, _LISTENS_S)
