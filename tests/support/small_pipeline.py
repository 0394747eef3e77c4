"""Real workers of a small model in this process, on real sockets, that come and die; and a driver to send them rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tests.support.model_configs import random_tokens
from tests.support.stage_worker import RunningWorker, WorkerSetup, running_worker
from tests.support.toy_stage import ListedWork
from trainer.compression.activations import activation_codec
from trainer.model.subspace import basis_of, fixed_table_of
from trainer.network.discovery.stage_report import StageUid
from trainer.network.rpc import Endpoint, Peer
from trainer.pipeline.driver import DriverConfig, LinkForm, PipelineDriver, StageWorker
from trainer.pipeline.driver.workers import LastWord
from trainer.pipeline.protocol.work import LeaseTerm, MicroBatch, MicroBatchId, boottime_s

ROWS, POSITIONS = 2, 12


class Windows(ListedWork):
    def made(self, number: int) -> MicroBatch:
        ids, labels = random_tokens(64, ROWS, POSITIONS, seed=number)
        return MicroBatch(MicroBatchId(0, 0, number * ROWS), ids, labels, LeaseTerm(boottime_s() + 60.0))


@dataclass
class Directory:
    found: list[StageWorker] = field(default_factory=list)

    silence_s: float = 3600.0

    def workers(self) -> tuple[StageWorker, ...]:
        return tuple(self.found)

    def last_word(self, key: str) -> LastWord | None:
        """As a `StageDirectory`; not asked, all being at loopback addresses."""
        del key
        return None


def announced(stage: str, number: int, peer: Peer, incarnation: str = "0" * 16) -> StageWorker:
    return StageWorker(stage, str(StageUid(stage, number)), peer, incarnation)


def driver_of(endpoint: Endpoint, setup: WorkerSetup, directory: Directory, work: ListedWork, **options: Any) -> Any:
    """A driver of the setup's model; ``config`` holds changes to its configuration."""
    config = setup.plan.config
    basis, fixed = None, None
    if config.subspace_rank:
        basis, fixed = basis_of(config.dim, config.subspace_rank, config.subspace_seed), fixed_table_of(config)
    form = LinkForm(activation_codec(setup.codec, basis, fixed), config.dim)
    driver_config = DriverConfig(
        **{"request_timeout_s": 5.0, "unclear_s": 5.0, "ban_s": 0.3, "refresh_s": 0.05, **options.pop("config", {})}
    )
    return PipelineDriver(endpoint, setup.plan.names, directory, work, form, driver_config, **options)


@dataclass(frozen=True)
class Member:
    running: RunningWorker
    announced: StageWorker
    life: AsyncExitStack = field(repr=False)

    @property
    def stage(self) -> str:
        return self.announced.stage

    @property
    def incarnation(self) -> str:
        return self.running.worker.replies.incarnation

    @property
    def num_tokens(self) -> int:
        return self.running.worker.replica.accumulated.num_tokens

    def counted(self, keys: list[str]) -> set[str]:
        return set(self.running.worker.replies.counted_among(keys)[1])


class SmallPipeline:
    """All stages' workers, so many ``replicas`` of each, of one setup; an async context manager."""

    def __init__(self, setup: WorkerSetup, replicas: Mapping[str, int]) -> None:
        self.setup = setup
        self.directory = Directory()
        self.alive: list[Member] = []
        self._replicas = replicas
        self._number = 32

    async def __aenter__(self) -> Self:
        for stage, number in self._replicas.items():
            for _ in range(number):
                await self.join(stage)
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.alive:
            await member.life.aclose()

    def at(self, stage: str) -> list[Member]:
        return [member for member in self.alive if member.stage == stage]

    async def join(self, stage: str, in_place_of: Member | None = None) -> Member:
        """One more; or the next life of one that was killed: the same key, the same address."""
        setup, options = replace(self.setup, stage=stage), dict[str, Any]()
        if in_place_of is not None:
            endpoint = in_place_of.running.endpoint
            setup = replace(setup, rpc={**setup.rpc, "port": int(endpoint.address.rpartition(":")[2])})
            options["identity"] = endpoint.identity
            self.directory.found.remove(in_place_of.announced)
        life = AsyncExitStack()
        running = await life.enter_async_context(running_worker(setup, **options))
        self._number += 1
        said = announced(stage, self._number, running.peer, running.worker.replies.incarnation)
        member = Member(running, said, life)
        self.directory.found.append(said)
        self.alive.append(member)
        return member

    async def kill(self, member: Member) -> None:
        """It is gone; as in a real swarm, it goes on being announced for a while."""
        self.alive.remove(member)
        await member.life.aclose()

    def forget_dead(self) -> None:
        self.directory.found = [member.announced for member in self.alive]

    def driver(self, endpoint: Endpoint, work: ListedWork, **options: Any) -> PipelineDriver:
        driver: PipelineDriver = driver_of(endpoint, self.setup, self.directory, work, **options)
        return driver
