"""What is taken as proof that a worker is gone: never the word of whatever stands between it and the driver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.gate import Gate, gate_before
from tests.support.toy_drive import FAST, Drive, driving
from tests.support.toy_stage import ToyStage
from trainer.network.rpc import Peer
from trainer.pipeline.driver.failure_detector import Deaths
from trainer.pipeline.driver.workers import LastWord, StageWorker
from trainer.pipeline.protocol.messages import BACKWARD, CHAIN

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


def test_on_this_machine_a_refusal_is_proof_enough(port: int) -> None:
    @on_event_loop
    async def test() -> None:
        deaths = Deaths(Heard())
        assert await deaths.found(worker_at(f"127.0.0.1:{port}"), 5.0) == "gone"
        assert await deaths.found(worker_at(f"localhost:{port}"), 5.0) == "gone"

    test()


def test_elsewhere_it_takes_silence_too_from_the_first_refusal_on(port: int) -> None:
    worker = worker_at(f"0.0.0.0:{port}")

    @on_event_loop
    async def test() -> None:
        heard = Heard(LastWord("first", worker.peer.address, heard_s=10.0))  # Silent for long, and not refused.
        deaths = Deaths(heard, heard.clock)
        assert await deaths.found(worker, 5.0) == "refused"
        heard.now_s += SILENCE_S - 1
        assert await deaths.found(worker, 5.0) == "refused"
        heard.word = LastWord("first", worker.peer.address, heard_s=heard.now_s)
        heard.now_s += 2
        assert await deaths.found(worker, 5.0) == "refused", "it lives: its key has said something since"
        heard.now_s += SILENCE_S - 1
        assert await deaths.found(worker, 5.0) == "refused"
        heard.now_s += 1
        assert await deaths.found(worker, 5.0) == "gone"
        heard.word = None  # It has run out.
        assert await deaths.found(worker, 5.0) == "gone"
        assert await deaths.found(replace(worker, incarnation="second"), 5.0) == "refused"

    test()


@pytest.mark.parametrize(
    ("incarnation", "moved", "proven"),
    [("second", True, True), ("second", False, False), ("first", True, False), ("first", False, False)],
)
def test_its_key_may_say_that_it_is_another_process_elsewhere(
    incarnation: str, moved: bool, proven: bool, port: int
) -> None:
    """At the same address it may be the other process that was asked, and that has counted behind what refuses."""
    worker = worker_at(f"0.0.0.0:{port}")
    address = "0.0.0.0:9" if moved else worker.peer.address

    @on_event_loop
    async def test() -> None:
        heard = Heard(LastWord(incarnation, address, heard_s=99.0))
        assert await Deaths(heard, heard.clock).found(worker, 5.0) == ("gone" if proven else "refused")

    test()


@on_event_loop
async def test_who_listens_is_there_however_long_it_is_silent() -> None:
    async with gate_before(9) as gate:
        heard = Heard()
        deaths, worker = Deaths(heard, heard.clock), worker_at(gate.address)
        gate.shut()
        assert await deaths.found(worker, 5.0) == "refused"
        heard.now_s += 10 * SILENCE_S
        await gate.open()
        assert await deaths.found(worker, 5.0) == "unknown"
        gate.shut()
        assert await deaths.found(worker, 5.0) == "refused", "refused anew: silence counts from here"


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
        assert hidden.worker is not None
        async with gate_before(int(hidden.worker.peer.address.rpartition(":")[2])) as gate:
            hidden.worker = replace(hidden.worker, peer=Peer(hidden.worker.peer.peer_id, gate.address))
            hidden.faults[BACKWARD if routing == "hub" else CHAIN].append(behind(gate, then))
            yield drive


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
def test_a_worker_behind_a_gate_that_refuses_is_not_replaced(routing: str) -> None:
    async def lives(_stage: ToyStage) -> None:
        return None

    @on_event_loop
    async def test() -> None:
        async with gated(routing, lives) as drive:
            await drive.driver.run()  # That nothing is counted twice, `driving` looks at behind this.
            assert sorted(drive.work.fates()) == ["done"] * 5 + ["lost"]
            assert drive.driver.status().lost_by == {"body-1: unclear": 1}

    test()


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hub", "chain"])
def test_a_worker_elsewhere_that_was_killed_is_replaced_once_it_has_been_silent(routing: str) -> None:
    async def dies(stage: ToyStage) -> None:
        stage.begin_to_die()

    @on_event_loop
    async def test() -> None:
        async with gated(routing, dies) as drive:
            drive.swarm.silence_s = 0.3
            await drive.driver.run()
            assert drive.work.fates() == ["done"] * 6

    test()
