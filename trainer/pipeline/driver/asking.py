"""One request to one worker, and whether what comes back is an answer to it.

Everything that can be told of an answer without computing it anew is looked at here, so that what leaves this module
may be handed on: tensors of the right names, types, shapes and finite, the rows asked for, a finite loss of as many
labels as there are, and the stages in which it is said to be counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from trainer.errors import MalformedAnswerError, PeerUnavailableError
from trainer.network.rpc import Endpoint
from trainer.network.rpc.boundary import peer_boundary
from trainer.network.transfer.descriptor import TensorSpec
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.links import LinkForm, check_parcel
from trainer.pipeline.driver.results import HopTime
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.messages import (
    APPLIED,
    BACKWARD,
    CHAIN,
    EVALUATE,
    FORWARD,
    TAIL,
    AppliedAnswer,
    AppliedAsk,
    BackwardAsk,
    ChainAsk,
    CountedAs,
    EvaluateAsk,
    ForwardAsk,
    Hop,
    StageAnswer,
    StageAsk,
    TailAsk,
)
from trainer.pipeline.protocol.tensors import ask_tensors
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, LABELS, wire_ids
from trainer.pipeline.protocol.work import MicroBatch, StageCredit, boottime_s

__all__ = ["Acknowledged", "Answered", "StageCaller", "credit_of"]

logger = logging.getLogger(__name__)

_GRACE_S = 2.0

AskT = TypeVar("AskT", bound=StageAsk)


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that was looked at."""

    body: StageAnswer
    tensors: Mapping[str, Tensor]
    hop: HopTime


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What a worker says of a micro-batch afterwards."""

    incarnation: str
    """Of the process that says it."""
    credit: StageCredit | None
    """None: it has not counted it."""


class StageCaller:
    """Asks workers; nothing is tried again here.

    Args:
        endpoint: the driver's own.
        stages: all of the run's, in order.
        form: of the links between them.
        config: of the driver.
    """

    def __init__(self, endpoint: Endpoint, stages: Sequence[str], form: LinkForm, config: DriverConfig) -> None:
        self._endpoint = endpoint
        self._stages = tuple(stages)
        self._form = form
        self._config = config

    async def forward(self, worker: StageWorker, micro_batch: MicroBatch, given: Mapping[str, Tensor]) -> Answered:
        """Runs a stage forward.

        Raises:
            RpcError: no answer, a refusal, or none that can be one.
        """
        ask = self._request(ForwardAsk, worker, micro_batch)
        specs = self._form.specs(micro_batch, ACTIVATION)
        answered = await self._ask(worker, FORWARD, ask, given, specs)
        if answered.body.applied:
            raise MalformedAnswerError(f"{worker}: expected a forward pass to be counted nowhere, found it counted")
        return answered

    async def evaluate(
        self,
        worker: StageWorker,
        micro_batch: MicroBatch,
        given: Mapping[str, Tensor],
        gradient: Mapping[str, Tensor] | None,
    ) -> Answered:
        """Has a stage compute what is counted nowhere: output and gradient of an input, the tail loss and gradient.

        Args:
            worker: whom.
            micro_batch: whose.
            given: the stage's input.
            gradient: by the stage's output; None: it is the head or the tail.

        Raises:
            RpcError: no answer, a refusal, or none that can be one.
        """
        is_head, is_tail = worker.stage == self._stages[0], worker.stage == self._stages[-1]
        ask = self._request(EvaluateAsk, worker, micro_batch, with_gradient=not is_head)
        specs = (*(() if is_tail else self._form.specs(micro_batch, ACTIVATION)), *self._gradient(worker, micro_batch))
        given = {**given, **(gradient or {}), **({LABELS: wire_ids(micro_batch.labels)} if is_tail else {})}
        answered = await self._ask(worker, EVALUATE, ask, given, tuple(sorted(specs, key=lambda spec: spec.name)))
        if is_tail:
            self._check_loss(worker, answered.body, micro_batch)
        return answered

    async def backward(
        self,
        worker: StageWorker,
        micro_batch: MicroBatch,
        given: Mapping[str, Tensor],
        *,
        forward_version: int,
        num_tokens: int,
    ) -> Answered:
        """Has a stage count a gradient.

        Args:
            worker: whom.
            micro_batch: whose.
            given: gradient by the stage's output, and its input unless the worker has that.
            forward_version: of the weights of the forward pass.
            num_tokens: labels that count.

        Raises:
            RpcError: no answer, a refusal, or none that can be one.
        """
        said = {"forward_version": forward_version, "num_tokens": num_tokens}
        ask = self._request(BackwardAsk, worker, micro_batch, **said)
        answered = await self._ask(worker, BACKWARD, ask, given, self._gradient(worker, micro_batch))
        self._check_counted(worker, answered.body, (worker.stage,))
        return answered

    async def tail(self, worker: StageWorker, micro_batch: MicroBatch, given: Mapping[str, Tensor]) -> Answered:
        """Has the tail compute loss and gradient, and count it.

        Raises:
            RpcError: no answer, a refusal, or none that can be one.
        """
        ask = self._request(TailAsk, worker, micro_batch)
        given = {**given, LABELS: wire_ids(micro_batch.labels)}
        answered = await self._ask(worker, TAIL, ask, given, self._gradient(worker, micro_batch))
        self._check_counted(worker, answered.body, (worker.stage,))
        self._check_loss(worker, answered.body, micro_batch)
        return answered

    async def chain(
        self, route: Sequence[StageWorker], micro_batch: MicroBatch, given: Mapping[str, Tensor]
    ) -> Answered:
        """Has the workers of a route, one a stage, pass a micro-batch on among themselves.

        Raises:
            RpcError: no answer, a refusal, or none that can be one.
        """
        first, *rest = route
        hops = tuple(_hop_to(worker) for worker in rest)
        ask = self._request(ChainAsk, first, micro_batch, num_stages=len(route), route=hops)
        given = {**given, LABELS: wire_ids(micro_batch.labels)}
        answered = await self._ask(first, CHAIN, ask, given, self._gradient(first, micro_batch))
        self._check_counted(first, answered.body, [worker.stage for worker in route])
        self._check_loss(first, answered.body, micro_batch)
        return answered

    async def applied(
        self, worker: StageWorker, micro_batch: MicroBatch, *, refuse_from_now: bool, timeout_s: float
    ) -> Acknowledged:
        """Whether a worker has counted it, and the incarnation that says so.

        Args:
            worker: whom.
            micro_batch: which.
            refuse_from_now: if not, it shall not count it any more.
            timeout_s: seconds to wait for an answer.

        Raises:
            RpcError: no answer, or a refusal.
        """
        ask = AppliedAsk(micro_batches=(micro_batch.key,), refuse_from_now=refuse_from_now)
        async with _ended_at(worker, APPLIED, timeout_s + _GRACE_S):
            reply = await self._endpoint.call(worker.peer, APPLIED, ask, AppliedAnswer, timeout_s=timeout_s)
        said = reply.body
        with peer_boundary(str(worker)):
            is_counted = micro_batch.key in said.micro_batches
            counted_as = said.counted_as or CountedAs(incarnation=said.incarnation, applied_number=0)
            credit = StageCredit(stage=worker.stage, **counted_as.model_dump()) if is_counted else None
        return Acknowledged(said.incarnation, credit)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _request(
        self, model: type[AskT], worker: StageWorker, micro_batch: MicroBatch, *, num_stages: int = 1, **fields: object
    ) -> AskT:
        """What all requests about a micro-batch begin with, and ``fields``."""
        num_rows, num_positions = micro_batch.input_ids.shape
        within_s = self._timeout_s(micro_batch, num_stages)
        if "apply_within_s" in model.model_fields:
            fields["apply_within_s"] = within_s
        return model.model_validate(
            {
                "micro_batch": micro_batch.key,
                "stage": worker.stage,
                "num_rows": num_rows,
                "num_positions": num_positions,
                "answer_within_s": within_s,
                **fields,
            }
        )

    def _timeout_s(self, micro_batch: MicroBatch, num_stages: int) -> float:
        """Until when an answer is waited for, and a worker may count it: never beyond the lease."""
        left_s = micro_batch.send_before_s - boottime_s()
        return min(86_400.0, max(0.001, min(self._config.request_timeout_s * num_stages, left_s)))

    def _gradient(self, worker: StageWorker, micro_batch: MicroBatch) -> tuple[TensorSpec, ...]:
        return () if worker.stage == self._stages[0] else self._form.specs(micro_batch, GRADIENT)

    async def _ask(
        self,
        worker: StageWorker,
        method: str,
        ask: StageAsk,
        given: Mapping[str, Tensor],
        specs: tuple[TensorSpec, ...],
    ) -> Answered:
        timeout_s = ask.answer_within_s
        begun_s = time.monotonic()
        async with _ended_at(worker, method, timeout_s + _GRACE_S):
            answer = await ask_tensors(
                self._endpoint,
                worker.peer,
                method,
                ask,
                given,
                StageAnswer,
                answer_bytes=sum(spec.size_bytes for spec in specs),
                timeout_s=timeout_s,
            )
        round_trip_s = time.monotonic() - begun_s
        body = answer.body
        if body.num_rows != ask.num_rows:
            raise MalformedAnswerError(f"{worker}: expected an answer of {ask.num_rows} rows, found {body.num_rows}")
        with peer_boundary(str(worker)):
            check_parcel(answer.tensors, specs, str(worker))
        hop = HopTime(
            worker.stage, method, worker.uid, worker.key, round_trip_s, body.compute_s, body.queue_s, body.version
        )
        return Answered(body, answer.tensors, hop)

    @staticmethod
    def _check_counted(worker: StageWorker, body: StageAnswer, stages: Sequence[str]) -> None:
        if sorted(body.applied) != sorted(stages) or body.applied_number < 1:
            raise MalformedAnswerError(
                f"{worker}: expected it to be counted in {', '.join(stages)}, found {', '.join(body.applied) or 'none'}"
                f" as number {body.applied_number}"
            )

    @staticmethod
    def _check_loss(worker: StageWorker, body: StageAnswer, micro_batch: MicroBatch) -> None:
        expected = micro_batch.num_tokens
        if body.num_tokens != expected:
            raise MalformedAnswerError(f"{worker}: expected the loss of {expected} labels, found {body.num_tokens}")
        if body.loss_sum is None or not math.isfinite(body.loss_sum) or body.loss_sum < 0:
            raise MalformedAnswerError(f"{worker}: expected a loss, found {body.loss_sum}")


def credit_of(stage: str, body: StageAnswer) -> StageCredit:
    """A worker's acknowledgement, for the account."""
    return StageCredit(
        stage=stage,
        incarnation=body.incarnation,
        applied_number=body.applied_number,
        shared_through=body.shared_through,
    )


@asynccontextmanager
async def _ended_at(worker: StageWorker, method: str, timeout_s: float) -> AsyncIterator[None]:
    """Ends a call that outlives its own deadline: cleaning up behind a connection that is gone must not take a slot."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        logger.warning("%s of %s did not end with its deadline", method, worker)
        raise PeerUnavailableError(
            f"{worker}: expected {method} to end within {timeout_s:.1f} s, found it stuck"
        ) from None


def _hop_to(worker: StageWorker) -> Hop:
    return Hop(
        stage=worker.stage,
        peer_id=worker.key,
        address=worker.peer.address,
        certificate_pem=(worker.peer.certificate or b"").decode(),
    )
