"""A pipeline whose workers are killed, stopped and slowed by a seeded schedule, and what is true of it afterwards.

disturber, progress = disturb(swarm, workers, schedule(seed, 30.0), "driver-1")  # returns when everybody is back
counted = counted_at_workers(swarm, keys)             # who has counted what, asked of the workers themselves
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scripts.swarm_bench.disturbing import Disturbance, Disturber, is_at_work
from scripts.swarm_bench.goodput import Progress
from tests.support.event_loop import on_event_loop
from tests.support.pipeline_swarm import STAGES, PipelineSwarm
from tests.support.training_swarm import WAIT_S, TrainingNode, wait_until
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.pipeline.protocol.messages import APPLIED, AppliedAnswer, AppliedAsk

__all__ = ["CountedAt", "Worker", "begin_churning", "counted_at_workers", "disturb"]

_TICK_S = 0.02
_LOOK_S = 1.0
_ASKED_AT_ONCE = 1024


@dataclass(slots=True)
class Worker:
    """One that can be disturbed."""

    node: TrainingNode
    stage: str
    _begun_at: int = 0

    @property
    def name(self) -> str:
        """Its node id."""
        return self.node.name

    def is_at_work(self) -> bool:
        """See `Victim`."""
        return is_at_work(self.node.output()[self._begun_at :])

    def send(self, number: int) -> None:
        """See `Victim`."""
        self.node.send(number)  # type: ignore[arg-type]

    def kill(self) -> None:
        """See `Victim`."""
        self.node.kill()
        self.node.reap()
        self._begun_at = len(self.node.output())

    def revive(self) -> None:
        """See `Victim`."""
        self.node.start()


@dataclass(frozen=True, slots=True)
class CountedAt:
    """What a worker says it has counted."""

    stage: str
    incarnation: str
    keys: frozenset[str] = field(repr=False)


def begin_churning(swarm: PipelineSwarm, drivers: Sequence[str], replicas: int = 2) -> list[Worker]:
    """Starts drivers and workers of all stages; returns when all workers are at work."""
    for name in drivers:
        swarm.begin_driver(name)
    for number in range(1, replicas + 1):
        swarm.begin_workers(*STAGES, suffix=f".{number}")
    workers = [Worker(swarm[f"{stage}.{number}"], stage) for stage in STAGES for number in range(1, replicas + 1)]
    swarm.wait(lambda: all(worker.is_at_work() for worker in workers), "all workers to be at work", 4 * WAIT_S)
    return workers


def disturb(
    swarm: PipelineSwarm, workers: Sequence[Worker], plan: Sequence[Disturbance], keeper: str
) -> tuple[Disturber, Progress]:
    """Carries a schedule out; fails at once when a process ends that was not killed.

    Returns:
        What was done, all workers being at work again; and how the account's micro-batches got done meanwhile.
    """
    disturber = Disturber(plan, workers)
    begun_s = time.monotonic()
    progress = Progress(0, begun_s)
    limit_s = 4 * WAIT_S + (plan[-1].at_s if plan else 0.0)
    try:
        while not disturber.is_over:
            now_s = time.monotonic() - begun_s
            assert now_s < limit_s, f"expected a schedule to end within {limit_s:.0f} s\n{disturber.done}"
            disturber.tick(now_s)
            account = swarm.account(keeper) if time.monotonic() - progress.looked_s >= _LOOK_S else None
            if account is not None:
                progress.look(account.micro_batches.done, time.monotonic())
            ended = [name for name, node in swarm.nodes.items() if name not in disturber.dead and node.has_ended()]
            assert not ended, f"{', '.join(ended)} ended by themselves"
            time.sleep(_TICK_S)
    finally:
        disturber.end()
    wait_until(lambda: all(worker.is_at_work() for worker in workers), "all workers to be at work again", 4 * WAIT_S)
    return disturber, progress


def counted_at_workers(swarm: PipelineSwarm, workers: Iterable[Worker], keys: Sequence[str]) -> list[CountedAt]:
    """Asks each worker which of these micro-batches it has counted."""
    found: list[CountedAt] = []

    @on_event_loop
    async def ask() -> None:
        endpoint = Endpoint(Identity.create(), swarm.config.run_id, RpcConfig(host="127.0.0.1"))
        await endpoint.start()
        try:
            peers = [(worker.stage, _peer_of(worker.node)) for worker in workers]
            found.extend(await asyncio.gather(*(_counted_at(endpoint, stage, peer, keys) for stage, peer in peers)))
        finally:
            await endpoint.stop()

    ask()
    return found


def _peer_of(node: TrainingNode) -> Peer:
    """Who it is in its last life, and where it is reached."""
    peer_id, address = re.findall(r"node ([0-9a-f]{64}) answers at (\S+)", node.output())[-1]
    return Peer(peer_id, address)


async def _counted_at(endpoint: Endpoint, stage: str, peer: Peer, keys: Sequence[str]) -> CountedAt:
    counted, incarnation = set[str](), ""
    for start in range(0, len(keys), _ASKED_AT_ONCE):
        ask = AppliedAsk(micro_batches=tuple(keys[start : start + _ASKED_AT_ONCE]))
        reply = await endpoint.call(peer, APPLIED, ask, AppliedAnswer, timeout_s=60.0)
        counted |= set(reply.body.micro_batches)
        assert incarnation in ("", reply.body.incarnation)
        incarnation = reply.body.incarnation
    return CountedAt(stage, incarnation, frozenset(counted))
