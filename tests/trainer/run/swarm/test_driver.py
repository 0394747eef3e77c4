"""A driver: whom it believes, what it does not survive quietly, how it counts steps, and what it shows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loader.stream.schedule import Lane
from tests.support.rpc_node import running_endpoint
from tests.support.small_store import text_store
from tests.support.training_swarm import free_port
from trainer.errors import LedgerError
from trainer.inner import StepResult, lr_at
from trainer.network.discovery import Announcement, DiscoveryConfig
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.network.rpc import Endpoint, Identity
from trainer.pipeline.driver.balancer import WorkerLoad
from trainer.pipeline.driver.results import AuditStatus, DriverStatus, StageView, StepLoss
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.data import open_session
from trainer.run.node.identity import NodeStats
from trainer.run.node.remembered_peers import RememberedPeers
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.driver_node import DriverNode
from trainer.run.swarm.driver_view import DriverView
from trainer.run.swarm.keeper import keeps_account, read_last_account
from trainer.run.swarm.peer_view import DriverPeerView
from trainer.run.swarm.shape import DRIVER, SwarmShape, shape_of, target_tokens_of

OWN, STRANGE = "a" * 64, "b" * 64


def config_with(**changes: Any) -> RunConfig:
    content = {
        "node_id": "driver-2",
        "data": {"store": str(text_store())},
        "model": {"preset": "tiny"},
        "swarm": {"num_stages": 3},
        "inner": {"warmup_steps": 100, "micro_batch_size": 2, "seq_len": 32},
        "api": {"enabled": False},
    }
    return from_mapping(RunConfig, content | changes)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return config_with()


@pytest.fixture(scope="module")
def shape(config: RunConfig) -> SwarmShape:
    return shape_of(config)


def view_of(config: RunConfig, shape: SwarmShape) -> DriverPeerView:
    endpoint = Endpoint(Identity.create(), config.run_id, config.rpc)
    return DriverPeerView(config, endpoint, shape, NodeStats, lambda _: None)


@pytest.fixture
def view(config: RunConfig, shape: SwarmShape) -> DriverPeerView:
    return view_of(config, shape)


Make = Callable[..., SimpleNamespace]


@pytest.fixture
def make(config: RunConfig, shape: SwarmShape, tmp_path: Path) -> Make:
    """A driver of the run with further options: `node`, what asks it to `stop`, and the steps it has `told`."""

    def driver(**changes: Any) -> SimpleNamespace:
        placed = replace(config, state_dir=str(tmp_path), **changes)
        stop, told = StopRequest(), list[StepResult]()
        line = SimpleNamespace(step=told.append)
        node = DriverNode(placed, shape, open_session(config.data), stop, line)
        return SimpleNamespace(node=node, stop=stop, told=told)

    return driver


def said(shape: SwarmShape, name: str, key: str, stage: str = "", *, fits: bool = True, **report: Any) -> Announcement:
    digest = shape.terms(stage or DRIVER).digest() if fits else "0" * 64
    content = {"uid": str(StageUid(stage, 40)), "incarnation": "1" * 16, "status": "serving"}
    return Announcement(
        peer_id=key * 64,
        node_id=name,
        run_id="r",
        address="127.0.0.1:5",
        terms_digest=digest,
        stage=StageReport.model_validate(content | report) if stage else None,
    )


def workers_of_all(shape: SwarmShape) -> list[Announcement]:
    return [said(shape, stage, key, stage) for stage, key in zip(shape.plan.names, "abc", strict=True)]


def keepers_found(view: DriverPeerView, heard: list[tuple[Announcement, ...]]) -> list[str | None]:
    """First letters of the keys that are taken for the keeper's, one list of announcements after the other."""
    found = []
    for announcements in heard:
        view.hear(announcements)
        keeper = view.keeper_peer()
        found.append(keeper.peer_id[0] if keeper is not None and keeper.peer_id else None)
    return found


def test_who_is_the_keeper_by_name_and_by_key(view, config, shape, caplog):
    stranger = said(shape, "driver-1", "a", fits=False)
    first, second = said(shape, "driver-1", "b"), said(shape, "driver-1", "c")
    heard = [(stranger,), (stranger, first), (second, first), (first, second), (second,), (first, second)]
    assert keepers_found(view, heard) == [None, "b", "b", "b", "c", "c"]
    assert sum("calls itself driver-1 too" in record.message for record in caplog.records) == 2
    ledger = replace(config.swarm.ledger, keeper=STRANGE)
    known = replace(config, swarm=replace(config.swarm, ledger=ledger))
    keeper = said(shape, "another-name", "b")
    strangers = (said(shape, "driver-1", "a"), said(shape, STRANGE, "c"))
    heard = [strangers, (*strangers, keeper), strangers, (keeper,)]
    assert keepers_found(view_of(known, shape), heard) == [None, "b", None, "b"]
    impostor = replace(known, node_id=STRANGE)
    assert not keeps_account(impostor, "c" * 64)
    assert keeps_account(impostor, STRANGE)


def test_a_stranger_is_not_asked_and_named_once(view, shape, caplog):
    stranger = said(shape, "stranger", "b", "tail", fits=False)
    head, *drivers = said(shape, "head", "a", "head"), said(shape, "d-7", "c"), said(shape, "d-8", "d", fits=False)
    view.hear((head, stranger, *drivers))
    assert [it.peer_id for it in view.workers_heard()] == [it.peer.peer_id for it in view.workers()] == [OWN]
    assert [it.uid for it in view.reports()] == ["head.0.40"]
    assert list(view.drivers()) == ["c" * 64]
    for announcements, told in (((stranger,), 1), ((stranger,), 1), ((), 1), ((stranger,), 2)):
        view.hear(announcements)
        assert not view.workers()
        assert sum("gets no work" in record.message for record in caplog.records) == told


def test_a_word_is_as_old_as_the_announcement_not_as_the_look(view: DriverPeerView, shape: SwarmShape) -> None:
    """That an announcement is still passed about proves nothing of who said it."""
    head, words = said(shape, "head", "a", "head"), [view.last_word(OWN)]
    for heard in ((head.stamped(100.0, 60.0),), (head.stamped(100.0, 60.0),), (head.stamped(105.0, 60.0),), ()):
        view.hear(heard)
        words.append(view.last_word(OWN))
    before, first, again, renewed, after = words
    assert before is after is None and first is not None and renewed is not None
    assert (first.incarnation, first.address) == ("1" * 16, "127.0.0.1:5")
    assert again is first and renewed.heard_s > first.heard_s
    assert view.silence_s == 20.0


@pytest.mark.slow
async def test_a_driver_whose_addresses_are_dead_looks_on(config, shape, monkeypatch, caplog):
    monkeypatch.setattr("trainer.run.swarm.peer_view._UNHEARD_S", 0.2)
    looks = iter(range(1000))

    def heard(_others: tuple[Announcement, ...]) -> None:
        if next(looks) == 0:
            raise OSError("no space left for the log")

    dead = f"127.0.0.1:{free_port()}"
    discovery = DiscoveryConfig(initial_peers=(dead,), poll_interval_s=0.1)
    async with running_endpoint(run_id=config.run_id) as endpoint:
        lonely = DriverPeerView(replace(config, discovery=discovery), endpoint, shape, NodeStats, heard)
        await lonely.start()
        try:
            async with asyncio.timeout(30):
                while f"nobody answers at {dead}: no worker of any stage has been heard of" not in caplog.text:
                    await asyncio.sleep(0.05)
        finally:
            await lonely.stop()
    assert "going on with those known before" in caplog.text
    assert next(looks) > 1


async def test_a_driver_keeps_where_the_others_are_for_its_next_start(config, shape, tmp_path):
    own = replace(config, state_dir=str(tmp_path), discovery=DiscoveryConfig(poll_interval_s=0.1))
    async with running_endpoint(run_id=config.run_id) as endpoint, running_endpoint(run_id=config.run_id) as other:
        view = DriverPeerView(own, endpoint, shape, NodeStats, lambda _: None)
        discovery = DiscoveryConfig(initial_peers=(endpoint.address,), poll_interval_s=0.1)
        beside = replace(own, node_id="driver-3", discovery=discovery)
        view.remembered = RememberedPeers.of(own)
        theirs = DriverPeerView(beside, other, shape, NodeStats, lambda _: None)
        await view.start()
        await theirs.start()
        try:
            async with asyncio.timeout(30):
                while not RememberedPeers.of(own).addresses():
                    await asyncio.sleep(0.05)
        finally:
            await theirs.stop()
            await view.stop()
    assert RememberedPeers.of(own).completed(own).discovery.initial_peers == (other.address,)


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("of_keeper", "error"), [(True, LedgerError("full")), (False, ZeroDivisionError())])
async def test_a_driver_ends_with_whatever_cannot_go_on(of_keeper: bool, error: Exception, make: Make) -> None:
    async def broken() -> None:
        raise error

    node = make().node
    node._account._local = SimpleNamespace(failed=broken) if of_keeper else None
    node._look = for_ever if of_keeper else broken
    with pytest.raises(type(error)):
        await asyncio.wait_for(node._drive(SimpleNamespace(run=for_ever)), 20)


class Working:
    """A driver with work until it is told to stop."""

    def __init__(self) -> None:
        self.begun, self.stopped = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.begun.set()
        await self.stopped.wait()

    def stop(self) -> None:
        self.stopped.set()


@pytest.mark.slow
async def test_a_driver_waits_for_a_worker_of_each_stage(make: Make, shape: SwarmShape) -> None:
    node, driver = make().node, Working()
    *some, last = workers_of_all(shape)
    working = asyncio.create_task(node._work(driver))
    await asyncio.sleep(0.05)
    node._peers.hear(tuple(some))
    await asyncio.sleep(0.5)
    assert not driver.begun.is_set()
    node._peers.hear((*some, last))
    await asyncio.wait_for(driver.begun.wait(), 20)
    driver.stop()
    await working


@pytest.mark.slow
async def test_a_driver_that_is_asked_to_stop_waits_for_no_store(make, monkeypatch):
    asked, released, given_up = threading.Event(), threading.Event(), threading.Event()

    def hanging_store(*_: object) -> tuple[Lane, ...]:
        asked.set()
        released.wait(30.0)
        given_up.set()
        return ()

    monkeypatch.setattr("trainer.run.swarm.account_keeping.lanes_of", hanging_store)
    made = make()
    running = asyncio.create_task(made.node.run())
    while not asked.is_set() and not running.done():
        await asyncio.sleep(0.01)
    made.stop.ask()
    await running
    assert not given_up.is_set()
    released.set()


def test_steps_and_their_rate_go_on_where_the_account_is(config: RunConfig, make: Make) -> None:
    made, tokens = make(), target_tokens_of(config)

    # By how much is done in the run, as the keeper says then. The fortieth may be that which is counted there; the
    # keeper is asked every other second only; another driver's are among the last ones.
    for trained, steps in ((0.0, [0, 1]), (40.5, [39, 40]), (41.0, [41]), (55.0, [54])):
        made.node.view._account = (SimpleNamespace(trained_tokens=int(trained * tokens)), time.monotonic())
        for expected in steps:
            made.node._stepped(StepLoss(step=0, loss=2.0, num_tokens=tokens, micro_batches=8))
            assert made.told[-1].step == expected
    assert [result.lr for result in made.told] == [lr_at(result.step, config.inner) for result in made.told]


@pytest.mark.slow
async def test_what_a_keeper_leaves_is_the_account_behind_its_own_settling(tmp_path, monkeypatch):
    """It has leased and the workers it heard of are gone: in the end nothing is held, all is handed back."""
    serving = {"incarnation": "1" * 16, "status": "serving"}
    heard_of = [StageReport(uid=f"{stage}.0.40", **serving) for stage in ("head", "body1", "tail")]
    monkeypatch.setattr("trainer.run.swarm.driver_node.DriverPeerView.reports", lambda _: heard_of)
    monkeypatch.setattr("trainer.run.swarm.driver_node._FIRST_WORKERS_S", 0.0)
    stop, began_at = StopRequest(), time.time() - 1
    config = config_with(
        node_id="driver-1",
        swarm={"num_stages": 3, "driver": {"drain_s": 0.2}},
        rpc={"host": "127.0.0.1", "public_address": "127.0.0.1"},
        state_dir=str(tmp_path),
    )
    line = SimpleNamespace(step=lambda _: None)
    node = DriverNode(config, shape_of(config), open_session(config.data), stop, line)

    running = asyncio.create_task(node.run())
    async with asyncio.timeout(60):
        while (shown := node.view.account()) is None or not shown.micro_batches.leased:
            await asyncio.sleep(0.05)
    stop.ask()
    await running
    account = read_last_account(config, began_at)
    assert account is not None
    assert account.leases == 0
    assert account.waiting == account.micro_batches.open == account.micro_batches.leased > 0


def test_other_threads_are_shown_snapshots_of_workers_of_its_own_run_file(config, shape):
    made_in, peers = threading.get_ident(), view_of(config, shape)
    own = said(shape, "n", "a", "tail", version=7, unsaved_s=63.0, unsaved_because="no space left")
    peers.hear((own, said(shape, "n", "b", "tail", version=900, fits=False)))
    view, banned, silent = DriverView(config, shape, peers), dict[str, float](), dict[str, float]()

    def status() -> DriverStatus:
        assert threading.get_ident() == made_in
        load = WorkerLoad(OWN, runtime_s=0.0, s_per_unit=1.0, proven=True, in_flight=2, num_done=3)
        stage = StageView("tail", (load,), {OWN: "tail.0.40"}, dict(banned), stalled_s=0.0)
        audit = AuditStatus(undecided=(("tail.0.33", "tail.0.40"),))
        return DriverStatus(4, 3, 0, 0, 0, 99, {}, {}, {}, (stage,), audit, silent=dict(silent))

    view.begin(SimpleNamespace(status=status), lambda: None, Endpoint(Identity.create(), config.run_id, config.rpc))
    with ThreadPoolExecutor(1) as api:
        seen = api.submit(view.stages).result()
    assert (seen.in_flight, seen.stages[-1].num_serving, seen.stages[-1].version) == (4, 1, 7)
    (worker,) = seen.stages[-1].workers
    assert (worker.peer_id, worker.in_flight, worker.differs_from) == (OWN, 2, ("tail.0.33",))
    assert (worker.unsaved_s, worker.unsaved_because) == (63.0, "no space left")
    banned[OWN] = 3600.0
    assert view.stages().stages[-1] == seen.stages[-1]
    view.look()
    assert (view.stages().stages[-1].workers[0].banned_for_s, view.stages().stages[-1].num_serving) == (3600.0, 0)
    banned, silent = {}, {OWN: 12.0}
    view.look()
    assert (view.stages().stages[-1].workers[0].silent_s, view.stages().stages[-1].num_serving) == (12.0, 0)
