"""Which of a stage's workers get work: hosts they share, bans that end, and those that hang and are named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.rpc_pair import running_endpoint
from tests.support.toy_drive import FAST, ONE_EACH, driving, until
from tests.support.toy_stage import ToySwarm, toy_swarm
from trainer.network.rpc import Peer
from trainer.pipeline.driver.pool import Placement, StagePool
from trainer.pipeline.driver.results import Verdict
from trainer.pipeline.driver.watching import StallDetector
from trainer.pipeline.driver.workers import StageWorker

UNAVAILABLE = Verdict("unavailable", "unclear", "ban")
NONSENSE = Verdict("malformed-answer", "unclear", "long-ban")
LIARS_HOST = "192.0.2.66"
REFUSES = Verdict("nonfinite", "none", "ban")


class Clock:
    """Goes on when it is told to."""

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


# -- the stall detector ------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """Stages of one worker each, of which each has been given a micro-batch."""

    swarm: ToySwarm
    detector: StallDetector
    pools: dict[str, StagePool]
    clock: Clock

    async def look_after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        await self.detector.look()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.message for it in caplog.records if it.name.endswith("watching") and it.levelname == "WARNING"]


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    async with toy_swarm(ONE_EACH) as swarm, running_endpoint() as endpoint:
        clock = Clock()
        pools = {stage: StagePool(stage, FAST, clock) for stage in swarm.stages}
        for stage, pool in pools.items():
            pool.update(worker for worker in swarm.workers() if worker.stage == stage)
            assert await pool.acquire(1.0, avoid=(), left_s=lambda: 60.0) is not None
        yield Watched(swarm, StallDetector(endpoint, pools, clock), pools, clock)


@on_event_loop
async def test_only_the_one_that_hangs_is_named_and_once(caplog: pytest.LogCaptureFixture) -> None:
    async with watched() as here:
        tail = here.swarm.at("tail")
        await tail.kill()
        await here.look_after(6.0)
        assert here.detector.silent() == {}, "that may be a slow micro-batch"
        await here.look_after(6.0)
        await here.look_after(6.0)
        assert here.detector.silent() == {tail.worker.key: pytest.approx(18.0)}
        await tail.start()
        await here.look_after(6.0)
        assert here.detector.silent() == {}
    assert said(caplog) == [
        "tail.0.32 has not answered for 12 s; micro-batches wait for it (1)",
        "tail.0.32 answers again, after 24 s",
    ]


@on_event_loop
async def test_one_that_is_announced_no_longer_is_waited_for_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    async with watched() as here:
        await here.swarm.at("tail").kill()
        await here.look_after(12.0)
        here.pools["tail"].update(())
        await here.look_after(6.0)
        assert here.detector.silent() == {}
    assert said(caplog)[-1] == "tail.0.32 is gone: nothing came from it for 18 s"


@on_event_loop
async def test_whoever_has_nothing_under_way_is_not_asked() -> None:
    async with toy_swarm(ONE_EACH) as swarm, running_endpoint() as endpoint:
        clock = Clock()
        pool = StagePool("tail", FAST, clock)
        pool.update(worker for worker in swarm.workers() if worker.stage == "tail")
        detector = StallDetector(endpoint, {"tail": pool}, clock)
        await swarm.at("tail").kill()
        for _ in range(3):
            clock.now_s += 10
            await detector.look()
        assert detector.silent() == {}


@pytest.mark.parametrize(
    ("verdicts", "is_free"),
    [((UNAVAILABLE, UNAVAILABLE), True), ((REFUSES, REFUSES), False), ((UNAVAILABLE, None), False)],
)
@on_event_loop
async def test_one_banned_for_silence_gets_work_again_if_its_stage_has_nobody_else(
    verdicts: tuple[Verdict | None, ...], is_free: bool
) -> None:
    async with toy_swarm({"tail": 2}) as swarm, running_endpoint() as endpoint:
        clock, there = Clock(), swarm.workers()
        pool = StagePool("tail", replace(FAST, ban_s=600.0, max_ban_s=600.0), clock)
        pool.update(there)
        for worker, verdict in zip(there, verdicts, strict=True):
            if verdict is not None:
                pool.blame(worker, verdict, clock())
        await swarm.at("tail", 1).kill()
        detector = StallDetector(endpoint, {"tail": pool}, clock)
        clock.now_s += 0.5
        await detector.look()
        assert pool.is_banned(there[0]), "it was banned just now"
        clock.now_s += 1.0
        await detector.look()
        assert pool.is_banned(there[0]) is not is_free
        assert pool.is_banned(there[1]) is (verdicts[1] is not None), "it does not answer"


def test_a_worker_that_restarts_is_free_of_its_ban_though_it_was_not_announced_for_a_while() -> None:
    clock = Clock()
    pool = StagePool("tail", replace(FAST, ban_s=600.0, max_ban_s=600.0), clock)
    first = StageWorker("tail", "tail.0.32", Peer("a" * 64, "127.0.0.1:9"), "first")
    pool.update([first])
    pool.blame(first, UNAVAILABLE, clock())
    pool.update([first])
    assert pool.is_banned(first)
    pool.update([])  # It is joining.
    pool.update([first])
    assert pool.is_banned(first), "the same process, or an announcement of it that is late"
    pool.update([])
    pool.update([replace(first, incarnation="second")])
    assert not pool.is_banned(first)


@pytest.mark.parametrize("routing", ["hub", "chain"])
@on_event_loop
async def test_a_driver_tells_who_holds_it_up(
    routing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tail takes everything in and answers nothing, as a stopped process does."""
    monkeypatch.setattr(
        "trainer.pipeline.driver.driver.StallDetector", partial(StallDetector, name_after_s=0.2, look_s=0.02)
    )
    monkeypatch.setattr("trainer.pipeline.driver.watching._ANSWER_S", 1.5)

    config = replace(FAST, request_timeout_s=30.0, max_in_flight=1, routing=routing)
    async with driving(ONE_EACH, 1, config) as drive:
        tail = drive.swarm.at("tail")
        tail.stopped = asyncio.Event()
        running = asyncio.create_task(drive.driver.run())
        await until(lambda: bool(drive.driver.status().silent))
        assert set(drive.driver.status().silent) == {tail.worker.key}
        tail.stopped.set()
        await running
        assert drive.work.fates() == ["done"]
    assert {message.partition(" ")[0] for message in said(caplog)} == {"tail.0.32"}
