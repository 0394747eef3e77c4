"""`StageService`: answers the requests of drivers, of other workers, and of the ledger server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Literal, TypeVar

from torch import Tensor

from trainer.errors import PipelineError, RefusedError
from trainer.model.plan import StagePlan
from trainer.network.rpc import Endpoint, Peer, PeerId, Reply, Request
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import TensorHandler, TensorService
from trainer.pipeline.protocol.wire import GRADIENT, LABELS
from trainer.pipeline.worker.admission import MemoryBudget
from trainer.pipeline.worker.chain import Chain
from trainer.pipeline.worker.config import WorkerConfig
from trainer.pipeline.worker.link import refusal_of
from trainer.pipeline.worker.received import (
    ReceivedAsk,
    ReceivedBackward,
    ReceivedChain,
    ReceivedEvaluate,
    ReceivedForward,
    ReceivedTail,
    SuspendDetector,
)
from trainer.pipeline.worker.replies import CountingTasks, PendingCount, StageReply
from trainer.pipeline.worker.stage_executor import StageExecutor
from trainer.pipeline.worker.status import STATUS, Refusals, StatusAnswer, StatusAsk

__all__ = ["Accepts", "ServiceStatus", "StageService"]

AskT = TypeVar("AskT", bound=ReceivedAsk)
CountingAskT = TypeVar("CountingAskT", ReceivedBackward, ReceivedTail, ReceivedChain)
ServiceStatus = Literal["joining", "serving", "leaving"]
Accepts = Literal["all", "begun", "nothing"]

_DECIDED_WITHIN_S = 10.0
"""How long a micro-batch may be about to be counted."""


class StageService:
    """Answers for one stage at one endpoint.

    Args:
        endpoint: not started yet.
        plan: the run's stages.
        executor: runs the passes of the stage that is here.
        config: the bounds.
        drivers: the run's drivers as known now, who may have micro-batches computed and counted, or refused from now
            on. Names of micro-batches can be guessed; None: anybody may, which is for trusted networks only.
        keeper: the ledger server's key as known now, which may have anybody's micro-batches refused; each other driver
            only its own. None: each driver may.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        plan: StagePlan,
        executor: StageExecutor,
        config: WorkerConfig,
        *,
        drivers: Callable[[], Collection[PeerId]] | None = None,
        keeper: Callable[[], PeerId | None] | None = None,
    ) -> None:
        self.status: ServiceStatus = "joining"
        """Announced; `accepts` alone decides what is let in."""
        self.accepts: Accepts = "nothing"
        """Which requests are let in: all, those that end what was begun (`stage/backward`), or none."""
        self.workers: Callable[[str], Mapping[PeerId, Peer]] | None = None
        """The workers of a stage as known now, by key: who may pass chains on to this one, and where the next hop is.
        None: anybody may, and a hop is where a route says; for trusted networks only."""
        self.refusals = Refusals()
        self.suspend_detector = SuspendDetector()
        self.num_under_way = 0
        """Requests that were let in and are not answered yet, whatever they wait for: tensors of a stream, the queue,
        the next worker of a chain, or the sending of the answer."""
        self._endpoint = endpoint
        self._executor = executor
        self._name = executor.name
        self._config = config
        self._drivers = drivers
        self._keeper = keeper
        self._memory = MemoryBudget(config.max_received_bytes)
        self._chain = Chain(endpoint, plan, executor, self._peer_of)
        index = plan.index(executor.name)
        self._stage_before = plan.names[index - 1] if index else None
        self._counting = CountingTasks(executor.replies)

    def register(self) -> None:
        """Registers the stage's methods; before the endpoint starts."""
        if self._executor.replica.kind == "tail":
            self._register_stage_method(messages.TAIL, ReceivedTail, self._tail)
        else:
            self._register_stage_method(messages.FORWARD, ReceivedForward, self._forward)
            self._register_stage_method(messages.BACKWARD, ReceivedBackward, self._backward)
        self._register_stage_method(messages.CHAIN, ReceivedChain, self._pass_on)
        self._register_stage_method(messages.EVALUATE, ReceivedEvaluate, self._evaluate)
        self._endpoint.register(messages.APPLIED, messages.AppliedAsk, self._applied)
        self._endpoint.register(STATUS, StatusAsk, self._status)

    def _register_stage_method(
        self, method: str, ask: type[AskT], handler: TensorHandler[AskT, messages.StageAnswer]
    ) -> None:
        TensorService(self._endpoint).register(
            method,
            ask,
            handler,
            max_bytes=self._executor.link.max_request_bytes(self._config.max_request_tokens),
            within_s=lambda received: received.answer_within_s,
            admit=self._admit,
        )

    @contextmanager
    def _admit(self, sender: PeerId, ask: ReceivedAsk) -> Iterator[None]:
        """Holds memory for a request's tensors and what is made of them; within the block it is under way."""
        with ExitStack() as held:
            with self._counting_refusals(sender, "a request"):
                self._check_message(ask)
                self._owner_of(sender, ask)
                held.enter_context(self._memory.held(sender, self._executor.link.held_bytes(ask, _num_made(ask))))
            self.num_under_way += 1
            try:
                yield
            finally:
                self.num_under_way -= 1

    async def _forward(self, sender: PeerId, ask: ReceivedForward, tensors: dict[str, Tensor]) -> StageReply:
        with self._counting_refusals(sender, "a forward pass"):
            self._check(ask, tensors)
            return await self._executor.answer_forward(sender, ask, tensors)

    async def _backward(self, sender: PeerId, ask: ReceivedBackward, tensors: dict[str, Tensor]) -> StageReply:
        with self._counting_refusals(sender, "a backward pass"):
            self._check(ask, tensors, GRADIENT)
            if ask.num_tokens > ask.num_rows * ask.num_positions:
                raise RefusedError(
                    "malformed",
                    f"expected at most {ask.num_rows} x {ask.num_positions} tokens that count, found {ask.num_tokens}",
                )
            return await self._once(messages.BACKWARD, sender, ask, tensors, self._executor.answer_backward)

    async def _tail(self, sender: PeerId, ask: ReceivedTail, tensors: dict[str, Tensor]) -> StageReply:
        with self._counting_refusals(sender, "a tail's pass"):
            self._check(ask, tensors, LABELS)
            return await self._once(messages.TAIL, sender, ask, tensors, self._executor.answer_tail)

    async def _pass_on(self, sender: PeerId, ask: ReceivedChain, tensors: dict[str, Tensor]) -> StageReply:
        with self._counting_refusals(sender, "a chain"):
            self._check(ask, tensors, LABELS)
            self._chain.check_route(ask)
            kind = messages.TAIL if self._executor.replica.kind == "tail" else messages.CHAIN
            return await self._once(kind, sender, ask, tensors, self._chain.answer)

    async def _evaluate(self, sender: PeerId, ask: ReceivedEvaluate, tensors: dict[str, Tensor]) -> StageReply:
        with self._counting_refusals(sender, "an evaluation"):
            wanted = {"tail": [LABELS], "body": [GRADIENT] if ask.with_gradient else [], "head": []}
            self._check(ask, tensors, *wanted[self._executor.replica.kind])
            return await self._executor.answer_evaluate(sender, ask, tensors)

    async def _once(
        self,
        kind: str,
        sender: PeerId,
        ask: CountingAskT,
        tensors: dict[str, Tensor],
        answer: Callable[[PendingCount, PeerId, CountingAskT, Mapping[str, Tensor]], Awaitable[StageReply]],
    ) -> StageReply:
        return await self._counting.once(
            kind,
            ask.micro_batch,
            self._owner_of(sender, ask),
            self._executor.runtime.now_s + ask.apply_within_s - ask.waited_s,
            lambda pending: answer(pending, sender, ask, tensors),
        )

    def _owner_of(self, sender: PeerId, ask: ReceivedAsk) -> PeerId:
        """Returns the driver whose micro-batch it is: the sender, or the one a worker of the stage before names.

        Raises:
            RefusedError: ``not-a-driver``, or not heard of yet.
        """
        passed_on_for = ask.driver if isinstance(ask, ReceivedChain) else ""
        if self._drivers is None:
            return passed_on_for or sender
        drivers = self._drivers()
        if sender in drivers:
            return sender
        before = self._stage_before
        if passed_on_for in drivers and before is not None and (self.workers is None or sender in self.workers(before)):
            return passed_on_for
        raise RefusedError("not-a-driver", f"expected a driver that this worker knows, found {sender[:12]}; try again")

    def _peer_of(self, hop: messages.Hop) -> Peer:
        """Returns where the next worker of a chain is by its own announcement, not by what a route says.

        Raises:
            RefusedError: ``hop-busy``: this worker has not heard of it, and may soon.
        """
        if self.workers is None:
            return Peer(hop.peer_id, hop.address, hop.certificate_pem.encode() or None)
        peer = self.workers(hop.stage).get(hop.peer_id)
        if peer is None:
            raise RefusedError("hop-busy", f"{hop.stage} {hop.peer_id}: {self._name} has not heard of it; try again")
        return peer

    async def _applied(self, request: Request[messages.AppliedAsk]) -> Reply[messages.AppliedAnswer]:
        keys, refuse = request.body.micro_batches, request.body.refuse_from_now
        if refuse and self._drivers is not None and request.sender not in self._drivers():
            # Not answered without refusing: the sender would take what is not counted for what will not be.
            raise RefusedError("not-a-driver", f"expected a driver that this worker knows, found {request.sender[:12]}")
        refused_of = "" if self._keeper is None or request.sender == self._keeper() else request.sender
        replies = self._executor.replies
        find = partial(replies.counted_among, keys, refuse_from_now=refuse, refused_of=refused_of)
        incarnation, counted, undecided = find()
        if undecided:
            await asyncio.wait([asyncio.wrap_future(future) for future in undecided], timeout=_DECIDED_WITHIN_S)
            incarnation, counted, undecided = find()
        if undecided:
            raise RefusedError("busy", f"{len(undecided)} micro-batches are just being counted; ask again")
        mine, counted_as = tuple(key for key in keys if key in counted), None
        acknowledged = replies.acknowledgement_of(keys[0]) if len(keys) == 1 else None
        if acknowledged is not None:
            counted_as = messages.CountedAs(
                incarnation=acknowledged.incarnation,
                applied_number=acknowledged.applied_number,
                shared_through=replies.shared.count if acknowledged.incarnation == replies.incarnation else 0,
            )
        return Reply(messages.AppliedAnswer(incarnation=incarnation, micro_batches=mine, counted_as=counted_as))

    async def _status(self, _request: Request[StatusAsk]) -> Reply[StatusAnswer]:
        replica, replies = self._executor.replica, self._executor.replies
        return Reply(
            StatusAnswer(
                stage=self._name,
                status=self.status,
                incarnation=replies.incarnation,
                version=replica.version,
                num_tokens=replica.accumulated.num_tokens,
                applied=replies.applied,
                outliers=replica.outliers,
                shared_through=replies.shared.count,
                cached_bytes=replica.cached_bytes,
                reply_bytes=replies.reply_bytes,
                refused=self.refusals.counts,
                **asdict(self._executor.runtime.figures),
            )
        )

    def _check(self, ask: ReceivedAsk, tensors: dict[str, Tensor], *others: str) -> None:
        """Checks a request without looking at a value of its tensors.

        Raises:
            RefusedError: it is not for this worker, not now, or not in order.
        """
        self._check_message(ask)  # Again: its tensors may have been long in coming.
        self._executor.link.check_names(tensors, *others)
        ask.date(self.suspend_detector)

    def _check_message(self, ask: ReceivedAsk) -> None:
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

    @contextmanager
    def _counting_refusals(self, sender: PeerId, what: str) -> Iterator[None]:
        """Counts a refusal within the block, and turns a request's error into one."""
        try:
            yield
        except PipelineError as error:
            refusal = refusal_of(error)
            self.refusals.count(sender, what, refusal)
            raise refusal from error
        except RefusedError as error:
            self.refusals.count(sender, what, error)
            raise


def _num_made(ask: ReceivedAsk) -> int:
    """Returns the outputs and gradients held for a request at a time: for a chain, those of later stages too."""
    if isinstance(ask, ReceivedEvaluate) and ask.with_gradient:
        return 2
    return 3 if isinstance(ask, ReceivedChain) and ask.route else 1
