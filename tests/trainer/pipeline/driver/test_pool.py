"""Who of a stage's workers gets the next micro-batch, as far as it hangs on the host that they share."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.toy_drive import FAST
from trainer.network.rpc import Peer
from trainer.pipeline.driver.pool import Placement, StagePool
from trainer.pipeline.driver.results import Verdict
from trainer.pipeline.driver.workers import StageWorker

UNAVAILABLE = Verdict("unavailable", "unclear", "ban")
NONSENSE = Verdict("malformed-answer", "unclear", "long-ban")
LIARS_HOST = "192.0.2.66"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def worker(number: int, host: str = LIARS_HOST) -> StageWorker:
    return StageWorker("tail", f"tail.0.{number}", Peer(f"{number:064x}", f"{host}:9"), "it")


HONEST = worker(1, "192.0.2.1")


async def pool_of(clock: Clock, *workers: StageWorker) -> StagePool:
    """One in which the first has counted before."""
    pool = StagePool("tail", replace(FAST, ban_s=1.0, max_ban_s=600.0), clock)
    pool.update(workers[:1])
    counted = await placed(pool)
    assert counted is not None
    pool.measured(counted, 1.0, clock())
    pool.counted(counted)
    pool.done(counted)
    pool.update(workers)
    return pool


async def placed(pool: StagePool) -> Placement | None:
    try:
        async with asyncio.timeout(0.01):
            return await pool.acquire(1.0, avoid=(), left_s=lambda: 1.0)
    except TimeoutError:
        return None


async def asked(pool: StagePool, times: int = 40) -> set[str]:
    """Names of those who got one of so many micro-batches, which nobody answers yet."""
    found = [await placed(pool) for _ in range(times)]
    for placement in found:
        if placement is not None:
            pool.released(placement)
    return {placement.worker.uid for placement in found if placement is not None}


@pytest.mark.parametrize("verdict", [UNAVAILABLE, NONSENSE])
@on_event_loop
async def test_what_a_newcomer_did_amiss_those_of_its_host_wait_for_and_nobody_else_does(verdict: Verdict) -> None:
    clock = Clock()
    pool = await pool_of(clock, HONEST, worker(2), worker(3), worker(4, "192.0.2.7"))
    pool.blame(worker(2), verdict, clock())
    assert await asked(pool) == {HONEST.uid, "tail.0.4"}
    clock.now_s += 1.5
    pool.blame(worker(4, "192.0.2.7"), NONSENSE, clock())
    assert await asked(pool) & {"tail.0.2", "tail.0.3"}, "a first ban is a short one"


@on_event_loop
async def test_keys_without_end_of_one_host_get_less_and_less() -> None:
    clock = Clock()
    waits_s = []
    pool = await pool_of(clock, HONEST)
    for number in range(2, 8):
        liar = worker(number)
        pool.update([HONEST, liar])
        begun_s = clock.now_s
        while liar.uid not in await asked(pool, 8):
            clock.now_s += 0.5
        waits_s.append(clock.now_s - begun_s)
        pool.blame(liar, NONSENSE, clock())
    assert waits_s == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]


@on_event_loop
async def test_one_that_counts_clears_its_host_s_name_and_is_not_judged_by_it_again() -> None:
    clock = Clock()
    pool = await pool_of(clock, worker(2), worker(3), worker(4))
    pool.blame(worker(3), NONSENSE, clock())
    assert await asked(pool) == {"tail.0.2"}
    placement = await placed(pool)
    assert placement is not None
    pool.counted(placement)
    assert await asked(pool) == {"tail.0.2", "tail.0.4"}


@on_event_loop
async def test_a_stage_with_nobody_else_asks_them_all_the_same() -> None:
    clock = Clock()
    pool = StagePool("tail", replace(FAST, ban_s=1.0, max_ban_s=600.0), clock)
    pool.update([worker(2), worker(3)])
    pool.blame(worker(2), NONSENSE, clock())
    assert await asked(pool) == {"tail.0.3"}
