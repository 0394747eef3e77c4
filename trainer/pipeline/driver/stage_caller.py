"""One request to one worker, and whether what comes back is a valid answer to it.

All that can be checked without computing the answer anew is checked here, so what leaves this module may be passed on:
tensors of the names, types and shapes that the run's codec makes, all of them finite; the number of rows; a finite loss
of as many labels as there are; and the stages in which the micro-batch is counted. The driver passes tensors on under
the names they came with, and decodes them only to compare workers with each other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

from torch import Tensor

from trainer.compression.activations import IDS, ActivationCodec, Direction
from trainer.errors import MalformedAnswerError, PeerUnavailableError
from trainer.network.rpc import Endpoint
from trainer.network.rpc.envelope import peer_boundary
from trainer.network.transfer.descriptor import TensorSpec, all_finite, specs_of
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.results import HopTime
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import ask_tensors
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, LABELS, wire_ids
from trainer.pipeline.protocol.work import MicroBatch, StageCredit, boottime_s

logger = logging.getLogger(__name__)

_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class LinkForm:
    """What travels between the stages of a run."""

    codec: ActivationCodec
    dim: int  # Width of the model.

    def input_of(self, micro_batch: MicroBatch, activation: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Returns a stage's input: ids for the head, else the activation, with the ids where the codec needs them."""
        if activation is not None and not self.codec.needs_ids:
            return dict(activation)
        return {**(activation or {}), IDS: wire_ids(micro_batch.input_ids)}


@dataclass(frozen=True, slots=True)
class Answered:
    """A checked answer."""

    body: messages.StageAnswer
    tensors: Mapping[str, Tensor]
    hop: HopTime


class StageCaller:
    """Sends requests to workers, without retries; raises RpcError where there is no valid answer."""

    def __init__(self, endpoint: Endpoint, stages: Sequence[str], form: LinkForm, config: DriverConfig) -> None:
        self._endpoint = endpoint
        self._head, self._tail = stages[0], stages[-1]
        self._form = form
        self._config = config

    async def forward(self, worker: StageWorker, micro_batch: MicroBatch, given: Mapping[str, Tensor]) -> Answered:
        """Runs a stage forward."""
        outputs: list[Direction] = [ACTIVATION]
        method, model = messages.FORWARD, messages.ForwardAsk
        return await self._ask(method, model, [worker], micro_batch, given, outputs=outputs, counts=False)

    async def evaluate(
        self,
        worker: StageWorker,
        micro_batch: MicroBatch,
        given: Mapping[str, Tensor],
        gradient: Mapping[str, Tensor] | None,
    ) -> Answered:
        """Has a stage compute its output and gradient (tail: loss and gradient) without counting anything.

        ``given`` is the stage's input, ``gradient`` that with respect to its output (None for head and tail).
        """
        is_tail, fields = worker.stage == self._tail, {"with_gradient": worker.stage != self._head}
        outputs: list[Direction] = [GRADIENT] if is_tail else [ACTIVATION, GRADIENT]
        method, model, given = messages.EVALUATE, messages.EvaluateAsk, {**given, **(gradient or {})}
        return await self._ask(
            method, model, [worker], micro_batch, given, fields, outputs=outputs, counts=None, has_loss=is_tail
        )

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

        ``given`` is the gradient with respect to the stage's output, and the stage's input unless the worker has it.
        """
        fields = {"forward_version": forward_version, "num_tokens": num_tokens}
        return await self._ask(messages.BACKWARD, messages.BackwardAsk, [worker], micro_batch, given, fields)

    async def tail(self, worker: StageWorker, micro_batch: MicroBatch, given: Mapping[str, Tensor]) -> Answered:
        """Has the tail compute loss and gradient, and count the micro-batch."""
        return await self._ask(messages.TAIL, messages.TailAsk, [worker], micro_batch, given, has_loss=True)

    async def chain(
        self, route: Sequence[StageWorker], micro_batch: MicroBatch, given: Mapping[str, Tensor]
    ) -> Answered:
        """Has the workers of a route, one a stage, pass a micro-batch on among themselves."""
        hops = tuple(
            messages.Hop(
                stage=worker.stage,
                peer_id=worker.key,
                address=worker.peer.address,
                certificate_pem=(worker.peer.certificate or b"").decode(),
            )
            for worker in route[1:]
        )
        fields = {"route": hops}
        return await self._ask(messages.CHAIN, messages.ChainAsk, route, micro_batch, given, fields, has_loss=True)

    async def applied(
        self, worker: StageWorker, micro_batch: MicroBatch, *, refuse_from_now: bool, timeout_s: float
    ) -> tuple[str, StageCredit | None]:
        """Asks whether a worker has counted a micro-batch; if ``refuse_from_now``, it must not count it afterwards.

        It returns the incarnation that answers, and its credit; None: it has not counted it.
        """
        ask = messages.AppliedAsk(micro_batches=(micro_batch.key,), refuse_from_now=refuse_from_now)
        async with _ended_at(worker, messages.APPLIED, timeout_s + _GRACE_S):
            reply = await self._endpoint.call(
                worker.peer, messages.APPLIED, ask, messages.AppliedAnswer, timeout_s=timeout_s
            )
        said = reply.body
        if micro_batch.key not in said.micro_batches:
            return said.incarnation, None
        with peer_boundary(str(worker)):
            counted_as = said.counted_as or messages.CountedAs(incarnation=said.incarnation, applied_number=0)
            return said.incarnation, StageCredit(stage=worker.stage, **counted_as.model_dump())

    async def _ask(
        self,
        method: str,
        model: type[messages.StageAsk],
        route: Sequence[StageWorker],
        micro_batch: MicroBatch,
        given: Mapping[str, Tensor],
        fields: Mapping[str, object] = MappingProxyType({}),
        *,
        outputs: Sequence[Direction] = (GRADIENT,),
        counts: bool | None = True,
        has_loss: bool = False,
    ) -> Answered:
        """Sends a request to the first of a route; raises MalformedAnswerError if the answer cannot be one to it.

        ``outputs`` are to come back, of a head no gradient, and with ``has_loss`` the loss of its labels, which are
        sent beside ``given``. All stages of the route are to have counted it, or none; ``counts=None``: not looked at.
        No time in the request reaches beyond the micro-batch's lease.
        """
        worker = route[0]
        num_rows, num_positions = micro_batch.input_ids.shape
        left_s = micro_batch.send_before_s - boottime_s()
        timeout_s = min(86_400.0, max(0.001, min(self._config.request_timeout_s * len(route), left_s)))
        limits = {name: timeout_s for name in ("answer_within_s", "apply_within_s") if name in model.model_fields}
        shape = {"num_rows": num_rows, "num_positions": num_positions}
        ask = model.model_validate({"micro_batch": micro_batch.key, "stage": worker.stage, **shape, **limits, **fields})
        expected: list[TensorSpec] = []
        for kind in outputs:
            if kind != GRADIENT or worker.stage != self._head:
                expected += self._form.codec.specs(num_rows, num_positions, self._form.dim, kind)
        expected.sort(key=attrgetter("name"))
        sent = {**given, LABELS: wire_ids(micro_batch.labels)} if has_loss else given
        answer_bytes = sum(spec.size_bytes for spec in expected)
        begun_s = time.monotonic()
        async with _ended_at(worker, method, timeout_s + _GRACE_S):
            answer = await ask_tensors(
                self._endpoint,
                worker.peer,
                method,
                ask,
                sent,
                messages.StageAnswer,
                answer_bytes=answer_bytes,
                timeout_s=timeout_s,
            )
        took_s, body = time.monotonic() - begun_s, answer.body
        if body.num_rows != num_rows:
            raise MalformedAnswerError(f"{worker}: expected an answer of {num_rows} rows, found {body.num_rows}")
        with peer_boundary(str(worker)):
            found = list(specs_of(answer.tensors))
            if found != expected:
                raise MalformedAnswerError(f"{worker}: expected {_listed(expected)}, found {_listed(found)}")
            for name, tensor in answer.tensors.items():
                if not all_finite(tensor):
                    raise MalformedAnswerError(f"{worker}: expected finite values, found others in {name!r}")
        stages = [each.stage for each in route] if counts else []
        is_counted = sorted(body.applied) == sorted(stages) and (body.applied_number >= 1 or not counts)
        if counts is not None and not is_counted:
            raise MalformedAnswerError(
                f"{worker}: expected it to be counted in {', '.join(stages) or 'no stage'}, found "
                f"{', '.join(body.applied) or 'none'} as number {body.applied_number}"
            )
        if has_loss and body.num_tokens != (num_labels := micro_batch.num_tokens):
            raise MalformedAnswerError(f"{worker}: expected the loss of {num_labels} labels, found {body.num_tokens}")
        if has_loss and (body.loss_sum is None or not math.isfinite(body.loss_sum) or body.loss_sum < 0):
            raise MalformedAnswerError(f"{worker}: expected a loss, found {body.loss_sum}")
        times = took_s, body.compute_s, body.queue_s
        return Answered(
            body, answer.tensors, HopTime(worker.stage, method, worker.uid, worker.key, *times, body.version)
        )


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype}{list(spec.shape)}" for spec in specs) or "no tensors"


@asynccontextmanager
async def _ended_at(worker: StageWorker, method: str, timeout_s: float) -> AsyncIterator[None]:
    """Ends a call that outlives its own deadline, so that cleaning up after a dead connection holds no slot."""
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
