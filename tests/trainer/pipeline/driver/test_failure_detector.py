"""What is proof that a worker is gone, who gets no work for how long, and which of a stage's workers get it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rpc_node import running_endpoint
from tests.support.small_pipeline import Directory
from tests.support.toy_stage import FAST, ONE_EACH, SILENCE, ToyStage, ToySwarm, driving, say_nothing, toy_swarm
from trainer.network.rpc import Peer
from trainer.pipeline.driver import DriverConfig
from trainer.pipeline.driver.failure_detector import Bans, LivenessProbe
from trainer.pipeline.driver.pool import Placement, StagePool
from trainer.pipeline.driver.results import Verdict
from trainer.pipeline.driver.watching import StallDetector
from trainer.pipeline.driver.workers import LastWord, StageWorker
from trainer.pipeline.protocol.messages import BACKWARD

KEY = "a" * 64
SILENCE_S = 20.0


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Heard(Directory):
    """Of one worker, and a clock."""

    word: LastWord | None = None
    clock: Clock = field(default_factory=Clock)
    silence_s: float = SILENCE_S

    def last_word(self, key: str) -> LastWord | None:
        return self.word if key == KEY else None


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody listens there, and nobody else can."""
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        yield int(held.getsockname()[1])


def worker_at(address: str) -> StageWorker:
    return StageWorker("tail", "tail.0.40", Peer(KEY, address), "first")


async def test_here_a_refusal_is_proof_enough_elsewhere_it_takes_silence_too_from_the_first_on(port: int) -> None:
    for host in ("127.0.0.1", "localhost"):
        assert await LivenessProbe(Heard()).probe(worker_at(f"{host}:{port}"), 5.0) == "gone"
    worker = worker_at(f"0.0.0.0:{port}")
    heard = Heard(word=LastWord("first", worker.peer.address, heard_s=10.0))  # Silent for long, and not refused.
    liveness = LivenessProbe(heard, heard.clock)

    async def probed_after(seconds: float) -> str:
        heard.clock.now_s += seconds
        return await liveness.probe(worker, 5.0)

    assert [await probed_after(seconds) for seconds in (0.0, SILENCE_S - 1)] == ["refused"] * 2
    heard.word = LastWord("first", worker.peer.address, heard_s=heard.clock())
    assert await probed_after(2.0) == "refused", "it lives: its key has announced something since"
    assert [await probed_after(seconds) for seconds in (SILENCE_S - 1, 1.0)] == ["refused", "gone"]
    heard.word = None  # It has run out.
    assert await probed_after(0.0) == "gone"
    assert await liveness.probe(replace(worker, incarnation="second"), 5.0) == "refused"


@pytest.mark.parametrize(
    ("incarnation", "moved", "proven"),
    [("second", True, True), ("second", False, False), ("first", True, False), ("first", False, False)],
)
async def test_its_key_may_say_that_it_is_another_process_elsewhere(incarnation, moved, proven, port):
    """At the same address it may be the other process that was asked, and that has counted behind what refuses."""
    worker = worker_at(f"0.0.0.0:{port}")
    heard = Heard(word=LastWord(incarnation, "0.0.0.0:9" if moved else worker.peer.address, heard_s=99.0))
    assert await LivenessProbe(heard, heard.clock).probe(worker, 5.0) == ("gone" if proven else "refused")


async def test_who_listens_is_there_however_long_it_is_silent() -> None:
    heard, held = Heard(), socket.socket()
    held.bind(("0.0.0.0", 0))
    liveness, worker = LivenessProbe(heard, heard.clock), worker_at(f"0.0.0.0:{held.getsockname()[1]}")
    assert await liveness.probe(worker, 5.0) == "refused"
    heard.clock.now_s += 10 * SILENCE_S
    held.listen()
    assert await liveness.probe(worker, 5.0) == "unknown"
    held.close()
    assert await liveness.probe(worker, 5.0) == "refused", "refused anew: silence counts from here"


@pytest.mark.slow
async def test_a_worker_elsewhere_for_which_a_router_refuses_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shut: set[str] = set()

    async def is_refused(address: str, _timeout_s: float) -> bool:
        return address in shut

    async def fault(stage: ToyStage, _key: str, work: Callable[[], Awaitable[object]]) -> object:
        await work()
        shut.add(stage.worker.peer.address)
        stage.stopped = asyncio.Event()
        return await say_nothing()

    monkeypatch.setattr("trainer.pipeline.driver.failure_detector.is_refused", is_refused)
    config = replace(FAST, max_in_flight=1, ban_s=5.0, max_ban_s=5.0, unclear_s=4.0, **SILENCE)
    async with driving(ONE_EACH | {"body-1": 2}, 6, config) as drive:
        hidden = drive.swarm.at("body-1")
        address = f"0.0.0.0:{hidden.worker.peer.address.rpartition(':')[2]}"  # Not a loopback address.
        hidden.worker = replace(hidden.worker, peer=Peer(hidden.worker.peer.peer_id, address))
        hidden.faults[BACKWARD].append(fault)
        await drive.driver.run()  # That nothing is counted twice, `driving` checks at its end.
        assert sorted(drive.work.fates()) == ["done"] * 5 + ["lost"]
        assert drive.driver.status().lost_by == {"body-1: unclear": 1}


@pytest.fixture
def book() -> Bans:
    return Bans(DriverConfig())


def test_bans_double_up_to_an_hour_and_those_who_left_are_forgotten_when_theirs_is_over(book: Bans) -> None:
    now, lengths = 0.0, []
    for _ in range(10):
        until_s = book.failed("a", asked_s=now, now=now + 1)
        lengths.append(until_s - now - 1)
        assert book.is_banned("a", until_s - 0.001)
        assert not book.is_banned("a", until_s)
        now = until_s
    assert lengths == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    book.tidy(now - 10.0, keep=set())
    assert book.banned(now - 10.0) == {"a": 10.0}
    book.tidy(now + 1.0, keep=set())
    assert book.failed("a", asked_s=now + 1.0, now=now + 1.0) == now + 31.0


def test_requests_that_fail_together_are_one_failure_and_a_success_resets(book: Bans) -> None:
    assert {book.failed("a", asked_s=0.0, now=5.0 + number) for number in range(8)} == {35.0}
    # One that was sent before the ban and fails after it says nothing new either.
    assert book.failed("a", asked_s=1.0, now=40.0) == 35.0
    assert book.failed("a", asked_s=41.0, now=42.0) == 102.0
    assert book.is_banned("a", 43.0)
    assert not book.is_caught("a", 43.0), "silence is no lie"
    book.succeeded("a")
    assert not book.is_banned("a", 43.0)
    assert book.failed("a", asked_s=50.0, now=51.0) == 81.0


def test_nonsense_costs_an_hour_and_neither_success_nor_restart_shortens_it(book: Bans) -> None:
    assert book.malformed("a", now=10.0) == 3610.0
    book.succeeded("a")
    book.restarted("a")
    for now, is_over in ((3609.0, False), (3610.0, True)):
        assert book.is_banned("a", now) is book.is_caught("a", now) is not is_over


def test_a_restart_frees_of_bans_for_silence_once_until_something_is_counted(book: Bans) -> None:
    book.failed("a", asked_s=0.0, now=0.0)
    book.restarted("a")
    assert not book.is_banned("a", 1.0)
    assert book.failed("a", asked_s=2.0, now=3.0) == 63.0
    book.restarted("a")
    assert book.is_banned("a", 62.0)
    book.counted("a")
    book.failed("a", asked_s=70.0, now=71.0)
    book.restarted("a")
    assert not book.is_banned("a", 72.0)


def test_one_banned_for_silence_and_no_other_may_be_asked_soon_and_is_free_once_it_answers(book: Bans) -> None:
    now, waits = 0.0, []
    for _ in range(6):
        until_s = book.failed("a", asked_s=now, now=now, is_silent=True)
        wait_s = next(wait_s for wait_s in range(100) if book.may_be_asked("a", now + wait_s))
        waits.append(wait_s)
        book.answers("a", now + wait_s - 0.01)
        assert book.is_banned("a", now + wait_s), "asked too soon"
        now = until_s
    assert waits == [1, 2, 4, 8, 15, 15]
    book.failed("a", asked_s=now, now=now, is_silent=True)
    book.answers("a", now + 15)
    assert not book.is_banned("a", now + 15)
    assert not book.may_be_asked("a", now + 15)

    book.failed("refuses", asked_s=0.0, now=0.0)
    book.doubted("counts nothing", asked_s=0.0, now=0.0, doubts=5)
    book.failed("lies", asked_s=0.0, now=0.0, is_silent=True)
    book.malformed("lies", now=1.0)
    for worker in ("refuses", "counts nothing", "lies"):
        assert not book.may_be_asked(worker, 20.0)
        book.answers(worker, 20.0)
        assert book.is_banned(worker, 20.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("fms"), st.floats(0, 500)), max_size=60))
def test_no_ban_is_longer_than_it_may_be(events: list[tuple[str, str, float]]) -> None:
    book, now = Bans(DriverConfig()), 0.0
    for worker, kind, pause_s in events:
        now += pause_s
        if kind == "f":
            book.failed(worker, asked_s=now - pause_s / 2, now=now)
        elif kind == "m":
            book.malformed(worker, now=now)
        else:
            book.succeeded(worker)
        assert all(0 < left_s <= 3600.001 for left_s in book.banned(now).values())
    assert not book.banned(now + 3601)


UNAVAILABLE = Verdict("unavailable", "unclear", "ban")
NONSENSE = Verdict("malformed-answer", "unclear", "long-ban")
BANNING_LONG = replace(FAST, ban_s=600.0, max_ban_s=600.0)
LIARS_HOST = "192.0.2.66"
REFUSES = Verdict("nonfinite", "none", "ban")


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
    looks = iter((1.0, 0.0))  # Whether there is room is seen at the first look.
    pool._next_change_s = lambda now: 0.0
    return await pool.acquire(1.0, avoid=(), left_s=lambda: next(looks))


async def asked(pool: StagePool, times: int = 40) -> set[str]:
    """Names of those who got one of so many micro-batches, which nobody answers yet."""
    found = [placement for _ in range(times) if (placement := await placed(pool)) is not None]
    for placement in found:
        pool.released(placement)
    return {placement.worker.uid for placement in found}


@pytest.mark.parametrize("verdict", [UNAVAILABLE, NONSENSE])
async def test_what_a_newcomer_did_amiss_those_of_its_host_wait_for_and_nobody_else_does(verdict: Verdict) -> None:
    clock = Clock()
    pool = await pool_of(clock, HONEST, worker(2), worker(3), worker(4, "192.0.2.7"))
    pool.blame(worker(2), verdict, clock())
    assert await asked(pool) == {HONEST.uid, "tail.0.4"}


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


async def test_one_that_counts_clears_its_host_s_name_and_is_not_judged_by_it_again() -> None:
    clock = Clock()
    none_has_counted = StagePool("tail", BANNING_LONG, clock)
    none_has_counted.update([worker(2), worker(3)])
    none_has_counted.blame(worker(2), NONSENSE, clock())
    assert await asked(none_has_counted) == {"tail.0.3"}, "a stage with nobody else asks them all the same"
    pool = await pool_of(clock, worker(2), worker(3), worker(4))
    pool.blame(worker(3), NONSENSE, clock())
    assert await asked(pool) == {"tail.0.2"}
    placement = await placed(pool)
    assert placement is not None
    pool.counted(placement)
    assert await asked(pool) == {"tail.0.2", "tail.0.4"}


@dataclass
class Watched:
    """Stages of some workers each, of which each has been given a micro-batch or none."""

    swarm: ToySwarm
    detector: StallDetector
    pools: dict[str, StagePool]
    clock: Clock

    async def look_after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        await self.detector.look()


@asynccontextmanager
async def watched(replicas: dict[str, int] = ONE_EACH, *, is_idle: bool = False) -> AsyncIterator[Watched]:
    async with toy_swarm(replicas) as swarm, running_endpoint() as endpoint:
        clock = Clock()
        pools = {stage: StagePool(stage, BANNING_LONG, clock) for stage in replicas}
        for stage, pool in pools.items():
            pool.update(worker for worker in swarm.workers() if worker.stage == stage)
            assert is_idle or await placed(pool) is not None
        yield Watched(swarm, StallDetector(endpoint, pools, clock), pools, clock)


async def test_only_the_one_that_hangs_is_named() -> None:
    async with watched() as here:
        tail, idle = here.swarm.at("tail"), here.pools["tail"].usable()
        await tail.kill()
        await here.look_after(6.0)
        assert here.detector.silent() == {}, "that may be a slow micro-batch"
        await here.look_after(6.0)
        await here.look_after(6.0)
        assert here.detector.silent() == {tail.worker.key: pytest.approx(18.0)}
        await tail.start()
        await here.look_after(6.0)
        assert here.detector.silent() == {}
        await tail.kill()
        await here.look_after(12.0)
        here.pools["tail"].update(())
        await here.look_after(6.0)
        assert here.detector.silent() == {}, "it is announced no longer, and waited for no longer"
        here.pools["tail"].update(idle)
        await here.look_after(60.0)
        assert here.detector.silent() == {}, "it has nothing under way"


@pytest.mark.parametrize(
    ("verdicts", "is_free"),
    [((UNAVAILABLE, UNAVAILABLE), True), ((REFUSES, REFUSES), False), ((UNAVAILABLE, None), False)],
)
async def test_one_banned_for_silence_gets_work_again_if_its_stage_has_nobody_else(verdicts, is_free):
    async with watched({"tail": 2}, is_idle=True) as here:
        pool, there = here.pools["tail"], here.swarm.workers()
        for worker, verdict in zip(there, verdicts, strict=True):
            if verdict is not None:
                pool.blame(worker, verdict, here.clock())
        await here.swarm.at("tail", 1).kill()
        await here.look_after(0.5)
        assert pool.is_banned(there[0]), "it was banned just now"
        await here.look_after(1.0)
        assert pool.is_banned(there[0]) is not is_free
        assert pool.is_banned(there[1]) is (verdicts[1] is not None), "it does not answer"


def test_a_worker_that_restarts_is_free_of_its_ban_though_it_was_not_announced_for_a_while() -> None:
    clock = Clock()
    pool = StagePool("tail", BANNING_LONG, clock)
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
