"""Whom a driver believes, and what it does not survive quietly."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.rpc_pair import running_endpoint
from tests.support.text_store import text_store
from tests.support.training_swarm import free_port
from trainer.errors import LedgerError
from trainer.network.discovery import Announcement, DiscoveryConfig
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.network.rpc import Endpoint, Identity
from trainer.pipeline.ledger.lanes import Lane
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.data import open_session
from trainer.run.node.identity import NodeStats
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.announcing import Presence
from trainer.run.swarm.driver_node import DriverNode
from trainer.run.swarm.keeper import keeps_account
from trainer.run.swarm.shape import DRIVER, SwarmShape, shape_of


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return from_mapping(
        RunConfig,
        {
            "node_id": "driver-2",
            "data": {"store": str(text_store())},
            "model": {"preset": "tiny"},
            "swarm": {"num_stages": 3},
        },
    )


@pytest.fixture(scope="module")
def shape(config: RunConfig) -> SwarmShape:
    return shape_of(config)


@pytest.fixture
def presence(config: RunConfig, shape: SwarmShape) -> Presence:
    endpoint = Endpoint(Identity.create(), config.run_id, config.rpc)
    return Presence(config, endpoint, shape, NodeStats, lambda _: None)


def said(shape: SwarmShape, name: str, key: str, stage: str = "", *, fits: bool = True) -> Announcement:
    digest = shape.terms(stage or DRIVER).digest() if fits else "0" * 64
    report = StageReport(uid=str(StageUid(stage, 40)), incarnation="1" * 16, status="serving") if stage else None
    return Announcement(
        peer_id=key * 64, node_id=name, run_id="r", address="127.0.0.1:5", terms_digest=digest, stage=report
    )


def workers_of_all(shape: SwarmShape) -> list[Announcement]:
    return [said(shape, stage, key, stage) for stage, key in zip(shape.plan.names, "abc", strict=True)]


def test_who_trains_something_else_is_not_asked_nor_noted(presence: Presence, shape: SwarmShape) -> None:
    presence.hear(
        (
            said(shape, "head", "a", "head"),
            said(shape, "stranger", "b", "tail", fits=False),
            said(shape, "driver-7", "c"),
            said(shape, "driver-8", "d", fits=False),
        )
    )
    assert [(stage, peer.peer_id) for stage, peer in presence.stage_peers()] == [("head", "a" * 64)]
    assert [report.uid for report, _ in presence.stage_workers()] == ["head.0.40"]
    assert presence.other_drivers() == ["c" * 64]


def test_the_keeper_is_the_first_of_its_name_as_long_as_it_is_there(
    presence: Presence, shape: SwarmShape, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = said(shape, "driver-1", "a", fits=False)
    first, second = said(shape, "driver-1", "b"), said(shape, "driver-1", "c")
    found = []
    for announcements in ((stranger,), (stranger, first), (second, first), (first, second), (second,), (first, second)):
        presence.hear(announcements)
        keeper = presence.keeper()
        found.append(keeper and keeper.peer_id[0])
    assert found == [None, "b", "b", "b", "c", "c"]
    assert sum("calls itself driver-1 too" in record.message for record in caplog.records) == 2


def test_a_keepers_key_is_waited_for_however_long_it_is_away_and_no_name_stands_for_it(
    config: RunConfig, shape: SwarmShape
) -> None:
    ledger = replace(config.swarm.ledger, keeper="b" * 64)
    known = replace(config, swarm=replace(config.swarm, ledger=ledger))
    presence = Presence(known, Endpoint(Identity.create(), "r", config.rpc), shape, NodeStats, lambda _: None)
    keeper = said(shape, "another-name", "b")
    strangers = (said(shape, "driver-1", "a"), said(shape, "b" * 64, "c"))
    found = []
    for announcements in (strangers, (*strangers, keeper), strangers, (keeper,)):
        presence.hear(announcements)
        peer = presence.keeper()
        found.append(peer and peer.peer_id[0])
    assert found == [None, "b", None, "b"]


def test_a_driver_named_like_the_keepers_key_is_not_the_keeper(config: RunConfig) -> None:
    ledger = replace(config.swarm.ledger, keeper="b" * 64)
    impostor = replace(config, node_id="b" * 64, swarm=replace(config.swarm, ledger=ledger))
    assert not keeps_account(impostor, "c" * 64)
    assert keeps_account(impostor, "b" * 64)


def test_a_stranger_is_named_once_while_it_is_there_and_forgotten_with_it(
    presence: Presence, shape: SwarmShape, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = said(shape, "stranger", "b", "tail", fits=False)
    for announcements, told in (((stranger,), 1), ((stranger,), 1), ((), 1), ((stranger,), 2)):
        presence.hear(announcements)
        assert not presence.workers()
        assert sum("gets no work" in record.message for record in caplog.records) == told


def test_a_word_is_as_old_as_the_announcement_not_as_the_look(presence: Presence, shape: SwarmShape) -> None:
    """That an announcement is still passed about proves nothing of who said it."""
    key = "a" * 64
    assert presence.last_word(key) is None
    presence.hear((said(shape, "head", "a", "head").stamped(100.0, 60.0),))
    first = presence.last_word(key)
    assert first is not None
    assert (first.incarnation, first.address) == ("1" * 16, "127.0.0.1:5")
    presence.hear((said(shape, "head", "a", "head").stamped(100.0, 60.0),))
    assert presence.last_word(key) is first
    presence.hear((said(shape, "head", "a", "head").stamped(105.0, 60.0),))
    renewed = presence.last_word(key)
    assert renewed is not None
    assert renewed.heard_s > first.heard_s
    presence.hear(())
    assert presence.last_word(key) is None
    assert presence.silence_s == 20.0


@pytest.mark.slow
@on_event_loop
async def test_what_goes_wrong_with_one_look_does_not_end_looking(
    config: RunConfig, shape: SwarmShape, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(1000))
    looked_on = asyncio.Event()

    def heard(_others: tuple[Announcement, ...]) -> None:
        if next(calls) == 0:
            raise OSError("no space left for the log")
        looked_on.set()

    async with running_endpoint() as endpoint:
        presence = Presence(config, endpoint, shape, NodeStats, heard)
        await presence.start()
        await asyncio.wait_for(looked_on.wait(), 20)
        await presence.stop()
    assert "going on with those known before" in caplog.text


class Endless:
    """A driver with work for ever."""

    async def run(self) -> None:
        await asyncio.Event().wait()


class Failed:
    """A keeper that cannot write."""

    async def failed(self) -> None:
        raise LedgerError("the disk is full")


@pytest.mark.parametrize(
    ("part", "broken", "error"), [("_keeper", Failed(), LedgerError), ("_look", lambda: 1 / 0, ZeroDivisionError)]
)
def test_a_driver_ends_with_whatever_cannot_go_on(
    part: str, broken: object, error: type[Exception], config: RunConfig, shape: SwarmShape, tmp_path: Path
) -> None:
    placed = replace(config, state_dir=str(tmp_path))
    node = DriverNode(placed, shape, open_session(config.data), StopRequest(), None)

    async def look() -> None:
        if part == "_look":
            broken()
        await asyncio.Event().wait()

    @on_event_loop
    async def test() -> None:
        node._look = look
        node._keeper = broken if part == "_keeper" else None
        with pytest.raises(error):
            await asyncio.wait_for(node._drive(Endless()), 20)

    test()


class Stoppable:
    """A driver with work until it is told to stop."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        await self.stopped.wait()

    def stop(self) -> None:
        self.stopped.set()


class Quiet:
    """A keeper with nothing to do."""

    async def failed(self) -> None:
        await asyncio.Event().wait()


class Counting(Quiet):
    """A keeper of an account that is done, who has told nobody."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s

    def has_told(self, _driver: str) -> bool:
        return False

    def quiet_s(self, _driver: str) -> float:
        return self._quiet_s

    async def account(self) -> object:
        return SimpleNamespace(leases=0)


@pytest.mark.slow
@pytest.mark.parametrize(("quiet_s", "waits"), [(math.inf, False), (0.1, True)])
def test_a_keeper_does_not_wait_for_whoever_only_says_it_is_a_driver(
    quiet_s: float, waits: bool, config: RunConfig, shape: SwarmShape, tmp_path: Path
) -> None:
    discovery = DiscoveryConfig(announce_interval_s=0.1, announcement_lifetime_s=1.0)
    placed = replace(config, state_dir=str(tmp_path), discovery=discovery)
    node = DriverNode(placed, shape, open_session(config.data), StopRequest(), None)
    node._presence.hear((said(shape, "driver-9", "d"), *workers_of_all(shape)))

    @on_event_loop
    async def test() -> None:
        driver, node._keeper = Stoppable(), Counting(quiet_s)
        driver.stop()
        working = asyncio.create_task(node._work(driver))
        await asyncio.wait([working], timeout=5.0)
        assert working.done() != waits
        working.cancel()

    test()


class Noted(Stoppable):
    """A driver that says when it was let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    async def run(self) -> None:
        self.begun.set()
        await super().run()


@pytest.mark.slow
def test_a_driver_sends_nothing_before_each_stage_has_a_worker(
    config: RunConfig, shape: SwarmShape, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node = DriverNode(replace(config, state_dir=str(tmp_path)), shape, open_session(config.data), StopRequest(), None)
    *some, last = workers_of_all(shape)

    @on_event_loop
    async def test() -> None:
        driver = Noted()
        working = asyncio.create_task(node._work(driver))
        await asyncio.sleep(0.05)
        node._presence.hear(tuple(some))
        await asyncio.sleep(0.5)
        assert not driver.begun.is_set()
        node._presence.hear((*some, last))
        await asyncio.wait_for(driver.begun.wait(), 20)
        driver.stop()
        await working

    test()
    assert [it.getMessage() for it in caplog.records if "waiting" in it.message] == [
        "waiting for workers of head, body-1, tail"
    ]


@pytest.mark.parametrize(("wait_s", "max_steps"), [(0.0, 0), (30.0, 3)])
def test_it_does_not_wait_for_ever_nor_when_all_is_done(
    wait_s: float,
    max_steps: int,
    config: RunConfig,
    shape: SwarmShape,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.run.swarm.driver_node._FIRST_WORKERS_S", wait_s)
    placed = replace(config, state_dir=str(tmp_path), max_steps=max_steps)
    node = DriverNode(placed, shape, open_session(config.data), StopRequest(), None)
    node._steps = max_steps

    @on_event_loop
    async def test() -> None:
        driver = Noted()
        driver.stop()
        await asyncio.wait_for(node._work(driver), 20)
        assert driver.begun.is_set()

    test()


@pytest.mark.slow
def test_a_driver_whose_addresses_are_dead_says_which(
    config: RunConfig, shape: SwarmShape, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.run.swarm.announcing._UNHEARD_S", 0.2)
    dead = f"127.0.0.1:{free_port()}"
    discovery = DiscoveryConfig(initial_peers=(dead,), poll_interval_s=0.1)

    @on_event_loop
    async def test() -> None:
        async with running_endpoint(run_id=config.run_id) as endpoint:
            lonely = Presence(replace(config, discovery=discovery), endpoint, shape, NodeStats, lambda _: None)
            await lonely.start()
            try:
                async with asyncio.timeout(30):
                    while f"nobody answers at {dead}: no worker of any stage has been heard of" not in caplog.text:
                        await asyncio.sleep(0.05)
            finally:
                await lonely.stop()

    test()


class HangingStore:
    """Stands for `lanes_of`: it asks a store that does not answer."""

    def __init__(self) -> None:
        self.asked, self.released, self.given_up = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, *_args: object) -> tuple[Lane, ...]:
        self.asked.set()
        self.released.wait(30.0)
        self.given_up.set()
        return ()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingStore]:
    store = HangingStore()
    monkeypatch.setattr("trainer.run.swarm.driver_node.lanes_of", store)
    yield store
    store.released.set()


@pytest.mark.slow
def test_a_keeper_that_is_asked_to_stop_waits_for_no_store(
    config: RunConfig, shape: SwarmShape, tmp_path: Path, hanging: HangingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.swarm.driver_node._NOTE_SHARDS_S", 0.0)
    stop = StopRequest()
    node = DriverNode(replace(config, state_dir=str(tmp_path)), shape, open_session(config.data), stop, None)

    @on_event_loop
    async def test() -> None:
        driver = Stoppable()
        node._driver, node._keeper = driver, Quiet()
        driving = asyncio.create_task(node._drive(driver))
        while not hanging.asked.is_set() and not driving.done():
            await asyncio.sleep(0.01)
        stop.ask()
        await driving

    test()
    assert not hanging.given_up.is_set()


@pytest.mark.slow
def test_a_driver_that_is_asked_to_stop_while_it_reads_what_there_is_does(
    config: RunConfig, shape: SwarmShape, tmp_path: Path, hanging: HangingStore
) -> None:
    stop = StopRequest()
    node = DriverNode(replace(config, state_dir=str(tmp_path)), shape, open_session(config.data), stop, None)

    @on_event_loop
    async def test() -> None:
        running = asyncio.create_task(node.run())
        while not hanging.asked.is_set() and not running.done():
            await asyncio.sleep(0.01)
        stop.ask()
        await running

    test()
    assert not hanging.given_up.is_set()
