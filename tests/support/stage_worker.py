"""Stage workers of a small model: in this process, or as processes that tests stop, continue and kill.

A process reads its setup as one JSON line, prints where it is reached, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.child import Child, input_ended, say
from tests.support.model_configs import random_tokens, small_config
from tests.support.waiting import until
from trainer.compression.activations import activation_codec
from trainer.inner import InnerConfig, make_optimizer
from trainer.model import build_stage
from trainer.model.loss import IGNORED_LABEL
from trainer.model.plan import StagePlan
from trainer.model.subspace import SubspaceConstraint, basis_of, fixed_table_of
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import TensorAnswer, ask_tensors
from trainer.pipeline.protocol.wire import part_of, wire_ids
from trainer.pipeline.stage import StageConfig, StageReplica
from trainer.pipeline.worker import StageWorker, WorkerConfig
from trainer.pipeline.worker.status import STATUS, StatusAnswer, StatusAsk

RUN_ID = "stage-test"
FAST = {"host": "127.0.0.1", "heartbeat_s": 0.25, "stall_timeout_s": 5.0, "stop_grace_s": 0.2, "tls": False}
INNER = {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "precision": "fp32", "compile": "off"}
HEAD_INPUT = {"ids": wire_ids(random_tokens(64, 2, 8)[0])}
TAIL_INPUT = {
    "activation": torch.randn(2, 8, small_config().dim, generator=torch.Generator().manual_seed(1)),
    "labels": wire_ids(random_tokens(64, 2, 8)[1]),
}


@dataclass(frozen=True)
class WorkerSetup:
    """All that a worker of a test is made of; the fields of JSON's types, so that a process can be told."""

    stage: str = "head"
    num_stages: int = 3
    target_tokens: int = 1 << 40
    """Never, by default."""
    seed: int = 0
    codec: str = "fp32"
    model: dict[str, Any] = field(default_factory=dict)
    """Changes to `small_config`."""
    inner: dict[str, Any] = field(default_factory=dict)
    stage_config: dict[str, Any] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)
    rpc: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> StagePlan:
        return StagePlan.of(small_config(**self.model), self.num_stages)


def build_worker(endpoint: Endpoint, setup: WorkerSetup, **options: Any) -> StageWorker:
    plan, inner = setup.plan, InnerConfig(**{**INNER, **setup.inner})
    module = build_stage(plan.config, plan.ranges, plan.index(setup.stage), setup.seed)
    optimizer = make_optimizer(module, inner)
    basis, fixed = None, None
    if plan.config.subspace_rank:
        SubspaceConstraint(module, plan.config).attach(optimizer)
        basis = basis_of(plan.config.dim, plan.config.subspace_rank, plan.config.subspace_seed)
        fixed = fixed_table_of(plan.config)
    kind = "body" if setup.stage.startswith("body") else setup.stage
    config = StageConfig(**setup.stage_config)
    replica = StageReplica(module, optimizer, inner, config, kind=kind, num_stages=setup.num_stages)
    return StageWorker(
        endpoint,
        plan,
        setup.stage,
        replica,
        activation_codec(setup.codec, basis, fixed),
        WorkerConfig(**{"progress_interval_s": 0.1, "auto_step_s": 3600.0, **setup.worker}),
        target_tokens=setup.target_tokens,
        batches=config.backward == "recompute",
        **options,
    )


def weights(worker: StageWorker) -> str:
    running = hashlib.sha256()
    for name, value in sorted(worker.replica.module.state_dict().items()):
        running.update(name.encode() + value.detach().numpy().tobytes())
    return running.hexdigest()


@dataclass
class RunningWorker:
    setup: WorkerSetup
    endpoint: Endpoint
    worker: StageWorker

    @property
    def peer(self) -> Peer:
        return self.endpoint.peer


@asynccontextmanager
async def running_worker(
    setup: WorkerSetup, *, identity: Identity | None = None, **options: Any
) -> AsyncIterator[RunningWorker]:
    rpc = RpcConfig(**{**FAST, **setup.rpc})
    endpoint = Endpoint(identity or Identity.create(), RUN_ID, rpc)
    worker = build_worker(endpoint, setup, **options)
    worker.register()
    await endpoint.start()
    worker.start()
    assert (worker.service.status, worker.service.accepts) == ("joining", "nothing")
    worker.service.status, worker.service.accepts = "serving", "all"
    gossip = asyncio.create_task(worker.run())
    try:
        yield RunningWorker(setup, endpoint, worker)
    finally:
        gossip.cancel()
        await asyncio.gather(gossip, return_exceptions=True)
        await endpoint.stop()
        await worker.stop()


@asynccontextmanager
async def held(running: RunningWorker) -> AsyncIterator[Callable[[], None]]:
    """Holds the worker's compute thread up within the block, or until what it yields is called."""
    entered, released = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        released.wait(20)

    task = asyncio.create_task(running.worker.runtime.control(wait))
    await until(entered.is_set)
    try:
        yield released.set
    finally:
        released.set()
        await task


async def queued(running: RunningWorker, *asked: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    """Asks, and waits until so many requests wait at a worker whose compute thread is held up."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    await until(lambda: running.worker.runtime.figures.queued == len(tasks))
    return tasks


class StageProcess(Child):
    peer: Peer

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__("stage_worker")
        self.setup = setup
        self.say(asdict(setup))

    def await_start(self) -> None:
        peer_id, address, certificate = self.hear()
        self.peer = Peer(peer_id, address, certificate.encode() or None)


@contextmanager
def stage_worker_processes(setups: Sequence[WorkerSetup]) -> Iterator[list[StageProcess]]:
    with ExitStack() as stack:
        processes = [stack.enter_context(StageProcess(setup)) for setup in setups]
        for process in processes:
            process.await_start()
        yield processes


async def _serve(setup: WorkerSetup) -> None:
    async with running_worker(setup) as running:
        endpoint = running.endpoint
        say([endpoint.peer_id, endpoint.address, (endpoint.certificate or b"").decode()])
        await input_ended()


Reply = TensorAnswer[messages.StageAnswer]
Worker = RunningWorker | StageProcess


class StageDriver:
    """Asks workers by hand, one request at a time; tensors are handed on as they come."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def forward(self, worker: Worker, key: str, tensors: Mapping[str, Tensor], **changes: object) -> Reply:
        return await self.ask(worker, messages.FORWARD, messages.ForwardAsk, key, tensors, changes)

    async def backward(self, worker: Worker, key: str, tensors: Mapping[str, Tensor], **changes: object) -> Reply:
        return await self.ask(worker, messages.BACKWARD, messages.BackwardAsk, key, tensors, changes)

    async def tail(self, worker: Worker, key: str, tensors: Mapping[str, Tensor], **changes: object) -> Reply:
        return await self.ask(worker, messages.TAIL, messages.TailAsk, key, tensors, changes)

    async def evaluate(self, worker: Worker, tensors: Mapping[str, Tensor]) -> Reply:
        return await self.ask(worker, messages.EVALUATE, messages.EvaluateAsk, "e0.s0.r0", tensors, {})

    async def chain(self, workers: Sequence[Worker], key: str, ids: Tensor, labels: Tensor, **changes: object) -> Reply:
        route = tuple(_hop(worker) for worker in workers[1:])
        tensors = {"ids": wire_ids(ids), "labels": wire_ids(labels)}
        return await self.ask(workers[0], messages.CHAIN, messages.ChainAsk, key, tensors, {"route": route, **changes})

    async def hub(self, workers: Sequence[Worker], key: str, ids: Tensor, labels: Tensor) -> list[Reply]:
        """What each answered, the tail first."""
        sent_ids, sent_labels = wire_ids(ids), wire_ids(labels)
        inputs: list[dict[str, Tensor]] = [{"ids": sent_ids}]
        versions = []
        for worker in workers[:-1]:
            reply = await self.forward(worker, key, inputs[-1])
            inputs.append(dict(reply.tensors))
            versions.append(reply.body.version)
        replies = [await self.tail(workers[-1], key, {**inputs[-1], "labels": sent_labels})]
        num_tokens = int((labels != IGNORED_LABEL).sum())
        for worker, x, version in zip(workers[-2::-1], inputs[-2::-1], versions[::-1], strict=True):
            gradient = part_of("gradient", replies[-1].tensors)
            changes = {"forward_version": version, "num_tokens": num_tokens}
            replies.append(await self.backward(worker, key, {**x, **gradient}, **changes))
        return replies

    async def applied(self, worker: Worker, *keys: str, refuse_from_now: bool = False) -> tuple[str, ...]:
        ask = messages.AppliedAsk(micro_batches=keys, refuse_from_now=refuse_from_now)
        reply = await self.endpoint.call(worker.peer, messages.APPLIED, ask, messages.AppliedAnswer, timeout_s=20)
        return reply.body.micro_batches

    async def status(self, worker: Worker) -> StatusAnswer:
        return (await self.endpoint.call(worker.peer, STATUS, StatusAsk(), StatusAnswer, timeout_s=20)).body

    async def ask(
        self,
        worker: Worker,
        method: str,
        model: type[messages.StageAsk],
        key: str,
        tensors: Mapping[str, Tensor],
        changes: Mapping[str, object],
    ) -> Reply:
        first = next(iter(tensors.values()))
        shape = {"num_rows": first.shape[0], "num_positions": first.shape[1]}
        known = {"apply_within_s": 30.0, "forward_version": 0, "num_tokens": first.shape[0] * first.shape[1]}
        fields = {name: value for name, value in known.items() if name in model.model_fields}
        fields |= {"micro_batch": key, "stage": worker.setup.stage, "answer_within_s": 30.0, **shape, **changes}
        ask, limits = model.model_validate(fields), {"answer_bytes": 256 << 20, "timeout_s": 30.0}
        return await ask_tensors(self.endpoint, worker.peer, method, ask, tensors, messages.StageAnswer, **limits)


def _hop(worker: Worker) -> messages.Hop:
    pem = (worker.peer.certificate or b"").decode()
    peer = {"peer_id": worker.peer.peer_id, "address": worker.peer.address, "certificate_pem": pem}
    return messages.Hop(stage=worker.setup.stage, **peer)


@asynccontextmanager
async def running_driver() -> AsyncIterator[StageDriver]:
    endpoint = Endpoint(Identity.create(), RUN_ID, RpcConfig(**FAST))
    await endpoint.start()
    try:
        yield StageDriver(endpoint)
    finally:
        await endpoint.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_serve(WorkerSetup(**json.loads(sys.stdin.readline()))))
