"""`StageService`: answers the requests of drivers, of workers and of the ledger server; `StageWorker`: the whole.

A request that counts a micro-batch is a task that outlives the connection it came by. The first request for a
micro-batch starts it, later ones wait for it. A task whose last caller has gone is cancelled unless the micro-batch is
being counted by then; its answer is kept for repetitions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, TypeVar

from torch import Tensor

from trainer.compression.activations import ActivationCodec, LinkMeter
from trainer.errors import PipelineError, RefusedError
from trainer.model.plan import StagePlan
from trainer.network.rpc import Endpoint, Peer, PeerId, Reply, Request
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.outer.grad import GradTrainer
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import TensorAnswer, TensorHandler, TensorService, size_bytes_of
from trainer.pipeline.protocol.wire import GRADIENT, LABELS
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.stage import StageReplica, StageShape
from trainer.pipeline.worker import link
from trainer.pipeline.worker.config import WorkerConfig
from trainer.pipeline.worker.grad_stepping import GradStepper
from trainer.pipeline.worker.replies import PendingCount, ReplyCache, StageReply
from trainer.pipeline.worker.runtime import MemoryBudget, Runtime
from trainer.pipeline.worker.stage_executor import StageExecutor
from trainer.pipeline.worker.status import STATUS, StatusAnswer, StatusAsk
from trainer.pipeline.worker.stepping import StageStepper, Stepped, StepStrategy, Synchronised

AskT = TypeVar("AskT", bound=link.ReceivedAsk)
CountingAskT = TypeVar("CountingAskT", link.ReceivedBackward, link.ReceivedTail, link.ReceivedChain)
ServiceStatus = Literal["joining", "serving", "leaving"]
Accepts = Literal["all", "begun", "nothing"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0  # One refusal of each reason.
_MAX_REASONS = 64
_DECIDED_WITHIN_S = 10.0  # How long a micro-batch may be about to be counted.
_MAX_ATTEMPTS = 4
_OWN_FAULTS = frozenset({"malformed", "nonfinite", "no-input", "stale", "busy", "expired"})
"""Reasons that may apply to one request and not to the next for the same micro-batch."""


@dataclass(eq=False, repr=False)
class StageService:
    """Answers for one stage at an endpoint that is not started yet.

    Args:
        drivers: the run's drivers as known now, who may have micro-batches computed and counted, or refused from now
            on. Names of micro-batches can be guessed; None: anybody may, which is for trusted networks only.
        keepers: the keys of drivers that keep the account, or may, as known now: these may have anybody's micro-batches
            refused; each other driver only its own. None: each driver may.
    """

    endpoint: Endpoint
    plan: StagePlan
    executor: StageExecutor
    config: WorkerConfig
    drivers: Callable[[], Collection[PeerId]] | None = None
    keepers: Callable[[], Collection[PeerId]] | None = None
    workers: Callable[[str], Mapping[PeerId, Peer]] | None = None
    """The workers of a stage as known now, by key: who may pass chains on to this one, and where the next hop is. None:
    anybody may, and a hop is where a route says; for trusted networks only."""
    status: ServiceStatus = "joining"  # Announced; `accepts` alone decides what is let in.
    accepts: Accepts = "nothing"
    """Which requests are let in: all, those that end what was begun (`stage/backward`), or none."""

    def __post_init__(self) -> None:
        self._refused: Counter[str] = Counter()
        self._log_limit = TokenBuckets(1.0, 1.0 / _LOG_INTERVAL_S)
        self.suspend_detector = link.SuspendDetector()
        self.num_under_way = 0
        """Requests that were let in and are not answered yet, whatever they wait for: tensors of a stream, the queue,
        the next worker of a chain, or the sending of the answer."""
        self._name = self.executor.name
        self._memory = MemoryBudget(self.config.max_received_bytes)
        index = self.plan.index(self._name)
        self._stage_before = self.plan.names[index - 1] if index else None
        self._counting: dict[PendingCount, asyncio.Task[StageReply]] = {}

    def register(self) -> None:
        """Registers the stage's methods; before the endpoint starts."""
        if self.executor.replica.kind == "tail":
            self._register(messages.TAIL, "a tail's pass", link.ReceivedTail, self._tail)
        else:
            self._register(messages.FORWARD, "a forward pass", link.ReceivedAsk, self._forward)
            self._register(messages.BACKWARD, "a backward pass", link.ReceivedBackward, self._backward)
        self._register(messages.CHAIN, "a chain", link.ReceivedChain, self._pass_on)
        self._register(messages.EVALUATE, "an evaluation", link.ReceivedEvaluate, self._evaluate)
        self.endpoint.register(messages.APPLIED, messages.AppliedAsk, self._applied)
        self.endpoint.register(STATUS, StatusAsk, self._status)

    def _register(
        self, method: str, what: str, ask: type[AskT], answer: TensorHandler[AskT, messages.StageAnswer]
    ) -> None:
        async def handle(sender: PeerId, body: AskT, tensors: dict[str, Tensor]) -> StageReply:
            with self._counting_refusals(sender, what):
                return await answer(sender, body, tensors)

        max_bytes = self.executor.link.max_request_bytes(self.config.max_request_tokens)
        TensorService(self.endpoint).register(
            method, ask, handle, max_bytes=max_bytes, within_s=lambda body: body.answer_within_s, admit=self._admit
        )

    @contextmanager
    def _admit(self, sender: PeerId, ask: link.ReceivedAsk) -> Iterator[None]:
        """Holds memory for a request's tensors and what is made of them; within the block it is under way."""
        # Outputs and gradients held at a time; of a chain, those of later stages too.
        num_made = 3 if isinstance(ask, link.ReceivedChain) and ask.route else 1
        if isinstance(ask, link.ReceivedEvaluate) and ask.with_gradient:
            num_made = 2
        with ExitStack() as held:
            with self._counting_refusals(sender, "a request"):
                self._check_message(ask)
                self._owner_of(sender, ask)
                held.enter_context(self._memory.held(sender, self.executor.link.held_bytes(ask, num_made)))
            self.num_under_way += 1
            try:
                yield
            finally:
                self.num_under_way -= 1

    async def _forward(self, sender: PeerId, ask: link.ReceivedAsk, tensors: dict[str, Tensor]) -> StageReply:
        self._check(ask, tensors)
        answer, _, activation = await self.executor.forward(sender, ask, tensors)
        return TensorAnswer(answer, activation)

    async def _backward(self, sender: PeerId, ask: link.ReceivedBackward, tensors: dict[str, Tensor]) -> StageReply:
        self._check(ask, tensors, GRADIENT)
        if ask.num_tokens > ask.num_rows * ask.num_positions:
            raise RefusedError(
                "malformed",
                f"expected at most {ask.num_rows} x {ask.num_positions} tokens that count, found {ask.num_tokens}",
            )
        return await self._once(messages.BACKWARD, sender, ask, tensors, self.executor.answer_backward)

    async def _tail(self, sender: PeerId, ask: link.ReceivedTail, tensors: dict[str, Tensor]) -> StageReply:
        self._check(ask, tensors, LABELS)
        return await self._once(messages.TAIL, sender, ask, tensors, self.executor.answer_tail)

    async def _pass_on(self, sender: PeerId, ask: link.ReceivedChain, tensors: dict[str, Tensor]) -> StageReply:
        self._check(ask, tensors, LABELS)
        behind, found = self.executor.behind, tuple(hop.stage for hop in ask.route)
        if found != behind:
            raise RefusedError(
                "malformed",
                f"expected a route of {', '.join(behind) or 'no stage'}, found {', '.join(found) or 'none'}",
            )
        if ask.route:
            self._peer_of(ask.route[0])
        kind = messages.TAIL if self.executor.replica.kind == "tail" else messages.CHAIN
        return await self._once(kind, sender, ask, tensors, partial(self.executor.answer_chain, self._peer_of))

    async def _evaluate(self, sender: PeerId, ask: link.ReceivedEvaluate, tensors: dict[str, Tensor]) -> StageReply:
        wanted = {"tail": [LABELS], "body": [GRADIENT] if ask.with_gradient else [], "head": []}
        self._check(ask, tensors, *wanted[self.executor.replica.kind])
        return await self.executor.answer_evaluate(sender, ask, tensors)

    async def _once(
        self,
        kind: str,
        sender: PeerId,
        ask: CountingAskT,
        tensors: dict[str, Tensor],
        answer: Callable[[PendingCount, PeerId, CountingAskT, Mapping[str, Tensor]], Awaitable[StageReply]],
    ) -> StageReply:
        key, owner, replies = ask.micro_batch, self._owner_of(sender, ask), self.executor.replies
        apply_before_s = self.executor.runtime.clock() + ask.apply_within_s - ask.waited_s
        for _ in range(_MAX_ATTEMPTS):
            pending = replies.begin(kind, key, apply_before_s, owner=owner)
            if not isinstance(pending, PendingCount):
                return pending
            task = self._counting.get(pending)
            is_first = task is None
            if task is None:
                task = asyncio.create_task(self._count(pending, partial(answer, pending, sender, ask, tensors)))
                self._counting[pending] = task
                task.add_done_callback(partial(self._finish, pending))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if replies.leave(pending, apply_before_s):
                    task.cancel()
                raise
            except RefusedError as error:
                # Another request's content or deadline may be at fault: this one gets an attempt of its own.
                if is_first or error.reason not in _OWN_FAULTS:
                    raise
        raise RefusedError("busy", f"{key} is asked for by too many at once; try again")

    async def _count(self, pending: PendingCount, answer: Callable[[], Awaitable[StageReply]]) -> StageReply:
        try:
            reply = await answer()
            self.executor.replies.settle(pending, reply, size_bytes_of(reply.tensors))
        except PipelineError as error:
            raise link.refusal_of(error) from error
        else:
            return reply
        finally:  # Not left to `_finish`: requests that are handled before it must not find this one open.
            self.executor.replies.fail(pending)

    def _finish(self, pending: PendingCount, task: asyncio.Task[StageReply]) -> None:
        """Closes what a task was for, also if it was cancelled before it began, or its callers have all gone."""
        del self._counting[pending]
        self.executor.replies.fail(pending)
        if not task.cancelled():
            task.exception()

    def _owner_of(self, sender: PeerId, ask: link.ReceivedAsk) -> PeerId:
        """Returns the driver whose micro-batch it is: the sender, or the one a worker of the stage before names."""
        passed_on_for = ask.driver if isinstance(ask, link.ReceivedChain) else ""
        if self.drivers is None:
            return passed_on_for or sender
        drivers = self.drivers()
        if sender in drivers:
            return sender
        before = self._stage_before
        if passed_on_for in drivers and before is not None and (self.workers is None or sender in self.workers(before)):
            return passed_on_for
        raise RefusedError("not-a-driver", f"expected a driver that this worker knows, found {sender[:12]}; try again")

    def _peer_of(self, hop: messages.Hop) -> Peer:
        """Returns where the next worker of a chain is by its own announcement, not by what a route says."""
        if self.workers is None:
            return Peer(hop.peer_id, hop.address, hop.certificate_pem.encode() or None)
        peer = self.workers(hop.stage).get(hop.peer_id)
        if peer is None:
            raise RefusedError("hop-busy", f"{hop.stage} {hop.peer_id}: {self._name} has not heard of it; try again")
        return peer

    async def _applied(self, request: Request[messages.AppliedAsk]) -> Reply[messages.AppliedAnswer]:
        keys, refuse = request.body.micro_batches, request.body.refuse_from_now
        if refuse and self.drivers is not None and request.sender not in self.drivers():
            # Not answered without refusing: the sender would take what is not counted for what will not be.
            raise RefusedError("not-a-driver", f"expected a driver that this worker knows, found {request.sender[:12]}")
        refused_of = "" if self.keepers is None or request.sender in self.keepers() else request.sender
        replies = self.executor.replies
        find = partial(replies.counted_among, keys, refuse_from_now=refuse, refused_of=refused_of)
        incarnation, counted, undecided = find()
        if undecided:
            await asyncio.wait([asyncio.wrap_future(future) for future in undecided], timeout=_DECIDED_WITHIN_S)
            incarnation, counted, undecided = find()
        if undecided:
            raise RefusedError("busy", f"{len(undecided)} micro-batches are just being counted; ask again")
        mine, counted_as = tuple(key for key in keys if key in counted), None
        acknowledged = counted.get(keys[0]) if len(keys) == 1 else None
        if acknowledged is not None:
            shared_through = replies.shared.count if acknowledged.incarnation == replies.incarnation else 0
            counted_as = messages.CountedAs(**acknowledged._asdict(), shared_through=shared_through)
        return Reply(messages.AppliedAnswer(incarnation=incarnation, micro_batches=mine, counted_as=counted_as))

    async def _status(self, _request: Request[StatusAsk]) -> Reply[StatusAnswer]:
        replica, replies = self.executor.replica, self.executor.replies
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
                refused=dict(self._refused),
                **asdict(self.executor.runtime.figures),
            )
        )

    def _check(self, ask: link.ReceivedAsk, tensors: dict[str, Tensor], *others: str) -> None:
        """Checks a request without looking at a value of its tensors."""
        self._check_message(ask)  # Again: its tensors may have been long in coming.
        self.executor.link.check_names(tensors, *others)
        ask.date(self.suspend_detector)

    def _check_message(self, ask: link.ReceivedAsk) -> None:
        if ask.stage != self._name:
            raise RefusedError(
                "stage", f"expected a request for {self._name}, which is here, found one for {ask.stage}"
            )
        if self.accepts == "nothing" or (self.accepts == "begun" and not isinstance(ask, link.ReceivedBackward)):
            raise RefusedError(
                "stopping", f"this worker is {self.status} and takes {self.accepts}; ask another of {self._name}"
            )
        num_tokens = ask.num_rows * ask.num_positions
        if num_tokens > self.config.max_request_tokens:
            raise RefusedError(
                "malformed", f"expected at most {self.config.max_request_tokens} tokens a request, found {num_tokens}"
            )

    @contextmanager
    def _counting_refusals(self, sender: PeerId, what: str) -> Iterator[None]:
        try:
            try:
                yield
            except PipelineError as error:
                raise link.refusal_of(error) from error
        except RefusedError as error:
            known = error.reason in self._refused or len(self._refused) < _MAX_REASONS
            reason = error.reason if known else "other"
            self._refused[reason] += 1
            if self._log_limit.take(reason):
                so_far = self._refused[reason]
                logger.warning("refused %s of %s (%s, %d so far): %s", what, sender[:12], reason, so_far, error)
            raise


class StageWorker:
    """Serves a stage of ``plan`` at an endpoint that the caller starts and stops.

    After `start` only the compute thread may use ``replica`` (see `runtime`). ``target_tokens`` are of the stage for
    one optimizer step, and ``peers`` its other workers, which may be ``max_lead`` versions ahead and still be followed.
    ``strategy`` keeps replicas together, in ``num_fragments`` parts (DiLoCo's fragments, SPARTA's slices); it may be
    set later, in the compute thread, which also calls ``on_step`` and ``on_round``. With ``batches`` forward requests
    are computed together, as suits `StageConfig.backward` ``recompute``. With ``gradients`` the stage steps by rounds
    of gradients (`GradStepper`). ``drivers``, ``keepers``: see `StageService`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        plan: StagePlan,
        stage_name: str,
        replica: StageReplica,
        codec: ActivationCodec,
        config: WorkerConfig,
        *,
        target_tokens: int,
        peers: Callable[[], tuple[Peer, ...]] = tuple,
        strategy: StepStrategy | None = None,
        gradients: GradTrainer | None = None,
        meter: LinkMeter | None = None,
        batches: bool = False,
        num_fragments: int = 1,
        max_lead: int = 50,
        clock: Callable[[], float] = boottime_s,
        on_step: Stepped | None = None,
        on_round: Synchronised | None = None,
        drivers: Callable[[], Collection[PeerId]] | None = None,
        keepers: Callable[[], Collection[PeerId]] | None = None,
    ) -> None:
        self.replica = replica
        self.replies = ReplyCache(config, num_fragments=num_fragments, clock=clock)
        self.shared = self.replies.shared
        build: Callable[..., StageStepper] = (
            StageStepper if gradients is None else partial(GradStepper, gradients=gradients)
        )
        self.stepper = build(
            endpoint=endpoint,
            replica=replica,
            replies=self.replies,
            config=config,
            target_tokens=target_tokens,
            peers=peers,
            strategy=strategy,
            max_lead=max_lead,
            clock=clock,
            on_step=on_step,
            on_round=on_round,
        )
        self.runtime = Runtime(config, clock=clock, between=self.stepper.between)
        self.stepper.on_news = self.runtime.wake
        self.link = link.StageLink(StageShape.of(plan.config, replica.kind), codec, meter)
        max_batch_size = config.max_batch_size if batches else 1
        behind = plan.names[plan.index(stage_name) + 1 :]
        self.executor = StageExecutor(
            endpoint, stage_name, behind, replica, self.runtime, self.link, self.replies, max_batch_size
        )
        self.service = StageService(endpoint, plan, self.executor, config, drivers=drivers, keepers=keepers)

    def register(self) -> None:
        """Registers the stage's methods; before the endpoint starts."""
        self.service.register()
        self.stepper.register()

    def start(self) -> None:
        """Starts the compute thread."""
        self.runtime.start()

    async def run(self) -> None:
        """Exchanges progress and detects suspensions until it is cancelled; raises TrainerError if it cannot go on."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self.stepper.run()), loop.create_task(self.service.suspend_detector.run())]
        failure = asyncio.wrap_future(self.runtime.failure)
        try:
            done, _ = await asyncio.wait([*tasks, failure], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self, timeout_s: float = 30.0) -> bool:
        """Ends the compute thread after its current job; returns whether it ended in time."""
        ended = await asyncio.get_running_loop().run_in_executor(None, self.runtime.stop, timeout_s)
        self.link.close()
        return ended
