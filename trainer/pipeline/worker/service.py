"""`StageService`: what a worker answers to drivers, other workers and the keeper of the account."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar

from torch import Tensor

from trainer.errors import PipelineError, RefusedError
from trainer.model.plan import StagePlan
from trainer.network.rpc import Endpoint, Peer, PeerId, Reply, Request
from trainer.pipeline.protocol.messages import (
    APPLIED,
    BACKWARD,
    CHAIN,
    EVALUATE,
    FORWARD,
    TAIL,
    AppliedAnswer,
    AppliedAsk,
    CountedAs,
    Hop,
    StageAnswer,
)
from trainer.pipeline.protocol.tensors import TensorHandler, TensorService
from trainer.pipeline.protocol.wire import GRADIENT, LABELS
from trainer.pipeline.stage import StageReplica
from trainer.pipeline.worker.applying import Applying, StageReplies, StageReply
from trainer.pipeline.worker.chain import Chain
from trainer.pipeline.worker.config import WorkerConfig
from trainer.pipeline.worker.link import StageLink, refusal_of
from trainer.pipeline.worker.memory_budget import MemoryBudget
from trainer.pipeline.worker.received import (
    ReceivedAsk,
    ReceivedBackward,
    ReceivedChain,
    ReceivedEvaluate,
    ReceivedForward,
    ReceivedTail,
    SuspendDetector,
)
from trainer.pipeline.worker.replies import Slot
from trainer.pipeline.worker.runtime import Runtime
from trainer.pipeline.worker.sharing import SharedThrough
from trainer.pipeline.worker.stage_executor import StageExecutor
from trainer.pipeline.worker.status import STATUS, Refusals, StatusAnswer, StatusAsk
from trainer.pipeline.worker.waiting import Rank

__all__ = ["Accepts", "ServiceStatus", "StageService"]

AskT = TypeVar("AskT", bound=ReceivedAsk)
ServiceStatus = Literal["joining", "serving", "leaving"]
Accepts = Literal["all", "begun", "nothing"]

_DECIDED_WITHIN_S = 10.0
"""How long a micro-batch may be about to be counted."""


class StageService:
    """Answers for one stage at one endpoint.

    Args:
        endpoint: not started yet.
        plan: the run's stages.
        stage_name: which of them is here.
        replica: its weights and counters.
        runtime: the thread it computes in.
        link: what crosses the stage's borders.
        replies: what is counted.
        shared: what of it would outlive this worker.
        config: the bounds.
        batches: whether forward requests are computed together, as suits `StageConfig.backward` ``recompute``.
        keepers: the run's drivers, the keeper of its account among them, as known now: who may have micro-batches
            computed and counted, or refused from now on. Names of micro-batches can be guessed; None: anybody may,
            which is for trusted networks only.
        keeper: who keeps the account, as known now: who has micro-batches refused whosever they are; each other driver
            only as its own. None: each driver may.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        plan: StagePlan,
        stage_name: str,
        *,
        replica: StageReplica,
        runtime: Runtime,
        link: StageLink,
        replies: StageReplies,
        shared: SharedThrough,
        config: WorkerConfig,
        batches: bool = False,
        keepers: Callable[[], Collection[PeerId]] | None = None,
        keeper: Callable[[], PeerId | None] | None = None,
    ) -> None:
        self.status: ServiceStatus = "joining"
        """What is announced; what is let in is decided by `accepts` alone."""
        self.accepts: Accepts = "nothing"
        """Which requests are let in: all, those that end what was begun (`stage/backward`), or none."""
        self.workers: Callable[[str], Mapping[PeerId, Peer]] | None = None
        """The workers of a stage as known now, by key: who may pass chains on to this one, and where the next hop is.
        None: anybody may, and a hop is where a route says; for trusted networks only."""
        self.refusals = Refusals()
        self.pulse = SuspendDetector()
        self._endpoint = endpoint
        self._name = stage_name
        self._replica = replica
        self._runtime = runtime
        self._link = link
        self._replies = replies
        self._shared = shared
        self._config = config
        self._keepers = keepers
        self._keeper = keeper
        self._num_under_way = 0
        self._room = MemoryBudget(config.max_received_bytes)
        max_batch_size = config.max_batch_size if batches else 1
        self._passing = StageExecutor(
            stage_name, replica, runtime, link, replies, shared, max_batch_size=max_batch_size
        )
        self._chain = Chain(endpoint, plan, stage_name, self._passing, link, self._peer_of)
        index = plan.index(stage_name)
        self._stage_before = plan.names[index - 1] if index else None
        self._applying = Applying(replies)

    @property
    def num_under_way(self) -> int:
        """Requests that were let in and are not answered yet, whatever they wait for.

        That is the tensors of a stream, the queue, the next worker of a chain, or the sending of the answer.
        """
        return self._num_under_way

    def register(self) -> None:
        """Makes the stage's methods answerable; before the endpoint starts."""
        if self._replica.kind == "tail":
            self._offer(TAIL, ReceivedTail, self._tail)
        else:
            self._offer(FORWARD, ReceivedForward, self._forward)
            self._offer(BACKWARD, ReceivedBackward, self._backward)
        self._offer(CHAIN, ReceivedChain, self._go_on)
        self._offer(EVALUATE, ReceivedEvaluate, self._evaluate)
        self._endpoint.register(APPLIED, AppliedAsk, self._applied)
        self._endpoint.register(STATUS, StatusAsk, self._status)

    def _offer(self, method: str, ask: type[AskT], handler: TensorHandler[AskT, StageAnswer]) -> None:
        TensorService(self._endpoint).register(
            method,
            ask,
            handler,
            max_bytes=self._link.request_bytes(self._config.max_request_tokens),
            within_s=lambda received: received.answer_within_s,
            admit=self._admit,
        )

    @contextmanager
    def _admit(self, sender: PeerId, ask: ReceivedAsk) -> Iterator[None]:
        """Room for a request's tensors and what is made of them, held until it is answered; so long it is under way."""
        with ExitStack() as held:
            try:
                self._check_head(ask)
                self._owner_of(sender, ask)
                held.enter_context(self._room.held(sender, self._link.held_bytes(ask, _num_made(ask))))
            except RefusedError as error:
                self.refusals.count(sender, "a request", error)
                raise
            self._num_under_way += 1
            try:
                yield
            finally:
                self._num_under_way -= 1

    async def _forward(self, sender: PeerId, ask: ReceivedForward, tensors: dict[str, Tensor]) -> StageReply:
        async def answer() -> StageReply:
            self._check(ask, tensors)
            self._passing.check_room(Rank.FORWARD, sender, ask)
            return await self._passing.answer_forward(sender, ask, tensors)

        return await self._answered(sender, "a forward pass", answer())

    async def _backward(self, sender: PeerId, ask: ReceivedBackward, tensors: dict[str, Tensor]) -> StageReply:
        async def answer() -> StageReply:
            self._check(ask, tensors, GRADIENT)
            if ask.num_tokens > ask.num_rows * ask.num_positions:
                raise RefusedError(
                    "malformed",
                    f"expected at most {ask.num_rows} x {ask.num_positions} tokens that count, found {ask.num_tokens}",
                )

            async def work(slot: Slot) -> StageReply:
                self._passing.check_room(Rank.BACKWARD, sender, ask)
                return await self._passing.answer_backward(slot, sender, ask, tensors)

            return await self._once(BACKWARD, sender, ask, ask.apply_within_s, work)

        return await self._answered(sender, "a backward pass", answer())

    async def _tail(self, sender: PeerId, ask: ReceivedTail, tensors: dict[str, Tensor]) -> StageReply:
        async def answer() -> StageReply:
            self._check(ask, tensors, LABELS)

            async def work(slot: Slot) -> StageReply:
                self._passing.check_room(Rank.TAIL, sender, ask)
                return await self._passing.answer_tail(slot, sender, ask, tensors)

            return await self._once(TAIL, sender, ask, ask.apply_within_s, work)

        return await self._answered(sender, "a tail's pass", answer())

    async def _go_on(self, sender: PeerId, ask: ReceivedChain, tensors: dict[str, Tensor]) -> StageReply:
        async def answer() -> StageReply:
            self._check(ask, tensors, LABELS)
            self._chain.check_route(ask)
            is_tail = self._replica.kind == "tail"

            async def work(slot: Slot) -> StageReply:
                self._passing.check_room(Rank.TAIL if is_tail else Rank.FORWARD, sender, ask)
                return await self._chain.answer(slot, sender, ask, tensors)

            return await self._once(TAIL if is_tail else CHAIN, sender, ask, ask.apply_within_s, work)

        return await self._answered(sender, "a chain", answer())

    async def _evaluate(self, sender: PeerId, ask: ReceivedEvaluate, tensors: dict[str, Tensor]) -> StageReply:
        async def answer() -> StageReply:
            wanted = {"tail": [LABELS], "body": [GRADIENT] if ask.with_gradient else [], "head": []}
            self._check(ask, tensors, *wanted[self._replica.kind])
            self._passing.check_evaluation(sender)
            self._passing.check_room(Rank.FORWARD, sender, ask)
            return await self._passing.answer_evaluate(sender, ask, tensors)

        return await self._answered(sender, "an evaluation", answer())

    async def _once(
        self,
        kind: str,
        sender: PeerId,
        ask: ReceivedAsk,
        apply_within_s: float,
        work: Callable[[Slot], Awaitable[StageReply]],
    ) -> StageReply:
        apply_before_s = self._runtime.now_s + apply_within_s - ask.waited_s
        return await self._applying.once(kind, ask.micro_batch, self._owner_of(sender, ask), apply_before_s, work)

    def _owner_of(self, sender: PeerId, ask: ReceivedAsk) -> PeerId:
        """The driver whose micro-batch it is: whoever asks, or for whom a worker of the stage before passes it on.

        Raises:
            RefusedError: ``not-a-driver``, or not heard of yet.
        """
        passed_on_for = ask.driver if isinstance(ask, ReceivedChain) else ""
        if self._keepers is None:
            return passed_on_for or sender
        keepers = self._keepers()
        if sender in keepers:
            return sender
        if passed_on_for in keepers and self._is_before(sender):
            return passed_on_for
        raise RefusedError("not-a-driver", f"expected a driver that this worker knows, found {sender[:12]}; try again")

    def _is_before(self, sender: PeerId) -> bool:
        """Whether it is a worker of the stage before."""
        if self._stage_before is None:
            return False
        return self.workers is None or sender in self.workers(self._stage_before)

    def _peer_of(self, hop: Hop) -> Peer:
        """Where the next worker of a chain is: as it says itself, and not where a route would have this one connect to.

        Raises:
            RefusedError: ``hop-busy``: this worker has not heard of it, and may soon.
        """
        if self.workers is None:
            return Peer(hop.peer_id, hop.address, hop.certificate_pem.encode() or None)
        peer = self.workers(hop.stage).get(hop.peer_id)
        if peer is None:
            raise RefusedError("hop-busy", f"{hop.stage} {hop.peer_id}: {self._name} has not heard of it; try again")
        return peer

    async def _applied(self, request: Request[AppliedAsk]) -> Reply[AppliedAnswer]:
        keys, refuse = request.body.micro_batches, request.body.refuse_from_now
        if refuse and self._keepers is not None and request.sender not in self._keepers():
            # Not answered without refusing: whoever asks would take what is not counted for what will not be.
            raise RefusedError("not-a-driver", f"expected a driver that this worker knows, found {request.sender[:12]}")
        refused_of = "" if self._keeper is None or request.sender == self._keeper() else request.sender
        incarnation, counted, undecided = self._replies.counted_among(
            keys, refuse_from_now=refuse, refused_of=refused_of
        )
        if undecided:
            await asyncio.wait([asyncio.wrap_future(future) for future in undecided], timeout=_DECIDED_WITHIN_S)
            incarnation, counted, undecided = self._replies.counted_among(
                keys, refuse_from_now=refuse, refused_of=refused_of
            )
            if undecided:
                raise RefusedError("busy", f"{len(undecided)} micro-batches are just being counted; ask again")
        mine = tuple(key for key in keys if key in counted)
        counted_as = self._counted_as(keys[0]) if len(keys) == 1 else None
        return Reply(AppliedAnswer(incarnation=incarnation, micro_batches=mine, counted_as=counted_as))

    def _counted_as(self, key: str) -> CountedAs | None:
        receipt = self._replies.receipt_of(key)
        if receipt is None:
            return None
        is_current = receipt.incarnation == self._replies.incarnation
        return CountedAs(
            incarnation=receipt.incarnation,
            applied_number=receipt.applied_number,
            shared_through=self._shared.count if is_current else 0,
        )

    async def _status(self, _request: Request[StatusAsk]) -> Reply[StatusAnswer]:
        figures = self._runtime.figures
        return Reply(
            StatusAnswer(
                stage=self._name,
                status=self.status,
                incarnation=self._replies.incarnation,
                version=self._replica.version,
                num_tokens=self._replica.accumulated.num_tokens,
                applied=self._replies.applied,
                outliers=self._replica.outliers,
                shared_through=self._shared.count,
                queued=figures.queued,
                queued_bytes=figures.queued_bytes,
                computed=figures.computed,
                batch_rows=figures.batch_rows,
                compute_s=figures.compute_s,
                rows_per_s=figures.rows_per_s,
                busy=figures.busy,
                cached_bytes=self._replica.cached_bytes,
                reply_bytes=self._replies.reply_bytes,
                refused=self.refusals.counts,
            )
        )

    def _check(self, ask: ReceivedAsk, tensors: dict[str, Tensor], *others: str) -> None:
        """Everything that can be told without looking at a value.

        Raises:
            RefusedError: it is not for this worker, not now, or not in order.
        """
        self._check_head(ask)  # Again: its tensors may have been long in coming.
        self._link.check_names(tensors, *others)
        ask.date(self.pulse)

    def _check_head(self, ask: ReceivedAsk) -> None:
        """What can be told before the tensors are here."""
        if ask.stage != self._name:
            raise RefusedError(
                "stage", f"expected a request for {self._name}, which is here, found one for {ask.stage}"
            )
        if self.accepts == "nothing" or (self.accepts == "begun" and not isinstance(ask, ReceivedBackward)):
            raise RefusedError(
                "stopping", f"this worker is {self.status} and takes {self.accepts}; ask another of {self._name}"
            )
        num_tokens = ask.num_rows * ask.num_positions
        if num_tokens > self._config.max_request_tokens:
            raise RefusedError(
                "malformed", f"expected at most {self._config.max_request_tokens} tokens a request, found {num_tokens}"
            )

    async def _answered(self, sender: PeerId, what: str, answer: Coroutine[Any, Any, StageReply]) -> StageReply:
        """Counts what is refused, and by whom it was asked."""
        try:
            return await answer
        except PipelineError as error:
            refusal = refusal_of(error)
            self.refusals.count(sender, what, refusal)
            raise refusal from error
        except RefusedError as error:
            self.refusals.count(sender, what, error)
            raise


def _num_made(ask: ReceivedAsk) -> int:
    """Outputs and gradients a worker holds for a request at a time: of a chain, those of the stages behind it too."""
    if isinstance(ask, ReceivedEvaluate) and ask.with_gradient:
        return 2
    return 3 if isinstance(ask, ReceivedChain) and ask.route else 1
