"""Stages that compute next to nothing, at real endpoints, and go wrong when they are told to; and a driver of them.

A micro-batch is counted once, its answer kept, and whoever holds its lease can have it refused, as by a worker. Each
stage but the tail adds 1, and the gradient that comes back is that of the loss, 1 everywhere.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.support.rpc_node import RUN_ID, fast_config, running_endpoint
from trainer.compression.activations import activation_codec
from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.network.discovery.stage_report import StageUid
from trainer.network.rpc import Endpoint, Identity, Peer, PeerId, Reply, Request
from trainer.pipeline.driver import DriverConfig, LinkForm, MicroBatchResult, PipelineDriver, StageWorker
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


def refuse(reason: str) -> Fault:
    async def fault(*_: object) -> Reply_:
        raise RefusedError(reason, f"told to refuse ({reason})")

    return fault


async def say_nothing(*_: object) -> Reply_:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits so long")


async def lose_answer(_stage: ToyStage, _key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
    """It is done, and nobody hears of it."""
    await work()
    return await say_nothing()


async def fail_after(_stage: ToyStage, _key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
    await work()
    raise RefusedError("internal", "told to fail")


async def die(stage: ToyStage, *_: object) -> Reply_:
    """The process is killed before anything is done."""
    stage.begin_to_die()
    return await say_nothing()


async def count_and_die(stage: ToyStage, _key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
    await work()
    return await die(stage)


def garble(**changes: Any) -> Fault:
    """It is done, and the answer's message has other values."""

    async def fault(_stage: ToyStage, _key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
        answer = await work()
        return TensorAnswer(answer.body.model_copy(update=changes), answer.tensors)

    return fault


def distort(change: Callable[[Tensor], Tensor], *, count: bool = True, name: str = "") -> Fault:
    """The answer's tensors of that name are others; without ``count`` it comes at once and nothing is done."""

    async def fault(stage: ToyStage, key: str, work: Callable[[], Awaitable[Reply_]]) -> Reply_:
        answer = await work() if count else stage.answer_to(key, None)
        tensors = {each: change(it) if name in ("", each) else it for each, it in answer.tensors.items()}
        return TensorAnswer(answer.body, tensors)

    return fault


@dataclass
class ToyStage:
    """One worker; `start` it, and `kill` it at the end."""

    stages: tuple[str, ...]
    stage: str
    number: int
    identity: Identity = field(default_factory=Identity.create)
    delay_s: float = 0.0
    faults: defaultdict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))  # By method.
    counted: dict[str, Reply_] = field(default_factory=dict)
    refused: dict[str, float] = field(default_factory=dict)  # Until when, on the event loop's clock.
    asked: list[tuple[str, str]] = field(default_factory=list)  # Methods and micro-batches.
    version: int = 0
    step_every: int = 0  # Micro-batches of an optimizer step; 0: none is taken.
    step_delay_s: float = 0.0
    stopped: asyncio.Event | None = None  # Until it is set, everything is taken in and nothing done.
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
        self.begin_to_die()
        assert self._dying is not None
        await self._dying
        if self._stepping is not None:
            await asyncio.gather(self._stepping, return_exceptions=True)

    def begin_to_die(self) -> None:
        self.alive = False
        if self._dying is None or (self._dying.done() and self._endpoint is not None):
            endpoint, self._endpoint = self._endpoint, None
            if endpoint is not None:
                self._dying = asyncio.get_running_loop().create_task(endpoint.stop())

    def answer_to(self, key: str, gradient: Tensor | None) -> Reply_:
        gradient = torch.ones(ROWS, POSITIONS, DIM) if gradient is None else gradient
        tensors = {} if self.stage == self.stages[0] else {"gradient": gradient}
        return TensorAnswer(self._body(applied=(self.stage,), applied_number=len(self.counted) + 1), tensors)

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
        update = behind.body.model_dump(include={"loss_sum", "num_tokens"})
        body = own.body.model_copy(update={"applied": (self.stage, *behind.body.applied), **update})
        return self._count(ask.micro_batch, lambda: TensorAnswer(body, own.tensors))

    async def _ask_next(self, ask: messages.ChainAsk, tensors: dict[str, Tensor]) -> Reply_:
        hop, *rest = ask.route
        peer = Peer(hop.peer_id, hop.address, hop.certificate_pem.encode() or None)
        within_s = ask.apply_within_s * 0.8
        times = {"apply_within_s": within_s, "answer_within_s": min(within_s, ask.answer_within_s)}
        onward = ask.model_copy(update={"stage": hop.stage, "route": tuple(rest), "tensors": (), **times})
        sent = {"activation": self._output(tensors), "labels": tensors["labels"]}
        assert self._endpoint is not None
        try:
            answer, limits = messages.StageAnswer, {"answer_bytes": MAX_BYTES, "timeout_s": within_s}
            return await ask_tensors(self._endpoint, peer, messages.CHAIN, onward, sent, answer, **limits)
        except RefusedError as error:
            if error.reason.startswith("hop"):
                raise RefusedError(error.reason, str(error)) from error
            raise RefusedError(f"hop-{error.reason}", f"{hop.stage} {hop.peer_id}: {error}") from error
        except RpcError as error:
            reason = "hop" if isinstance(error, PeerUnavailableError) else "hop-malformed-answer"
            raise RefusedError(reason, f"{hop.stage} {hop.peer_id}: {error}") from error

    async def _applied(self, request: Request[messages.AppliedAsk]) -> Reply[messages.AppliedAnswer]:
        if self.stopped is not None:
            await self.stopped.wait()
        asked = request.body.micro_batches
        counted = tuple(key for key in asked if key in self.counted)
        if request.body.refuse_from_now:
            until_s = asyncio.get_running_loop().time() + REFUSE_S
            self.refused.update(dict.fromkeys(set(asked) - set(counted), until_s))
        body = self.counted[counted[0]].body if len(asked) == len(counted) == 1 else None
        numbered = body and messages.CountedAs(incarnation=self.incarnation, applied_number=body.applied_number)
        return Reply(messages.AppliedAnswer(incarnation=self.incarnation, micro_batches=counted, counted_as=numbered))

    async def _status(self, _request: Request[StatusAsk]) -> Reply[StatusAnswer]:
        if self.stopped is not None:
            await self.stopped.wait()
        said = {"stage": self.stage, "incarnation": self.incarnation, "version": self.version}
        counts = ("num_tokens", "shared_through", "queued", "queued_bytes", "computed", "cached_bytes", "reply_bytes")
        floats = ("batch_rows", "compute_s", "rows_per_s", "busy")
        zeros = {**dict.fromkeys(counts, 0), **dict.fromkeys(floats, 0.0)}
        return Reply(StatusAnswer(**said, **zeros, status="serving", applied=len(self.counted), refused={}))

    async def _suffer(
        self, method: str, work: Callable[..., Awaitable[Reply_]], _sender: PeerId, ask: Any, tensors: dict[str, Tensor]
    ) -> Reply_:
        if self.stopped is not None:
            await self.stopped.wait()
        self.asked.append((method, ask.micro_batch))
        await asyncio.sleep(self.delay_s)
        faults, do = self.faults[method], partial(work, ask, tensors)
        return await (faults.popleft()(self, ask.micro_batch, do) if faults else do())

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
        body = answer.body.model_copy(update={"loss_sum": loss_sum, "num_tokens": num_tokens})
        return TensorAnswer(body, answer.tensors)

    def _output(self, tensors: dict[str, Tensor]) -> Tensor:
        if self.stage == self.stages[0]:
            return tensors["ids"].float().unsqueeze(-1).expand(-1, -1, DIM).contiguous() + 1
        return tensors["activation"] + 1

    def _body(self, **changes: Any) -> messages.StageAnswer:
        said = {"incarnation": self.incarnation, "version": self.version, "num_rows": ROWS, "compute_s": self.delay_s}
        return messages.StageAnswer(**{**said, **changes})


@dataclass
class ToySwarm:
    stages: tuple[str, ...]
    workers_by_stage: dict[str, list[ToyStage]]
    announced: set[str] = field(default_factory=set)
    silence_s: float = 3600.0

    def workers(self) -> tuple[StageWorker, ...]:
        return tuple(toy.worker for toy in self.all if toy.worker is not None and toy.worker.uid in self.announced)

    def last_word(self, key: str) -> LastWord | None:
        return None

    @property
    def all(self) -> list[ToyStage]:
        return [toy for toys in self.workers_by_stage.values() for toy in toys]

    def at(self, stage: str, index: int = 0) -> ToyStage:
        return self.workers_by_stage[stage][index]

    async def join(self, stage: str, **options: Any) -> ToyStage:
        toys = self.workers_by_stage[stage]
        toy = ToyStage(self.stages, stage, 32 + len(toys), **options)
        toys.append(toy)
        await toy.start()
        assert toy.worker is not None
        self.announced.add(toy.worker.uid)
        return toy


@asynccontextmanager
async def toy_swarm(replicas: dict[str, int], **options: Any) -> AsyncIterator[ToySwarm]:
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
    """A `Work` of ``num`` micro-batches, each of which may be sent for ``lease_s``; keeps what it is told."""

    def __init__(self, num: int, lease_s: float = 30.0) -> None:
        self.settled: dict[str, Settlement] = {}
        self.handed_back: list[str] = []
        self.given: list[str] = []
        self.terms: list[LeaseTerm] = []
        self.left = deque(range(num))
        self._lease_s = lease_s

    async def next(self) -> MicroBatch | None:
        if not self.left:
            return None
        micro_batch = self.made(self.left.popleft())
        self.given.append(micro_batch.key)
        self.terms.append(micro_batch.term)
        return micro_batch

    def made(self, number: int) -> MicroBatch:
        return micro_batch_of(number, self._lease_s)

    def settle(self, settlement: Settlement) -> None:
        assert settlement.micro_batch in self.given
        assert settlement.micro_batch not in self.settled
        self.settled[settlement.micro_batch] = settlement

    def hand_back(self, micro_batch: MicroBatch) -> None:
        assert micro_batch.key not in self.settled
        self.handed_back.append(micro_batch.key)

    def fates(self) -> list[str]:
        return [self.settled[key].outcome if key in self.settled else "open" for key in dict.fromkeys(self.given)]


def micro_batch_of(number: int, lease_s: float = 30.0) -> MicroBatch:
    ids = torch.arange(ROWS * POSITIONS).reshape(ROWS, POSITIONS) + number
    term = LeaseTerm(boottime_s() + lease_s)
    return MicroBatch(MicroBatchId(0, 1, number * ROWS), ids, ids + 1, term)


def loss_of(number: int, stages: Sequence[str]) -> float:
    ids = micro_batch_of(number).input_ids.float()
    return float((ids + len(stages) - 1).sum()) * DIM


STAGES = ("head", "body-1", "tail")
ONE_EACH = dict.fromkeys(STAGES, 1)
TWO_EACH = dict.fromkeys(STAGES, 2)
_BOUNDS = {"request_timeout_s": 10.0, "unclear_s": 20.0, "drain_s": 20.0}
FAST = DriverConfig(max_in_flight=4, audit_every=0, ban_s=0.2, max_ban_s=1.0, refresh_s=0.02, **_BOUNDS)
SILENCE = {"request_timeout_s": 1.0}
"""For tests in which a worker says nothing: a request to it takes so long."""


@dataclass
class Drive:
    swarm: ToySwarm
    work: ListedWork
    driver: PipelineDriver
    results: list[MicroBatchResult]

    async def all_done(self) -> None:
        num = len(self.work.left)
        await self.driver.run()
        assert self.work.fates() == ["done"] * num

    def check_account(self) -> None:
        """What the driver said agrees with what the workers have counted."""
        for key in dict.fromkeys(self.work.given):
            settled = self.work.settled.get(key)
            credits = {} if settled is None else {credit.stage: credit.incarnation for credit in settled.credits}
            for stage in self.swarm.stages:
                living = [toy for toy in self.swarm.workers_by_stage[stage] if toy.alive and key in toy.counted]
                assert len(living) <= 1, (key, stage)
                if settled is None and key in self.work.handed_back:
                    assert not living
                if settled is not None and settled.outcome == "done":
                    assert stage in credits
                    assert all(toy.incarnation == credits[stage] for toy in living)
                    toys = self.swarm.workers_by_stage[stage]
                    assert all(key in t.counted for t in toys if t.alive and t.incarnation == credits[stage])
        status = self.driver.status()
        assert len(self.work.given) == status.done + status.lost + status.handed_back + status.left


@asynccontextmanager
async def driving(
    replicas: dict[str, int], num: int, config: DriverConfig = FAST, lease_s: float = 30.0, **options: Any
) -> AsyncIterator[Drive]:
    async with toy_swarm(replicas) as swarm, running_endpoint() as endpoint:
        work = ListedWork(num, lease_s)
        results: list[MicroBatchResult] = []
        form = LinkForm(activation_codec("fp32"), DIM)
        driver = PipelineDriver(endpoint, STAGES, swarm, work, form, config, on_result=results.append, **options)
        drive = Drive(swarm, work, driver, results)
        yield drive
        drive.check_account()
