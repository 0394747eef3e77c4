"""What is taken as proof that a worker is gone, and who gets no work for how long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.event_loop import on_event_loop
from tests.support.toy_drive import FAST, Drive, driving
from tests.support.toy_stage import ToyStage
from trainer.network.rpc import Peer
from trainer.pipeline.driver import DriverConfig
from trainer.pipeline.driver.failure_detector import Bans, LivenessProbe
from trainer.pipeline.driver.workers import LastWord, StageWorker
from trainer.pipeline.protocol.messages import BACKWARD, CHAIN


class Gate:
    """Forwards to a port of this machine; while it is shut, *it* refuses connections, as a router or a proxy does.

    It listens at ``0.0.0.0``, which reaches this machine and is no loopback address: to a driver, a worker elsewhere.
    """

    def __init__(self, port: int) -> None:
        self.address = ""
        self._port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Begins to listen, at the address it had before."""
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._forward, "0.0.0.0", port)
        self.address = f"0.0.0.0:{self._server.sockets[0].getsockname()[1]}"

    def shut(self) -> None:
        """Refuses from now on, and cuts what there is."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, inner_writer}
        await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()


@asynccontextmanager
async def gate_before(port: int) -> AsyncIterator[Gate]:
    """An open one."""
    gate = Gate(port)
    await gate.open()
    try:
        yield gate
    finally:
        gate.shut()


KEY = "a" * 64
SILENCE_S = 20.0


@dataclass
class Heard:
    """A directory of one worker, and a clock."""

    word: LastWord | None = None
    now_s: float = 100.0
    silence_s: float = SILENCE_S

    def workers(self) -> tuple[StageWorker, ...]:
        return ()

    def last_word(self, key: str) -> LastWord | None:
        return self.word if key == KEY else None

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody listens there, and nobody else can."""
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        yield int(held.getsockname()[1])


def worker_at(address: str) -> StageWorker:
    return StageWorker("tail", "tail.0.40", Peer(KEY, address), "first")


@on_event_loop
async def test_on_this_machine_a_refusal_is_proof_enough(port: int) -> None:
    liveness = LivenessProbe(Heard())
    assert await liveness.probe(worker_at(f"127.0.0.1:{port}"), 5.0) == "gone"
    assert await liveness.probe(worker_at(f"localhost:{port}"), 5.0) == "gone"


@on_event_loop
async def test_elsewhere_it_takes_silence_too_from_the_first_refusal_on(port: int) -> None:
    worker = worker_at(f"0.0.0.0:{port}")
    heard = Heard(LastWord("first", worker.peer.address, heard_s=10.0))  # Silent for long, and not refused.
    liveness = LivenessProbe(heard, heard.clock)
    assert await liveness.probe(worker, 5.0) == "refused"
    heard.now_s += SILENCE_S - 1
    assert await liveness.probe(worker, 5.0) == "refused"
    heard.word = LastWord("first", worker.peer.address, heard_s=heard.now_s)
    heard.now_s += 2
    assert await liveness.probe(worker, 5.0) == "refused", "it lives: its key has announced something since"
    heard.now_s += SILENCE_S - 1
    assert await liveness.probe(worker, 5.0) == "refused"
    heard.now_s += 1
    assert await liveness.probe(worker, 5.0) == "gone"
    heard.word = None  # It has run out.
    assert await liveness.probe(worker, 5.0) == "gone"
    assert await liveness.probe(replace(worker, incarnation="second"), 5.0) == "refused"


@pytest.mark.parametrize(
    ("incarnation", "moved", "proven"),
    [("second", True, True), ("second", False, False), ("first", True, False), ("first", False, False)],
)
@on_event_loop
async def test_its_key_may_say_that_it_is_another_process_elsewhere(
    incarnation: str, moved: bool, proven: bool, port: int
) -> None:
    """At the same address it may be the other process that was asked, and that has counted behind what refuses."""
    worker = worker_at(f"0.0.0.0:{port}")
    heard = Heard(LastWord(incarnation, "0.0.0.0:9" if moved else worker.peer.address, heard_s=99.0))
    assert await LivenessProbe(heard, heard.clock).probe(worker, 5.0) == ("gone" if proven else "refused")


@on_event_loop
async def test_who_listens_is_there_however_long_it_is_silent() -> None:
    async with gate_before(9) as gate:
        heard = Heard()
        liveness, worker = LivenessProbe(heard, heard.clock), worker_at(gate.address)
        gate.shut()
        assert await liveness.probe(worker, 5.0) == "refused"
        heard.now_s += 10 * SILENCE_S
        await gate.open()
        assert await liveness.probe(worker, 5.0) == "unknown"
        gate.shut()
        assert await liveness.probe(worker, 5.0) == "refused", "refused anew: silence counts from here"


# -- a driver and what stands before a worker --------------------------------------------------------------------------


def behind(gate: Gate, then: Callable[[ToyStage], Awaitable[None]]) -> Callable[..., Awaitable[object]]:
    """A request is counted; then the gate is shut, and its answer with it."""

    async def fault(stage: ToyStage, _key: str, work: Callable[[], Awaitable[object]]) -> object:
        await work()
        gate.shut()
        await then(stage)
        return await asyncio.sleep(60)

    return fault


@asynccontextmanager
async def gated(routing: str, then: Callable[[ToyStage], Awaitable[None]]) -> AsyncIterator[Drive]:
    """Two workers a stage; the first of body-1 is behind a gate, shut once it has counted."""
    config = replace(FAST, routing=routing, max_in_flight=1, ban_s=5.0, max_ban_s=5.0)
    async with driving({"head": 1, "body-1": 2, "tail": 1}, 6, config) as drive:
        hidden = drive.swarm.at("body-1")
        async with gate_before(int(hidden.worker.peer.address.rpartition(":")[2])) as gate:
            hidden.worker = replace(hidden.worker, peer=Peer(hidden.worker.peer.peer_id, gate.address))
            hidden.faults[BACKWARD if routing == "hub" else CHAIN].append(behind(gate, then))
            yield drive


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
@on_event_loop
async def test_a_worker_behind_a_gate_that_refuses_is_not_replaced(routing: str) -> None:
    async def lives(_stage: ToyStage) -> None:
        return None

    async with gated(routing, lives) as drive:
        await drive.driver.run()  # That nothing is counted twice, `driving` checks at its end.
        assert sorted(drive.work.fates()) == ["done"] * 5 + ["lost"]
        assert drive.driver.status().lost_by == {"body-1: unclear": 1}


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
@on_event_loop
async def test_a_worker_elsewhere_that_was_killed_is_replaced_once_it_has_been_silent(routing: str) -> None:
    async def dies(stage: ToyStage) -> None:
        stage.begin_to_die()

    async with gated(routing, dies) as drive:
        drive.swarm.silence_s = 0.3
        await drive.all_done()


# -- bans --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def book() -> Bans:
    return Bans(DriverConfig())


def test_bans_double_up_to_an_hour(book: Bans) -> None:
    now, lengths = 0.0, []
    for _ in range(10):
        until_s = book.failed("a", asked_s=now, now=now + 1)
        lengths.append(until_s - now - 1)
        assert book.is_banned("a", until_s - 0.001)
        assert not book.is_banned("a", until_s)
        now = until_s
    assert lengths == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_a_success_resets(book: Bans) -> None:
    book.failed("a", asked_s=0.0, now=0.0)
    book.failed("a", asked_s=31.0, now=32.0)
    assert book.is_banned("a", 33.0)
    assert not book.is_caught("a", 33.0), "silence is no lie"
    book.succeeded("a")
    assert not book.is_banned("a", 33.0)
    assert book.failed("a", asked_s=40.0, now=41.0) == 71.0


def test_requests_that_fail_together_are_one_failure(book: Bans) -> None:
    assert {book.failed("a", asked_s=0.0, now=5.0 + number) for number in range(8)} == {35.0}
    # One that was sent before the ban and fails after it says nothing new either.
    assert book.failed("a", asked_s=1.0, now=40.0) == 35.0
    assert book.failed("a", asked_s=41.0, now=42.0) == 102.0


def test_nonsense_costs_an_hour_and_neither_success_nor_restart_shortens_it(book: Bans) -> None:
    assert book.malformed("a", now=10.0) == 3610.0
    book.succeeded("a")
    book.restarted("a")
    assert book.is_banned("a", 3609.0)
    assert book.is_caught("a", 3609.0)
    assert not book.is_banned("a", 3610.0)
    assert not book.is_caught("a", 3610.0)


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


def test_who_only_refuses_to_count_is_banned_and_forward_passes_or_restarts_do_not_help(book: Bans) -> None:
    now = 0.0
    for _ in range(4):
        now += 1.0
        assert not book.doubted("a", asked_s=now, now=now) > now
        book.succeeded("a")
    lengths = []
    for _ in range(3):
        now += 1.0
        until_s = book.doubted("a", asked_s=now, now=now)
        lengths.append(until_s - now)
        book.succeeded("a")
        book.restarted("a")
        assert book.is_banned("a", now + 1.0)
        now = until_s
    assert lengths == [30, 60, 120]
    book.counted("a")
    assert not book.doubted("a", asked_s=now, now=now) > now


def test_one_banned_for_silence_may_be_asked_soon_and_is_free_once_it_answers(book: Bans) -> None:
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


def test_answering_ends_no_ban_for_refusals_or_nonsense(book: Bans) -> None:
    book.failed("a", asked_s=0.0, now=0.0)
    book.doubted("b", asked_s=0.0, now=0.0, doubts=5)
    book.failed("c", asked_s=0.0, now=0.0, is_silent=True)
    book.malformed("c", now=1.0)
    for worker in "abc":
        assert not book.may_be_asked(worker, 20.0)
        book.answers(worker, 20.0)
        assert book.is_banned(worker, 20.0)


def test_those_who_left_are_forgotten_when_their_ban_is_over(book: Bans) -> None:
    book.failed("a", asked_s=0.0, now=0.0)
    book.tidy(10.0, keep=set())
    assert book.banned(10.0) == {"a": 20.0}
    book.tidy(31.0, keep=set())
    assert book.failed("a", asked_s=31.0, now=31.0) == 61.0


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
