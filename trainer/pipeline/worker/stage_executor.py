"""The stage executor: takes a micro-batch through this stage: decodes, queues, computes, encodes and answers it.

A forward pass keeps its graph under the names of micro-batch and sender, so that two drivers with the same micro-batch
(the lease of one ran out) do not get each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.errors import NonFiniteActivationError, PipelineError, RefusedError, StaleGradientError
from trainer.network.rpc import PeerId
from trainer.pipeline.protocol.messages import StageAnswer
from trainer.pipeline.protocol.tensors import TensorAnswer
from trainer.pipeline.protocol.wire import ACTIVATION, IDS, part_of
from trainer.pipeline.stage import BackwardResult, LossSum, StageReplica, TailResult
from trainer.pipeline.worker.applying import StageReplies, StageReply
from trainer.pipeline.worker.counting import Counted, Counter
from trainer.pipeline.worker.evaluations import Evaluations
from trainer.pipeline.worker.link import StageLink, refusal_of
from trainer.pipeline.worker.received import ReceivedAsk, ReceivedBackward, ReceivedEvaluate
from trainer.pipeline.worker.replies import Slot
from trainer.pipeline.worker.runtime import Runtime
from trainer.pipeline.worker.sharing import SharedThrough
from trainer.pipeline.worker.waiting import Job, Rank

__all__ = ["ForwardPass", "Gradient", "StageExecutor"]

_Forwarded = tuple[Tensor, int]
_Apply = Callable[[Callable[[], None]], BackwardResult | TailResult]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """A forward pass that was run here, without its output: that is needed for as long as it is sent."""

    key: str
    """Under which its graph is kept."""
    x: Tensor
    version: int
    compute_s: float
    queue_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """What is to be counted."""

    key: str
    x: Tensor | None
    """The input again; None: known to be kept."""
    grad_y: Tensor
    num_tokens: int
    forward_version: int


class StageExecutor:
    """One stage's passes.

    Args:
        stage_name: of it.
        replica: computes.
        runtime: when.
        link: what comes and goes.
        replies: what is counted.
        shared: what of it would outlive this worker.
        max_batch_size: rows of forward requests computed together; 1: none are.
    """

    def __init__(
        self,
        stage_name: str,
        replica: StageReplica,
        runtime: Runtime,
        link: StageLink,
        replies: StageReplies,
        shared: SharedThrough,
        *,
        max_batch_size: int,
    ) -> None:
        self._name = stage_name
        self._replica = replica
        self._runtime = runtime
        self._link = link
        self._replies = replies
        self._shared = shared
        self._counter = Counter(replica, replies, shared)
        self._max_batch_size = max_batch_size
        self._evaluations = Evaluations()

    def check_room(self, rank: Rank, sender: PeerId, ask: ReceivedAsk) -> None:
        """Whether a request would be let in, before work is put into its tensors.

        Raises:
            RefusedError: ``busy`` or ``stopping``.
        """
        self._runtime.check_room(rank, sender, self._link.decoded_bytes(ask))

    def check_evaluation(self, sender: PeerId) -> None:
        """Whether a driver has not had its share of evaluations.

        Raises:
            RefusedError: ``busy``.
        """
        self._evaluations.check(sender)

    async def forward(
        self, sender: PeerId, ask: ReceivedAsk, tensors: Mapping[str, Tensor]
    ) -> tuple[ForwardPass, dict[str, Tensor]]:
        """Runs a forward pass whose backward pass is to follow.

        Returns:
            What is known of it, and its output in the wire's form.

        Raises:
            RefusedError: the request is not in order, too late, or there is no room.
            PipelineError: the output is not finite.
        """
        x, ids = await self._link.input_of(ask, tensors)
        key = _graph_key(sender, ask)
        job = self._job(Rank.FORWARD, sender, ask, (key, x), self._run_forward, x.nbytes)
        if 1 < self._max_batch_size >= ask.num_rows:
            job.group = ask.num_positions
        done = await self._runtime.compute(job)
        y, version = done.value
        try:
            activation = await self._link.activation(y, ids)
        except RefusedError:
            await self.forget(key)
            raise
        return ForwardPass(key, x, version, done.compute_s, done.queue_s), activation

    async def answer_forward(self, sender: PeerId, ask: ReceivedAsk, tensors: Mapping[str, Tensor]) -> StageReply:
        """Runs a forward pass and answers its output; errors as `forward`."""
        passed, activation = await self.forward(sender, ask, tensors)
        return TensorAnswer(self._answer(ask, passed.version, passed.compute_s, passed.queue_s), activation)

    async def answer_backward(
        self, slot: Slot, sender: PeerId, ask: ReceivedBackward, tensors: Mapping[str, Tensor]
    ) -> StageReply:
        """Counts a gradient and answers the input's; errors as `forward`, and of `Counter.count`."""
        x = None
        if IDS in tensors if self._link.shape.kind == "head" else part_of(ACTIVATION, tensors):
            x, _ = await self._link.input_of(ask, tensors)
        grad_y = await self._link.gradient_of(ask, tensors)
        gradient = Gradient(_graph_key(sender, ask), x, grad_y, ask.num_tokens, ask.forward_version)
        return await self.count_gradient(slot, sender, ask, gradient)

    async def count_gradient(
        self, slot: Slot, sender: PeerId, ask: ReceivedAsk, gradient: Gradient, *, owed: bool = False
    ) -> StageReply:
        """Counts a gradient and answers the input's; see `Runtime.submit` of ``owed``."""

        def apply(before_apply: Callable[[], None]) -> BackwardResult:
            try:
                return self._replica.backward(
                    gradient.key,
                    gradient.x,
                    gradient.grad_y,
                    gradient.num_tokens,
                    gradient.forward_version,
                    before_apply=before_apply,
                )
            except (NonFiniteActivationError, StaleGradientError):
                raise
            except PipelineError as error:
                raise RefusedError("no-input" if gradient.x is None else "malformed", str(error)) from error

        size_bytes = gradient.grad_y.nbytes + (0 if gradient.x is None else gradient.x.nbytes)
        return await self._count(Rank.BACKWARD, slot, sender, ask, apply, size_bytes, owed=owed)

    async def answer_tail(
        self, slot: Slot, sender: PeerId, ask: ReceivedAsk, tensors: Mapping[str, Tensor]
    ) -> StageReply:
        """Loss, gradient and counting in one; errors as `answer_backward`."""
        labels = self._link.labels_of(ask, tensors)
        hidden, _ = await self._link.input_of(ask, tensors)

        def apply(before_apply: Callable[[], None]) -> TailResult:
            return self._replica.tail(ask.micro_batch, hidden, labels, before_apply=before_apply)

        return await self._count(Rank.TAIL, slot, sender, ask, apply, hidden.nbytes + labels.nbytes)

    async def answer_evaluate(self, sender: PeerId, ask: ReceivedEvaluate, tensors: Mapping[str, Tensor]) -> StageReply:
        """The output, or the tail's loss, and the input's gradient where it is wanted; errors as `forward`."""
        labels = self._link.labels_of(ask, tensors) if self._replica.kind == "tail" else None
        x, ids = await self._link.input_of(ask, tensors)
        wants_gradient = ask.with_gradient and self._replica.kind != "head"
        grad_y = await self._link.gradient_of(ask, tensors) if wants_gradient and labels is None else None

        def evaluate(_: Sequence[None]) -> Sequence[tuple[Tensor | LossSum, Tensor | None, int]]:
            found: Tensor | LossSum
            grad_x: Tensor | None = None
            if labels is not None and wants_gradient:
                found, grad_x = self._replica.evaluate_loss_gradient(x, labels)
            elif labels is not None:
                found = self._replica.evaluate_loss(x, labels)
            elif grad_y is not None:
                found, grad_x = self._replica.evaluate_gradient(x, grad_y)
            else:
                found = self._replica.evaluate(x)
            return [(found, grad_x, self._replica.version)]

        size_bytes = x.nbytes + sum(each.nbytes for each in (labels, grad_y) if each is not None)
        done = await self._runtime.compute(self._job(Rank.FORWARD, sender, ask, None, evaluate, size_bytes))
        self._evaluations.spent(sender, done.compute_s)
        found, grad_x, version = done.value
        answer = self._answer(ask, version, done.compute_s, done.queue_s)
        gradient = {} if grad_x is None else await self._link.gradient(grad_x)
        if isinstance(found, LossSum):
            if found.loss_sum != found.loss_sum:
                raise RefusedError("nonfinite", "the loss is not a number")
            body = answer.model_copy(update={"loss_sum": found.loss_sum, "num_tokens": found.num_tokens})
            return TensorAnswer(body, gradient)
        return TensorAnswer(answer, {**await self._link.activation(found, ids), **gradient})

    async def forget(self, key: str) -> None:
        """Forgets a forward pass whose backward pass will not come."""
        await self._runtime.control(lambda: self._replica.forget(key))

    async def _count(
        self,
        rank: Rank,
        slot: Slot,
        sender: PeerId,
        ask: ReceivedAsk,
        apply: _Apply,
        size_bytes: int,
        *,
        owed: bool = False,
    ) -> StageReply:
        job = self._job(rank, sender, ask, None, lambda _: [self._counter.count(slot, apply)], size_bytes)
        job.begin_before_s = float("inf")  # The slot knows better: of all who wait for it.
        done = await self._runtime.compute(job, owed=owed)
        counted: Counted[BackwardResult | TailResult] = done.value
        result, receipt = counted.result, counted.receipt
        update: dict[str, object] = {
            "applied": (self._name,),
            "incarnation": receipt.incarnation,
            "applied_number": receipt.applied_number,
            "scale": result.scale,
        }
        if isinstance(result, TailResult):
            update |= {"loss_sum": result.loss_sum, "num_tokens": result.num_tokens}
            grad_x: Tensor | None = result.grad_hidden
        else:
            grad_x = result.grad_x
        answer = self._answer(ask, result.version, done.compute_s, done.queue_s).model_copy(update=update)
        return TensorAnswer(answer, {} if grad_x is None else await self._gradient_behind(ask, grad_x))

    async def _gradient_behind(self, ask: ReceivedAsk, grad_x: Tensor) -> dict[str, Tensor]:
        """The gradient to answer with, of what is counted: any other refusal would say that nothing was."""
        try:
            return await self._link.gradient(grad_x)
        except (PipelineError, RefusedError) as error:
            raise RefusedError(
                "already-applied", f"{ask.micro_batch} is counted; there is no answer: {error}"
            ) from error

    def _run_forward(self, items: Sequence[tuple[str, Tensor]]) -> Sequence[_Forwarded | RefusedError]:
        version = self._replica.version
        outputs = self._replica.forward_many(items)
        return [refusal_of(y) if isinstance(y, PipelineError) else (y, version) for y in outputs]

    def _answer(self, ask: ReceivedAsk, version: int, compute_s: float, queue_s: float) -> StageAnswer:
        return StageAnswer(
            incarnation=self._replies.incarnation,
            version=version,
            num_rows=ask.num_rows,
            shared_through=self._shared.count,
            compute_s=min(compute_s, 86_400.0),
            queue_s=min(max(0.0, queue_s), 86_400.0),
        )

    def _job(
        self,
        rank: Rank,
        sender: PeerId,
        ask: ReceivedAsk,
        item: object,
        compute: Callable[[Sequence[Any]], Sequence[Any]],
        size_bytes: int,
    ) -> Job:
        return Job(
            rank,
            sender,
            item,
            compute,
            num_rows=ask.num_rows,
            size_bytes=size_bytes,
            begin_before_s=self._runtime.now_s + ask.answer_within_s - ask.waited_s,
        )


def _graph_key(sender: PeerId, ask: ReceivedAsk) -> str:
    return f"{ask.micro_batch} {sender}"
