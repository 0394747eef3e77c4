"""Whatever workers do, and whenever: each stage counts a micro-batch once, or it is said to be lost."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.toy_drive import FAST, STAGES, TWO_EACH, driving
from tests.support.toy_stage import (
    Fault,
    ToyStage,
    ToySwarm,
    count_and_die,
    die,
    distort,
    fail_after,
    garble,
    lose_answer,
    refuse,
    say_nothing,
)
from trainer.pipeline.protocol.messages import BACKWARD, CHAIN, FORWARD, TAIL

FAULTS: dict[str, Fault] = {
    "refuse": refuse("expired"),
    "busy": refuse("busy"),
    "nonfinite": refuse("nonfinite"),
    "already": refuse("already-applied"),
    "say nothing": say_nothing,
    "lose answer": lose_answer,
    "fail after": fail_after,
    "die": die,
    "count and die": count_and_die,
    "shape": distort(lambda tensor: tensor[:1]),
    "nan": distort(lambda tensor: torch.full_like(tensor, float("nan"))),
    "rows": garble(num_rows=3),
}
HARMLESS = {"refuse", "busy", "nonfinite", "lose answer", "say nothing", "fail after", "die", "count and die"}
"""None of them makes a micro-batch be lost, as long as somebody else is there."""


class Chaos:
    """What happens to a swarm, drawn from a seed."""

    def __init__(self, swarm: ToySwarm, draw: random.Random, faults: list[str]) -> None:
        self._swarm = swarm
        self._draw = draw
        for name in faults:
            toy = draw.choice(swarm.all)
            for method in {"head": (FORWARD, BACKWARD), "tail": (TAIL,)}.get(toy.stage, (FORWARD, BACKWARD)):
                toy.faults[method].append(FAULTS[name] if draw.random() < 0.7 else _undisturbed)
            toy.faults[CHAIN].append(FAULTS[name])

    async def run(self) -> None:
        """Kills, and lets come back what has died, until it is cancelled."""
        while True:
            await asyncio.sleep(self._draw.uniform(0.01, 0.1))
            for toy in self._swarm.all:
                if not toy.alive:
                    await toy.kill()
                    await toy.start()
            if self._draw.random() < 0.1:
                self._draw.choice(self._swarm.all).begin_to_die()


async def _undisturbed(_stage: ToyStage, _key: str, work: object) -> object:
    return await work()  # type: ignore[operator]


def disturbed(seed: int, routing: str, faults: list[str], num: int) -> None:
    async def test() -> None:
        config = replace(FAST, routing=routing, max_ban_s=0.3, request_timeout_s=0.15, max_attempts=20, unclear_s=9.0)
        async with driving(TWO_EACH, num, config, lease_s=3.0) as drive:
            chaos = asyncio.create_task(Chaos(drive.swarm, random.Random(seed), faults).run())
            try:
                await drive.driver.run()
            finally:
                chaos.cancel()
                await asyncio.gather(chaos, return_exceptions=True)
            status = drive.driver.status()
            assert status.done + status.lost + status.handed_back + status.left == num
            assert status.done == drive.work.fates().count("done")
            assert status.lost == drive.work.fates().count("lost") == sum(status.lost_by.values())
            if HARMLESS.issuperset(faults):
                assert status.lost == 0
            for settled in drive.work.settled.values():
                stages = sorted(credit.stage for credit in settled.credits)
                assert (stages == sorted(STAGES)) == (settled.outcome == "done")
                assert (settled.lost_at in STAGES) == (settled.outcome == "lost")

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())  # An endpoint that is stopped in the midst of a call is not as tidy as a process killed.


SLOW = [HealthCheck.too_slow]
SCENARIO = {
    "seed": st.integers(0, 2**32),
    "routing": st.sampled_from(["hub", "chain"]),
    "faults": st.lists(st.sampled_from(sorted(FAULTS)), min_size=3, max_size=8),
}


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=SLOW)
@given(**SCENARIO)
def test_the_account_adds_up(seed: int, routing: str, faults: list[str]) -> None:
    disturbed(seed, routing, faults, num=6)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=SLOW)
@given(**SCENARIO)
def test_the_account_adds_up_in_many_ways(seed: int, routing: str, faults: list[str]) -> None:
    disturbed(seed, routing, faults, num=10)
