"""Stage workers of a small model: in this process, or as processes that tests stop, continue and kill.

    async with running_worker(WorkerSetup(stage="head")) as worker: ...          # in this process, on a real socket
    with stage_worker_processes([WorkerSetup(stage="tail")]) as (node,): ...     # python -m tests.support.stage_worker

A process reads its setup as one JSON line, prints where it is reached, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tests.support.child import Child, input_ended, say
from tests.support.model_configs import random_tokens, small_config
from trainer.compression.activations import activation_codec
from trainer.inner import InnerConfig, make_optimizer
from trainer.model import build_stage
from trainer.model.plan import StagePlan
from trainer.model.subspace import SubspaceConstraint, basis_of, fixed_table_of
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.pipeline.protocol.wire import wire_ids
from trainer.pipeline.stage import StageConfig, StageReplica
from trainer.pipeline.worker import StageWorker, WorkerConfig

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
    """A digest of a worker's parameters."""
    running = hashlib.sha256()
    for name, value in sorted(worker.replica.module.state_dict().items()):
        running.update(name.encode() + value.detach().numpy().tobytes())
    return running.hexdigest()


@dataclass
class RunningWorker:
    """A worker that answers."""

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


async def until(condition: Callable[[], bool]) -> None:
    """Waits for it, not for ever."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class StageProcess(Child):
    """A worker in another process."""

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
    """Starts several, all at once, and kills them at the end."""
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_serve(WorkerSetup(**json.loads(sys.stdin.readline()))))
