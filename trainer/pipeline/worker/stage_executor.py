"""`StageExecutor`: takes a micro-batch through this stage: decodes, queues, computes, counts, encodes and answers.

A forward pass keeps its graph under the names of micro-batch and sender, so that two drivers with the same micro-batch
(the lease of one ran out) do not get each other's.

A micro-batch is counted in the compute thread. Between `ReplyCache.claim` and `ReplyCache.counted` there is nothing but
adding up (some milliseconds). If time runs out meanwhile, or the adding fails halfway, the sums cannot be trusted any
more and are dropped whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from trainer.errors import NonFiniteActivationError, PipelineError, RefusedError, StaleGradientError
from trainer.network.rpc import PeerId
from trainer.pipeline.protocol.messages import StageAnswer
from trainer.pipeline.protocol.tensors import TensorAnswer
from trainer.pipeline.protocol.wire import ACTIVATION, IDS, part_of
from trainer.pipeline.stage import BackwardResult, LossSum, StageReplica, TailResult
from trainer.pipeline.worker.admission import EvaluationBudget, Job, Priority
from trainer.pipeline.worker.link import StageLink, refusal_of
from trainer.pipeline.worker.received import ReceivedAsk, ReceivedBackward, ReceivedEvaluate
from trainer.pipeline.worker.replies import Acknowledgement, PendingCount, ReplyCache, StageReply
from trainer.pipeline.worker.runtime import Runtime

__all__ = ["StageExecutor"]

logger = logging.getLogger(__name__)

_Result = BackwardResult | TailResult
_Compute = Callable[[Callable[[], None]], _Result]
"""Computes and counts a gradient; calls its argument right before it adds up."""


class StageExecutor:
    """Runs the passes of one stage.

    Args:
        name: of the stage.
        replica: computes.
        runtime: the thread it computes in.
        link: converts tensors.
        replies: what is counted.
        max_batch_size: rows of forward requests computed together; 1: none are.
    """

    def __init__(
        self,
        name: str,
        replica: StageReplica,
        runtime: Runtime,
        link: StageLink,
        replies: ReplyCache,
        *,
        max_batch_size: int,
    ) -> None:
        self.name = name
        self.replica = replica
        self.runtime = runtime
        self.link = link
        self.replies = replies
        self.evaluations = EvaluationBudget()
        self._max_batch_size = max_batch_size

    async def forward(
        self, sender: PeerId, ask: ReceivedAsk, tensors: Mapping[str, Tensor]
    ) -> tuple[StageAnswer, Tensor, dict[str, Tensor]]:
        """Runs a forward pass whose backward pass is to follow.

        Returns:
            The answer, the input, and the output in wire form.

        Raises:
            RefusedError: the request is not in order, too late, or there is no room.
            PipelineError: the output is not finite.
        """
        self.check_room(Priority.FORWARD, sender, ask)
        x, ids = await self.link.input_of(ask, tensors)
        item = (_graph_key(sender, ask), x)
        job = self._job(Priority.FORWARD, sender, ask, self._run_forward, x.nbytes, item=item)
        if 1 < self._max_batch_size >= ask.num_rows:
            job.group = ask.num_positions
        done = await self.runtime.compute(job)
        y, version = done.value
        try:
            activation = await self.link.activation(y, ids)
        except RefusedError:
            await self.forget(sender, ask)
            raise
        return self._answer(ask, version, done.compute_s, done.queue_s), x, activation

    async def answer_forward(self, sender: PeerId, ask: ReceivedAsk, tensors: Mapping[str, Tensor]) -> StageReply:
        """Runs a forward pass and answers its output; errors as `forward`."""
        answer, _, activation = await self.forward(sender, ask, tensors)
        return TensorAnswer(answer, activation)

    async def answer_backward(
        self, pending: PendingCount, sender: PeerId, ask: ReceivedBackward, tensors: Mapping[str, Tensor]
    ) -> StageReply:
        """Counts a gradient and answers the input's; errors as `forward`, and ``tainted`` or ``already-applied``."""
        self.check_room(Priority.BACKWARD, sender, ask)
        x = None
        if IDS in tensors if self.link.shape.kind == "head" else part_of(ACTIVATION, tensors):
            x, _ = await self.link.input_of(ask, tensors)
        grad_y = await self.link.gradient_of(ask, tensors)
        return await self.count_gradient(pending, sender, ask, x, grad_y, ask.num_tokens, ask.forward_version)

    async def count_gradient(
        self,
        pending: PendingCount,
        sender: PeerId,
        ask: ReceivedAsk,
        x: Tensor | None,
        grad_y: Tensor,
        num_tokens: int,
        forward_version: int,
        *,
        owed: bool = False,
    ) -> StageReply:
        """Counts a gradient and answers the input's; ``owed`` as in `Runtime.submit`, the others as in the replica."""
        key = _graph_key(sender, ask)

        def compute(before_apply: Callable[[], None]) -> BackwardResult:
            try:
                return self.replica.backward(key, x, grad_y, num_tokens, forward_version, before_apply=before_apply)
            except (NonFiniteActivationError, StaleGradientError):
                raise
            except PipelineError as error:
                raise RefusedError("no-input" if x is None else "malformed", str(error)) from error

        size_bytes = grad_y.nbytes + (0 if x is None else x.nbytes)
        return await self._count(Priority.BACKWARD, pending, sender, ask, compute, size_bytes, owed=owed)

    async def answer_tail(
        self, pending: PendingCount, sender: PeerId, ask: ReceivedAsk, tensors: Mapping[str, Tensor]
    ) -> StageReply:
        """Computes the loss, counts its gradient, and answers both; errors as `answer_backward`."""
        self.check_room(Priority.TAIL, sender, ask)
        labels = self.link.labels_of(ask, tensors)
        hidden, _ = await self.link.input_of(ask, tensors)

        def compute(before_apply: Callable[[], None]) -> TailResult:
            return self.replica.tail(ask.micro_batch, hidden, labels, before_apply=before_apply)

        return await self._count(Priority.TAIL, pending, sender, ask, compute, hidden.nbytes + labels.nbytes)

    async def answer_evaluate(self, sender: PeerId, ask: ReceivedEvaluate, tensors: Mapping[str, Tensor]) -> StageReply:
        """Answers the output, or the tail's loss, and the input's gradient on request; errors as `forward`."""
        self.evaluations.check(sender)
        self.check_room(Priority.FORWARD, sender, ask)
        labels = self.link.labels_of(ask, tensors) if self.replica.kind == "tail" else None
        x, ids = await self.link.input_of(ask, tensors)
        wants_gradient = ask.with_gradient and self.replica.kind != "head"
        grad_y = await self.link.gradient_of(ask, tensors) if wants_gradient and labels is None else None

        def evaluate(_: Sequence[None]) -> Sequence[tuple[Tensor | LossSum, Tensor | None, int]]:
            if labels is not None:
                return [(*self.replica.evaluate_loss(x, labels, with_gradient=wants_gradient), self.replica.version)]
            if grad_y is not None:
                return [(*self.replica.evaluate_gradient(x, grad_y), self.replica.version)]
            return [(self.replica.evaluate(x), None, self.replica.version)]

        size_bytes = x.nbytes + sum(each.nbytes for each in (labels, grad_y) if each is not None)
        done = await self.runtime.compute(self._job(Priority.FORWARD, sender, ask, evaluate, size_bytes))
        self.evaluations.spend(sender, done.compute_s)
        found, grad_x, version = done.value
        answer = self._answer(ask, version, done.compute_s, done.queue_s)
        gradient = {} if grad_x is None else await self.link.gradient(grad_x)
        if not isinstance(found, LossSum):
            return TensorAnswer(answer, {**await self.link.activation(found, ids), **gradient})
        if found.loss_sum != found.loss_sum:
            raise RefusedError("nonfinite", "the loss is not a number")
        update = {"loss_sum": found.loss_sum, "num_tokens": found.num_tokens}
        return TensorAnswer(answer.model_copy(update=update), gradient)

    async def forget(self, sender: PeerId, ask: ReceivedAsk) -> None:
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
        owed: bool = False,
    ) -> StageReply:
        job = self._job(priority, sender, ask, lambda _: [self._count_now(pending, compute)], size_bytes)
        job.begin_before_s = float("inf")  # `PendingCount` has the latest deadline of all callers.
        done = await self.runtime.compute(job, owed=owed)
        result: _Result
        result, acknowledgement = done.value
        update: dict[str, object] = {
            "applied": (self.name,),
            "incarnation": acknowledgement.incarnation,
            "applied_number": acknowledgement.applied_number,
            "scale": result.scale,
        }
        if isinstance(result, TailResult):
            update |= {"loss_sum": result.loss_sum, "num_tokens": result.num_tokens}
        grad_x = result.grad_hidden if isinstance(result, TailResult) else result.grad_x
        answer = self._answer(ask, result.version, done.compute_s, done.queue_s).model_copy(update=update)
        try:
            return TensorAnswer(answer, {} if grad_x is None else await self.link.gradient(grad_x))
        except (PipelineError, RefusedError) as error:  # Any other refusal would say that it was not counted.
            raise RefusedError(
                "already-applied", f"{ask.micro_batch} is counted; there is no answer: {error}"
            ) from error

    def _count_now(self, pending: PendingCount, compute: _Compute) -> tuple[_Result, Acknowledgement]:
        """Computes a micro-batch's gradient and counts it; in the compute thread.

        Raises:
            RefusedError: ``expired``, nothing was counted; ``tainted``, all is dropped.
            TrainerError: the computation's own; nothing was counted.
        """
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

    def check_room(self, priority: Priority, sender: PeerId, ask: ReceivedAsk) -> None:
        """Checks that a request's tensors would find room in the queue.

        Raises:
            RefusedError: ``busy``: they would not.
        """
        self.runtime.check_room(priority, sender, self.link.decoded_bytes(ask))

    def _answer(self, ask: ReceivedAsk, version: int, compute_s: float, queue_s: float) -> StageAnswer:
        return StageAnswer(
            incarnation=self.replies.incarnation,
            version=version,
            num_rows=ask.num_rows,
            shared_through=self.replies.shared.count,
            compute_s=min(compute_s, 86_400.0),
            queue_s=min(max(0.0, queue_s), 86_400.0),
        )

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
        begin_before_s = self.runtime.now_s + ask.answer_within_s - ask.waited_s
        return Job(
            priority, sender, item, compute, num_rows=ask.num_rows, size_bytes=size_bytes, begin_before_s=begin_before_s
        )


def _graph_key(sender: PeerId, ask: ReceivedAsk) -> str:
    return f"{ask.micro_batch} {sender}"
