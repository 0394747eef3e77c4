"""`StageExecutor`: takes a micro-batch through this stage: decodes, queues, computes, counts, encodes and answers.

A forward pass keeps its graph under the names of micro-batch and sender, so that two drivers with the same micro-batch
(the lease of one ran out) do not get each other's. A micro-batch is counted in the compute thread. Between
`ReplyCache.claim` and `ReplyCache.counted` there is nothing but adding up; if time runs out meanwhile, or the adding
fails halfway, the sums cannot be trusted any more and are dropped whole.

In a chain this stage runs the forward pass, the next worker is asked to do the rest, and the gradient that it answers
is counted here. A failure at a later stage is answered as ``hop`` (no clear outcome; asking again the same way gets the
answers that were given, and only what was not done is done) or ``hop-…`` with the reason of the worker that refused,
whose stage and key come first in the text. A failure here after the later stages have counted is ``partly``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainer.compression.activations import IDS
from trainer.errors import (
    MalformedAnswerError,
    NonFiniteActivationError,
    PeerUnavailableError,
    PipelineError,
    RefusedError,
    RpcError,
    StaleGradientError,
)
from trainer.model.loss import IGNORED_LABEL
from trainer.network.rpc import Endpoint, Peer, PeerId
from trainer.network.rpc.envelope import peer_boundary
from trainer.pipeline.protocol.messages import CHAIN, ChainAsk, Hop, StageAnswer
from trainer.pipeline.protocol.tensors import TensorAnswer, ask_tensors
from trainer.pipeline.protocol.wire import ACTIVATION, LABELS, part_of
from trainer.pipeline.stage import BackwardResult, StageReplica, TailResult
from trainer.pipeline.worker.link import (
    ReceivedAsk,
    ReceivedBackward,
    ReceivedChain,
    ReceivedEvaluate,
    StageLink,
    refusal_of,
)
from trainer.pipeline.worker.replies import Acknowledgement, PendingCount, ReplyCache, StageReply
from trainer.pipeline.worker.runtime import Computed, EvaluationBudget, Job, Priority, Runtime

logger = logging.getLogger(__name__)

_NAMED = re.compile(r"\b(?:head|tail|body-[1-9][0-9]{0,3}) [0-9a-f]{64}: ")
"""Beginning of a refusal that names the worker that failed."""
_SHARE_BEHIND = 0.9  # Of the time that is left, for the stages behind this one; the rest is for counting here.
_Result = BackwardResult | TailResult
_Compute = Callable[[Callable[[], None]], _Result]
"""Computes and counts a gradient; calls its argument right before it adds up."""


@dataclass(eq=False, repr=False)
class StageExecutor:
    """Runs the passes of one stage, and has the stages ``behind`` it do theirs."""

    endpoint: Endpoint
    name: str
    behind: tuple[str, ...]
    replica: StageReplica
    runtime: Runtime
    link: StageLink
    replies: ReplyCache
    max_batch_size: int  # Rows of forward requests computed together; 1: none are.
    evaluations: EvaluationBudget = field(default_factory=EvaluationBudget)

    async def forward(
        self, sender: PeerId, ask: ReceivedAsk, tensors: Mapping[str, Tensor]
    ) -> tuple[StageAnswer, Tensor, dict[str, Tensor]]:
        """Runs a forward pass whose backward pass is to follow; returns answer, input, and output in wire form.

        Raises RefusedError if the request is not in order or too late, or there is no room; PipelineError if the output
        is not finite.
        """
        self._check_room(Priority.FORWARD, sender, ask)
        x, ids = await self.link.input_of(ask, tensors)
        item = (_graph_key(sender, ask), x)
        job = self._job(Priority.FORWARD, sender, ask, self._run_forward, x.nbytes, item=item)
        if 1 < self.max_batch_size >= ask.num_rows:
            job.group = ask.num_positions
        done = await self.runtime.compute(job)
        y, version = done.value
        try:
            activation = await self.link.activation(y, ids)
        except RefusedError:
            await self._forget(sender, ask)
            raise
        return self._answer(ask, version, done), x, activation

    async def answer_backward(
        self, pending: PendingCount, sender: PeerId, ask: ReceivedBackward, tensors: Mapping[str, Tensor]
    ) -> StageReply:
        """Counts a gradient and answers the input's; errors as `forward`, and ``tainted`` or ``already-applied``."""
        self._check_room(Priority.BACKWARD, sender, ask)
        x = None
        if IDS in tensors if self.link.shape.kind == "head" else part_of(ACTIVATION, tensors):
            x, _ = await self.link.input_of(ask, tensors)
        grad_y = await self.link.gradient_of(ask, tensors)
        return await self._count_gradient(pending, sender, ask, x, grad_y, ask.num_tokens, ask.forward_version)

    async def _count_gradient(
        self,
        pending: PendingCount,
        sender: PeerId,
        ask: ReceivedAsk,
        x: Tensor | None,
        grad_y: Tensor,
        num_tokens: int,
        forward_version: int,
        *,
        is_owed: bool = False,
    ) -> StageReply:
        """Counts a gradient and answers the input's; ``is_owed`` as of the `Job`, the others as in the replica."""
        key = _graph_key(sender, ask)

        def compute(before_apply: Callable[[], None]) -> BackwardResult:
            try:
                return self.replica.backward(key, x, grad_y, num_tokens, forward_version, before_apply=before_apply)
            except (NonFiniteActivationError, StaleGradientError):
                raise
            except PipelineError as error:
                raise RefusedError("no-input" if x is None else "malformed", str(error)) from error

        size_bytes = grad_y.nbytes + (0 if x is None else x.nbytes)
        return await self._count(Priority.BACKWARD, pending, sender, ask, compute, size_bytes, is_owed=is_owed)

    async def answer_tail(
        self, pending: PendingCount, sender: PeerId, ask: ReceivedAsk, tensors: Mapping[str, Tensor]
    ) -> StageReply:
        """Computes the loss, counts its gradient, and answers both; errors as `answer_backward`."""
        self._check_room(Priority.TAIL, sender, ask)
        labels = self.link.labels_of(ask, tensors)
        hidden, _ = await self.link.input_of(ask, tensors)

        def compute(before_apply: Callable[[], None]) -> TailResult:
            return self.replica.tail(ask.micro_batch, hidden, labels, before_apply=before_apply)

        return await self._count(Priority.TAIL, pending, sender, ask, compute, hidden.nbytes + labels.nbytes)

    async def answer_chain(
        self,
        peer_of: Callable[[Hop], Peer],
        pending: PendingCount,
        sender: PeerId,
        ask: ReceivedChain,
        tensors: Mapping[str, Tensor],
    ) -> StageReply:
        """Takes a micro-batch through this stage and those behind it, whose workers ``peer_of`` finds.

        Errors as `answer_backward`, and ``hop``, ``hop-…`` or ``partly``.
        """
        if not self.behind:
            return await self.answer_tail(pending, sender, ask, tensors)
        self._check_room(Priority.FORWARD, sender, ask)  # Before the labels cost anything.
        labels = self.link.labels_of(ask, tensors)
        num_tokens = int((labels != IGNORED_LABEL).sum())
        passed, x, sent = await self.forward(sender, ask, tensors)
        try:
            behind = await self._ask_next(peer_of, ask, tensors, sent, num_tokens, pending.owner)
            del sent  # As large as the gradient that comes in its place.
            grad_y = await self._gradient_from(ask, behind)
        except RefusedError:
            await self._forget(sender, ask)
            raise
        try:
            own = await self._count_gradient(pending, sender, ask, x, grad_y, num_tokens, passed.version, is_owed=True)
        except (PipelineError, RefusedError) as error:
            raise RefusedError("partly", f"counted behind {self.name}, not in it: {error}") from error
        update: dict[str, object] = {
            "applied": (self.name, *behind.body.applied),
            "loss_sum": behind.body.loss_sum,
            "num_tokens": num_tokens,
            "compute_s": own.body.compute_s + passed.compute_s,
            "queue_s": own.body.queue_s + passed.queue_s,
        }
        return TensorAnswer(own.body.model_copy(update=update), own.tensors)

    async def _ask_next(
        self,
        peer_of: Callable[[Hop], Peer],
        ask: ReceivedChain,
        tensors: Mapping[str, Tensor],
        sent: Mapping[str, Tensor],
        num_tokens: int,
        driver: str,
    ) -> StageReply:
        left_s = (ask.apply_within_s - ask.waited_s) * _SHARE_BEHIND
        if left_s <= 0:
            raise RefusedError("expired", f"no time was left for the stages behind {self.name}; nothing was counted")
        sent = {**sent, LABELS: tensors[LABELS]}
        if self.link.codec.needs_ids:
            sent[IDS] = tensors[IDS]
        hop, *rest = ask.route
        next_ask = ChainAsk(
            micro_batch=ask.micro_batch,
            stage=hop.stage,
            num_rows=ask.num_rows,
            num_positions=ask.num_positions,
            answer_within_s=min(left_s, ask.answer_within_s),
            apply_within_s=left_s,
            route=tuple(rest),
            driver=driver,
        )
        call = (self.endpoint, peer_of(hop), CHAIN, next_ask, sent, StageAnswer)
        answer_bytes = self.link.gradient_bytes(ask.num_rows, ask.num_positions)
        try:
            answer = await ask_tensors(*call, answer_bytes=answer_bytes, timeout_s=left_s)
            self._check_behind(answer.body, num_tokens)
        except RpcError as error:
            raise _refusal_behind(hop, error) from error
        return answer

    async def _gradient_from(self, ask: ReceivedChain, behind: StageReply) -> Tensor:
        hop = ask.route[0]
        try:
            with peer_boundary(f"{hop.stage} {hop.peer_id}"):
                return await self.link.gradient_of(ask, behind.tensors)
        except (RefusedError, MalformedAnswerError) as error:
            raise _refusal_behind(hop, MalformedAnswerError(f"its gradient: {error}")) from error

    def _check_behind(self, body: StageAnswer, num_tokens: int) -> None:
        """Checks what is passed on, so that a lie of the tail is not taken for the head's."""
        if body.applied != self.behind or body.num_tokens != num_tokens:
            raise MalformedAnswerError(
                f"expected {num_tokens} tokens counted in {', '.join(self.behind)}, found {body.num_tokens} in "
                f"{', '.join(body.applied) or 'none'}"
            )
        if body.loss_sum is None or not math.isfinite(body.loss_sum) or body.loss_sum < 0:
            raise MalformedAnswerError(f"expected a loss, found {body.loss_sum}")

    async def answer_evaluate(self, sender: PeerId, ask: ReceivedEvaluate, tensors: Mapping[str, Tensor]) -> StageReply:
        """Answers the output, or the tail's loss, and the input's gradient on request; errors as `forward`."""
        self.evaluations.check(sender)
        self._check_room(Priority.FORWARD, sender, ask)
        labels = self.link.labels_of(ask, tensors) if self.replica.kind == "tail" else None
        x, ids = await self.link.input_of(ask, tensors)
        wants_gradient = ask.with_gradient and self.replica.kind != "head"
        grad_y = await self.link.gradient_of(ask, tensors) if wants_gradient and labels is None else None

        def evaluate(_: Sequence[None]) -> Sequence[TailResult | tuple[Tensor, Tensor | None, int]]:
            if labels is not None:
                return [self.replica.evaluate_loss(x, labels, with_gradient=wants_gradient)]
            return [(*self.replica.evaluate(x, grad_y), self.replica.version)]

        size_bytes = x.nbytes + sum(each.nbytes for each in (labels, grad_y) if each is not None)
        done = await self.runtime.compute(self._job(Priority.FORWARD, sender, ask, evaluate, size_bytes))
        self.evaluations.spend(sender, done.compute_s)
        if not isinstance(done.value, TailResult):
            y, grad_x, version = done.value
            encoded = {**await self.link.activation(y, ids), **await self._gradient(grad_x)}
            return TensorAnswer(self._answer(ask, version, done), encoded)
        found = done.value
        if math.isnan(found.loss_sum):
            raise RefusedError("nonfinite", "the loss is not a number")
        answer = self._answer(ask, found.version, done, loss_sum=found.loss_sum, num_tokens=found.num_tokens)
        return TensorAnswer(answer, await self._gradient(found.grad_hidden))

    async def _gradient(self, grad_x: Tensor | None) -> dict[str, Tensor]:
        return {} if grad_x is None else await self.link.gradient(grad_x)

    async def _forget(self, sender: PeerId, ask: ReceivedAsk) -> None:
        """Drops a forward pass whose backward pass will not come."""
        await self.runtime.control(lambda: self.replica.forget(_graph_key(sender, ask)))

    async def _count(
        self,
        priority: Priority,
        pending: PendingCount,
        sender: PeerId,
        ask: ReceivedAsk,
        compute: _Compute,
        size_bytes: int,
        *,
        is_owed: bool = False,
    ) -> StageReply:
        job = self._job(priority, sender, ask, lambda _: [self._count_now(pending, compute)], size_bytes)
        job.begin_before_s = float("inf")  # `PendingCount` has the latest deadline of all callers.
        job.is_owed = is_owed
        done = await self.runtime.compute(job)
        result: _Result
        acknowledgement: Acknowledgement
        result, acknowledgement = done.value
        counted: dict[str, object] = {"applied": (self.name,), "scale": result.scale, **acknowledgement._asdict()}
        grad_x = result.grad_hidden if isinstance(result, TailResult) else result.grad_x
        if isinstance(result, TailResult):
            counted |= {"loss_sum": result.loss_sum, "num_tokens": result.num_tokens}
        answer = self._answer(ask, result.version, done, **counted)
        try:
            return TensorAnswer(answer, await self._gradient(grad_x))
        except (PipelineError, RefusedError) as error:  # Any other refusal would say that it was not counted.
            raise RefusedError(
                "already-applied", f"{ask.micro_batch} is counted; there is no answer: {error}"
            ) from error

    def _count_now(self, pending: PendingCount, compute: _Compute) -> tuple[_Result, Acknowledgement]:
        self.replies.check_wanted(pending)
        try:
            result = compute(lambda: self.replies.claim(pending))
        except BaseException:
            if self.replies.is_claimed(pending):
                self._drop_all("adding up failed")
            raise
        acknowledgement = self.replies.counted(pending)
        if acknowledgement is None:
            self._drop_all(f"{pending.key} was added up too late; was this process stopped?")
            raise RefusedError(
                "tainted", f"{pending.key} was counted too late: this worker drops all it had not stepped with"
            )
        return result, acknowledgement

    def _drop_all(self, why: str) -> None:
        dropped, num_known = self.replica.drop(), self.replies.taint()
        logger.warning(
            "%d micro-batches of %d tokens are dropped (%d of them acknowledged): %s",
            *(dropped.num_micro_batches, dropped.num_tokens, num_known, why),
        )

    def _run_forward(self, items: Sequence[tuple[str, Tensor]]) -> Sequence[tuple[Tensor, int] | RefusedError]:
        version = self.replica.version
        outputs = self.replica.forward_many(items)
        return [refusal_of(y) if isinstance(y, PipelineError) else (y, version) for y in outputs]

    def _check_room(self, priority: Priority, sender: PeerId, ask: ReceivedAsk) -> None:
        self.runtime.check_room(priority, sender, self.link.decoded_bytes(ask))

    def _answer(self, ask: ReceivedAsk, version: int, done: Computed, **more: object) -> StageAnswer:
        answer = StageAnswer(
            incarnation=self.replies.incarnation,
            version=version,
            num_rows=ask.num_rows,
            shared_through=self.replies.shared.count,
            compute_s=min(done.compute_s, 86_400.0),
            queue_s=min(max(0.0, done.queue_s), 86_400.0),
        )
        return answer.model_copy(update=more)

    def _job(
        self,
        priority: Priority,
        sender: PeerId,
        ask: ReceivedAsk,
        compute: Callable[[Sequence[Any]], Sequence[Any]],
        size_bytes: int,
        *,
        item: object = None,
    ) -> Job:
        begin_before_s = self.runtime.clock() + ask.answer_within_s - ask.waited_s
        return Job(
            priority, sender, item, compute, num_rows=ask.num_rows, size_bytes=size_bytes, begin_before_s=begin_before_s
        )


def _graph_key(sender: PeerId, ask: ReceivedAsk) -> str:
    return f"{ask.micro_batch} {sender}"


def _refusal_behind(hop: Hop, error: RpcError) -> RefusedError:
    """Returns the refusal for a failure of the next hop; one that was passed on keeps the failed worker's words."""
    if isinstance(error, RefusedError):
        named = list(_NAMED.finditer(str(error)))
        if named and (error.reason == "hop" or error.reason.startswith("hop-")):
            return RefusedError(error.reason, str(error)[named[-1].start() :])
        reason = f"hop-{error.reason.removeprefix('hop-')}"
    else:
        reason = "hop" if isinstance(error, PeerUnavailableError) else "hop-malformed-answer"
    return RefusedError(reason, f"{hop.stage} {hop.peer_id}: {error}")
