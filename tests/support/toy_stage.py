"""A stage that computes next to nothing, at a real endpoint, and goes wrong when it is told to.

What it owes drivers it does as a worker does: a micro-batch is counted once, its answer kept, and whoever holds its
lease can have it refused. Its arithmetic can be checked by hand: each stage but the tail adds 1, and the gradient that
comes back is that of the loss, 1 everywhere.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from tests.support.rpc_node import RUN_ID, fast_config
from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.network.discovery.stage_report import StageUid
from trainer.network.rpc import Endpoint, Identity, Peer, PeerId, Reply, Request
from trainer.pipeline.driver import StageWorker
from trainer.pipeline.driver.workers import LastWord
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import TensorAnswer, TensorService, ask_tensors
from trainer.pipeline.protocol.work import LeaseTerm, MicroBatch, MicroBatchId, Settlement, boottime_s
from trainer.pipeline.worker.status import STATUS, StatusAnswer, StatusAsk

DIM = 4
ROWS, POSITIONS = 2, 3
MAX_BYTES = 1 << 20
REFUSE_S = 0.5

Reply_ = TensorAnswer[messages.StageAnswer]
Fault = Callable[["ToyStage", str, Callable[[], Awaitable[Reply_]]], Awaitable[Reply_]]
"""Gets the stage, the micro-batch, and what would have answered it."""


# -- faults ------------------------------------------------------------------------------------------------------------


def refuse(reason: str) -> Fault:
    """Nothing is done."""

    async def fault(_stage: ToyStage, _key: str, _work: Callable[[], Awaitable[Reply_]]) -> Reply_:
        raise RefusedError(reason, f"told to refuse ({reason})")

    return fault


async def _hang() -> NoReturn:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits so long")


async def say_nothing(_stage: ToyStage, _key: str, _work: Callable[[], Awaitable[Reply_]]) -> Reply_:
    """Nothing is done, nothing is said."""
    await _hang()


async def lose_answer(_stage: ToyStage, _key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
    """It is done, and nobody hears of it."""
    await work()
    await _hang()


async def fail_after(_stage: ToyStage, _key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
    """It is done, and then the handler fails."""
    await work()
    raise RefusedError("internal", "told to fail")


def garble(**changes: Any) -> Fault:
    """It is done, and the answer's message has other values."""

    async def fault(_stage: ToyStage, _key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
        answer = await work()
        return TensorAnswer(answer.body.model_copy(update=changes), answer.tensors)

    return fault


def distort(change: Callable[[Tensor], Tensor], *, count: bool = True) -> Fault:
    """The answer's tensors are other ones; without ``count`` it comes at once and nothing is done."""

    async def fault(stage: ToyStage, key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
        answer = await work() if count else stage.answer_to(key, None)
        return TensorAnswer(answer.body, {name: change(tensor) for name, tensor in answer.tensors.items()})

    return fault


async def die(stage: ToyStage, _key: str, _work: Callable[[], Awaitable[Reply_]]) -> Reply_:
    """The process is killed before anything is done."""
    stage.begin_to_die()
    await _hang()


async def count_and_die(stage: ToyStage, _key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
    """The process is killed after it has counted."""
    await work()
    stage.begin_to_die()
    await _hang()


# -- a stage -----------------------------------------------------------------------------------------------------------


@dataclass
class ToyStage:
    """One worker; `start` it, and `kill` it at the end."""

    stages: tuple[str, ...]
    stage: str
    number: int
    identity: Identity = field(default_factory=Identity.create)
    delay_s: float = 0.0
    faults: defaultdict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    """By method, for its next requests."""
    counted: dict[str, Reply_] = field(default_factory=dict)
    """By micro-batch."""
    refused: dict[str, float] = field(default_factory=dict)
    """Until when, on the event loop's clock."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Methods and micro-batches."""
    version: int = 0
    step_every: int = 0
    """Micro-batches of an optimizer step; 0: none is taken."""
    step_delay_s: float = 0.0
    stopped: asyncio.Event | None = None
    """Until it is set, everything is taken in and nothing done, as by a process that is stopped; None: not stopped."""
    alive: bool = False
    incarnation: str = ""
    worker: StageWorker | None = None
    _endpoint: Endpoint | None = None
    _dying: asyncio.Task[None] | None = None
    _stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """As a new process, at the address it had before."""
        port = 0 if self.worker is None else int(self.worker.peer.address.rpartition(":")[2])
        self.incarnation = secrets.token_hex(8)
        self.counted, self.refused = {}, {}
        endpoint = Endpoint(self.identity, RUN_ID, fast_config(port=port, stop_grace_s=0.0))
        service = TensorService(endpoint)
        for method, ask, work in (
            (messages.FORWARD, messages.ForwardAsk, self._forward),
            (messages.BACKWARD, messages.BackwardAsk, self._backward),
            (messages.TAIL, messages.TailAsk, self._tail),
            (messages.EVALUATE, messages.EvaluateAsk, self._evaluate),
            (messages.CHAIN, messages.ChainAsk, self._chain),
        ):
            service.register(method, ask, partial(self._suffer, method, work), max_bytes=MAX_BYTES)
        endpoint.register(messages.APPLIED, messages.AppliedAsk, self._applied)
        endpoint.register(STATUS, StatusAsk, self._status)
        await endpoint.start()
        self._endpoint, self.alive = endpoint, True
        uid = str(StageUid(self.stage, self.number))
        self.worker = StageWorker(self.stage, uid, endpoint.peer, self.incarnation)

    async def kill(self) -> None:
        """The process is gone, and with it what it had counted."""
        self.begin_to_die()
        assert self._dying is not None
        await self._dying
        if self._stepping is not None:
            await asyncio.gather(self._stepping, return_exceptions=True)

    def begin_to_die(self) -> None:
        """`kill`, without waiting for it."""
        self.alive = False
        if self._dying is None or (self._dying.done() and self._endpoint is not None):
            endpoint, self._endpoint = self._endpoint, None
            if endpoint is not None:
                self._dying = asyncio.get_running_loop().create_task(endpoint.stop())

    def answer_to(self, key: str, gradient: Tensor | None) -> Reply_:
        """Its answer to a request to count."""
        tensors = (
            {} if self.stage == self.stages[0] else {"gradient": gradient_like() if gradient is None else gradient}
        )
        return TensorAnswer(self._body(applied=(self.stage,), applied_number=len(self.counted) + 1), tensors)

    # -- methods -------------------------------------------------------------------------------------------------------

    async def _forward(self, _ask: messages.ForwardAsk, tensors: dict[str, Tensor]) -> Reply_:
        return TensorAnswer(self._body(), {"activation": self._output(tensors)})

    async def _evaluate(self, ask: messages.EvaluateAsk, tensors: dict[str, Tensor]) -> Reply_:
        if self.stage != self.stages[-1]:
            gradient = {"gradient": tensors["gradient"]} if "gradient" in tensors else {}
            return TensorAnswer(self._body(), {"activation": self._output(tensors), **gradient})
        answer = self._with_loss(ask.micro_batch, tensors)
        tail_gradient = answer.tensors if ask.with_gradient else {}
        return TensorAnswer(answer.body.model_copy(update={"applied": (), "applied_number": 0}), tail_gradient)

    async def _backward(self, ask: messages.BackwardAsk, tensors: dict[str, Tensor]) -> Reply_:
        return self._count(ask.micro_batch, lambda: self.answer_to(ask.micro_batch, tensors["gradient"]))

    async def _tail(self, ask: messages.TailAsk, tensors: dict[str, Tensor]) -> Reply_:
        return self._count(ask.micro_batch, lambda: self._with_loss(ask.micro_batch, tensors))

    async def _chain(self, ask: messages.ChainAsk, tensors: dict[str, Tensor]) -> Reply_:
        if ask.micro_batch in self.counted:
            return self.counted[ask.micro_batch]
        if not ask.route:
            return self._count(ask.micro_batch, lambda: self._with_loss(ask.micro_batch, tensors))
        behind = await self._ask_next(ask, tensors)
        own = self.answer_to(ask.micro_batch, behind.tensors["gradient"])
        update = {
            "applied": (self.stage, *behind.body.applied),
            "loss_sum": behind.body.loss_sum,
            "num_tokens": behind.body.num_tokens,
        }
        return self._count(ask.micro_batch, lambda: TensorAnswer(own.body.model_copy(update=update), own.tensors))

    async def _ask_next(self, ask: messages.ChainAsk, tensors: dict[str, Tensor]) -> Reply_:
        hop, *rest = ask.route
        peer = Peer(hop.peer_id, hop.address, hop.certificate_pem.encode() or None)
        within_s = ask.apply_within_s * 0.8
        times = {"apply_within_s": within_s, "answer_within_s": min(within_s, ask.answer_within_s)}
        onward = ask.model_copy(update={"stage": hop.stage, "route": tuple(rest), "tensors": (), **times})
        sent = {"activation": self._output(tensors), "labels": tensors["labels"]}
        assert self._endpoint is not None
        try:
            return await ask_tensors(
                self._endpoint,
                peer,
                messages.CHAIN,
                onward,
                sent,
                messages.StageAnswer,
                answer_bytes=MAX_BYTES,
                timeout_s=within_s,
            )
        except RefusedError as error:
            if error.reason.startswith("hop"):
                raise RefusedError(error.reason, str(error)) from error
            raise RefusedError(f"hop-{error.reason}", f"{hop.stage} {hop.peer_id}: {error}") from error
        except RpcError as error:
            reason = "hop" if isinstance(error, PeerUnavailableError) else "hop-malformed-answer"
            raise RefusedError(reason, f"{hop.stage} {hop.peer_id}: {error}") from error

    async def _applied(self, request: Request[messages.AppliedAsk]) -> Reply[messages.AppliedAnswer]:
        asked = request.body.micro_batches
        counted = tuple(key for key in asked if key in self.counted)
        if request.body.refuse_from_now:
            until_s = asyncio.get_running_loop().time() + REFUSE_S
            self.refused.update(dict.fromkeys(set(asked) - set(counted), until_s))
        body = self.counted[counted[0]].body if len(asked) == len(counted) == 1 else None
        numbered = body and messages.CountedAs(incarnation=self.incarnation, applied_number=body.applied_number)
        return Reply(messages.AppliedAnswer(incarnation=self.incarnation, micro_batches=counted, counted_as=numbered))

    async def _status(self, _request: Request[StatusAsk]) -> Reply[StatusAnswer]:
        await self._until_continued()
        said = {"stage": self.stage, "incarnation": self.incarnation, "version": self.version}
        counts = ("num_tokens", "shared_through", "queued", "queued_bytes", "computed", "cached_bytes", "reply_bytes")
        floats = ("batch_rows", "compute_s", "rows_per_s", "busy")
        zeros = {**dict.fromkeys(counts, 0), **dict.fromkeys(floats, 0.0)}
        return Reply(StatusAnswer(**said, **zeros, status="serving", applied=len(self.counted), refused={}))

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _suffer(
        self, method: str, work: Callable[..., Awaitable[Reply_]], _sender: PeerId, ask: Any, tensors: dict[str, Tensor]
    ) -> Reply_:
        """Does the work, or what the next fault makes of it."""
        await self._until_continued()
        self.asked.append((method, ask.micro_batch))
        await asyncio.sleep(self.delay_s)
        faults, do = self.faults[method], partial(work, ask, tensors)
        return await (faults.popleft()(self, ask.micro_batch, do) if faults else do())

    async def _until_continued(self) -> None:
        if self.stopped is not None:
            await self.stopped.wait()

    def _count(self, key: str, make: Callable[[], Reply_]) -> Reply_:
        if key in self.counted:
            return self.counted[key]
        if self.refused.get(key, 0.0) > asyncio.get_running_loop().time():
            raise RefusedError("busy", "it is somebody else's now")
        self.counted[key] = make()
        if self.step_every and len(self.counted) % self.step_every == 0:
            self._stepping = asyncio.get_running_loop().create_task(self._step())
        return self.counted[key]

    async def _step(self) -> None:
        await asyncio.sleep(self.step_delay_s)
        self.version += 1

    def _with_loss(self, key: str, tensors: dict[str, Tensor]) -> Reply_:
        answer = self.answer_to(key, None)
        num_tokens = int((tensors["labels"] != -100).sum())
        loss_sum = float(tensors["activation"].sum())
        return TensorAnswer(
            answer.body.model_copy(update={"loss_sum": loss_sum, "num_tokens": num_tokens}), answer.tensors
        )

    def _output(self, tensors: dict[str, Tensor]) -> Tensor:
        if self.stage == self.stages[0]:
            return tensors["ids"].float().unsqueeze(-1).expand(-1, -1, DIM).contiguous() + 1
        return tensors["activation"] + 1

    def _body(self, **changes: Any) -> messages.StageAnswer:
        return messages.StageAnswer(
            incarnation=self.incarnation, version=self.version, num_rows=ROWS, compute_s=self.delay_s
        ).model_copy(update=changes)


def gradient_like() -> Tensor:
    """What comes back."""
    return torch.ones(ROWS, POSITIONS, DIM)


# -- a swarm of them ---------------------------------------------------------------------------------------------------


@dataclass
class ToySwarm:
    """Stages, their workers, and who is announced."""

    stages: tuple[str, ...]
    workers_by_stage: dict[str, list[ToyStage]]
    announced: set[str] = field(default_factory=set)

    silence_s: float = 3600.0
    words: dict[str, LastWord] = field(default_factory=dict)
    """What is heard of workers that a test hides behind something; by key."""

    def workers(self) -> tuple[StageWorker, ...]:
        """As a `StageDirectory`."""
        return tuple(toy.worker for toy in self.all if toy.worker is not None and toy.worker.uid in self.announced)

    def last_word(self, key: str) -> LastWord | None:
        """As a `StageDirectory`."""
        return self.words.get(key)

    @property
    def all(self) -> list[ToyStage]:
        """All of them."""
        return [toy for toys in self.workers_by_stage.values() for toy in toys]

    def at(self, stage: str, index: int = 0) -> ToyStage:
        """A stage's worker."""
        return self.workers_by_stage[stage][index]

    async def join(self, stage: str, **options: Any) -> ToyStage:
        """One more."""
        toys = self.workers_by_stage[stage]
        toy = ToyStage(self.stages, stage, 32 + len(toys), **options)
        toys.append(toy)
        await toy.start()
        assert toy.worker is not None
        self.announced.add(toy.worker.uid)
        return toy


@asynccontextmanager
async def toy_swarm(replicas: dict[str, int], **options: Any) -> AsyncIterator[ToySwarm]:
    """Workers at real endpoints, by stage; all stopped at the end."""
    swarm = ToySwarm(tuple(replicas), {stage: [] for stage in replicas})
    try:
        for stage, number in replicas.items():
            for _ in range(number):
                await swarm.join(stage, **options)
        yield swarm
    finally:
        for toy in swarm.all:
            await toy.kill()


class ListedWork:
    """A `Work` of micro-batches made before; keeps what it is told.

    Args:
        num: of micro-batches.
        lease_s: how long each may be sent, from when it is handed out.
    """

    def __init__(self, num: int, lease_s: float = 30.0) -> None:
        self.settled: dict[str, Settlement] = {}
        self.handed_back: list[str] = []
        self.given: list[str] = []
        self.left = deque(range(num))
        self.changed = asyncio.Event()
        self._lease_s = lease_s

    async def next(self) -> MicroBatch | None:
        """In order."""
        if not self.left:
            return None
        number = self.left.popleft()
        micro_batch = micro_batch_of(number, self._lease_s)
        self.given.append(micro_batch.key)
        return micro_batch

    def settle(self, settlement: Settlement) -> None:
        """Kept."""
        assert settlement.micro_batch in self.given
        assert settlement.micro_batch not in self.settled
        self.settled[settlement.micro_batch] = settlement
        self.changed.set()

    def hand_back(self, micro_batch: MicroBatch) -> None:
        """Kept."""
        assert micro_batch.key not in self.settled
        self.handed_back.append(micro_batch.key)

    def fates(self) -> list[str]:
        """What became of them, in order."""
        return [self.settled[key].outcome if key in self.settled else "open" for key in dict.fromkeys(self.given)]


def micro_batch_of(number: int, lease_s: float = 30.0) -> MicroBatch:
    """The same rows for the same number."""
    ids = torch.arange(ROWS * POSITIONS).reshape(ROWS, POSITIONS) + number
    term = LeaseTerm(boottime_s() + lease_s)
    return MicroBatch(MicroBatchId(0, 1, number * ROWS), ids, ids + 1, term)


def loss_of(number: int, stages: Sequence[str]) -> float:
    """The loss sum of `micro_batch_of` it."""
    ids = micro_batch_of(number).input_ids.float()
    return float((ids + len(stages) - 1).sum()) * DIM
