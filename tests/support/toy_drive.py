"""A driver at work on toy stages, and whether what it says agrees with what they have counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.rpc_pair import running_endpoint
from tests.support.toy_stage import DIM, ListedWork, ToySwarm, toy_swarm
from trainer.compression.activations import activation_codec
from trainer.pipeline.driver import DriverConfig, LinkForm, MicroBatchResult, PipelineDriver

STAGES = ("head", "body-1", "tail")
ONE_EACH = dict.fromkeys(STAGES, 1)
TWO_EACH = dict.fromkeys(STAGES, 2)
FAST = DriverConfig(
    max_in_flight=4,
    request_timeout_s=0.4,
    unclear_s=1.5,
    ban_s=0.2,
    max_ban_s=1.0,
    refresh_s=0.02,
    drain_s=2.0,
    audit_every=0,
)


@dataclass
class Drive:
    """A driver at work on a toy swarm."""

    swarm: ToySwarm
    work: ListedWork
    driver: PipelineDriver
    results: list[MicroBatchResult]

    async def all_done(self) -> None:
        """Runs to the end; every micro-batch is done."""
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
                    alive = {toy.incarnation: toy for toy in self.swarm.workers_by_stage[stage] if toy.alive}
                    assert credits[stage] not in alive or key in alive[credits[stage]].counted, (key, stage)
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


async def until(condition: Callable[[], bool]) -> None:
    """Waits for it; the test's own deadline bounds it."""
    while not condition():
        await asyncio.sleep(0.005)
