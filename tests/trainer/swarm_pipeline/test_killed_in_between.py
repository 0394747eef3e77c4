"""A worker of a stage dies between a micro-batch's forward and backward pass, thirty times, and none is counted twice.

Real workers of a small model and a driver in one process. Who dies, and at which point, is seeded: while the tail has
the micro-batches, so that their backward passes are still to come; while these wait at the dying worker to be counted;
or right after some were counted, with the answers on their way. In half of the cases it comes back at the same address,
as another incarnation that knows nothing, else another worker does elsewhere.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.rpc_node import running_endpoint
from tests.support.small_pipeline import POSITIONS, ROWS, Member, SmallPipeline, Windows
from tests.support.stage_worker import RUN_ID, WorkerSetup, held
from tests.support.waiting import until
from trainer.pipeline.protocol.work import MicroBatch

NUM_KILLS = {"hub": 18, "chain": 12}
PER_KILL = 4
TOKENS = ROWS * POSITIONS
SETUP = WorkerSetup(rpc={"stop_grace_s": 0.0, "stall_timeout_s": 30.0})


class Portions(Windows):
    """Hands out no more than it is allowed to."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self._allowed = asyncio.Semaphore(0)

    def allow_some(self) -> None:
        for _ in range(PER_KILL):
            self._allowed.release()

    async def next(self) -> MicroBatch | None:
        if self.left:
            await self._allowed.acquire()
        return await super().next()


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
async def test_thirty_deaths(routing: str) -> None:
    rng = random.Random(routing)
    work = Portions(NUM_KILLS[routing] * PER_KILL)
    config = {"routing": routing, "max_in_flight": PER_KILL, "ban_s": 0.05, "max_ban_s": 0.05}
    config |= {"request_timeout_s": 20.0, "unclear_s": 20.0}
    pipeline = SmallPipeline(SETUP, {"head": 1, "body-1": 2, "tail": 1})
    async with pipeline, running_endpoint(run_id=RUN_ID, stall_timeout_s=30.0) as endpoint:
        running = asyncio.create_task(pipeline.driver(endpoint, work, config=config).run())
        while work.left:
            dead = await rng.choice([_while_the_tail_has_it, _while_it_waits, _when_it_has_counted])(pipeline, work)
            await pipeline.join("body-1", in_place_of=dead if rng.random() < 0.5 else None)
            await until(lambda: len(work.settled) == len(work.given))
            pipeline.forget_dead()
            _check(pipeline, work)
        await running
    assert work.fates() == ["done"] * NUM_KILLS[routing] * PER_KILL


async def _while_the_tail_has_it(pipeline: SmallPipeline, work: Portions) -> Member:
    async with held(pipeline.at("tail")[0].running) as release:
        doomed = await _passed_forwards(pipeline, work)
        await pipeline.kill(doomed)
        release()
    return doomed


async def _while_it_waits(pipeline: SmallPipeline, work: Portions) -> Member:
    async with held(pipeline.at("tail")[0].running) as release_tail:
        doomed = await _passed_forwards(pipeline, work)
        async with held(doomed.running) as release:
            release_tail()
            await until(lambda: doomed.running.worker.runtime.figures.queued > 0)
            dying = asyncio.create_task(pipeline.kill(doomed))
            await asyncio.sleep(0)
            release()
            await dying
    return doomed


async def _when_it_has_counted(pipeline: SmallPipeline, work: Portions) -> Member:
    before = {member.incarnation: member.running.worker.replies.applied for member in pipeline.at("body-1")}

    def counting() -> list[Member]:
        members = pipeline.at("body-1")
        return [it for it in members if it.running.worker.replies.applied > before[it.incarnation]]

    work.allow_some()
    await until(lambda: bool(counting()))
    doomed = counting()[0]
    await pipeline.kill(doomed)
    return doomed


async def _passed_forwards(pipeline: SmallPipeline, work: Portions) -> Member:
    """A worker behind which the tail, which is held up, has micro-batches waiting."""
    tail, bodies = pipeline.at("tail")[0].running, pipeline.at("body-1")
    computed = {it.incarnation: it.running.worker.runtime.figures.computed for it in bodies}

    def passed() -> list[Member]:  # A body counts what it computed a moment after the tail has it.
        return [it for it in bodies if it.running.worker.runtime.figures.computed > computed[it.incarnation]]

    work.allow_some()
    await until(lambda: tail.worker.runtime.figures.queued > 0 and bool(passed()))
    return passed()[0]


def _check(pipeline: SmallPipeline, work: Windows) -> None:
    """What was settled is what those have counted who live, each micro-batch in one worker of a stage."""
    for stage in ("head", "body-1", "tail"):
        members = pipeline.at(stage)
        counted = {member.incarnation: member.counted(work.given) for member in members}
        for key, settled in work.settled.items():
            (credit,) = [credit for credit in settled.credits if credit.stage == stage]
            assert key in counted.get(credit.incarnation, {key}), f"{key} is not counted in {stage}, where it is said"
            others = [name for name, found in counted.items() if key in found and name != credit.incarnation]
            assert not others, f"{key} is counted in {stage} by a worker that was not credited"
        for member in members:
            assert member.num_tokens == TOKENS * len(counted[member.incarnation])
