"""Through real DHT processes on 127.0.0.1 nodes find each other; these start, restart and end, and leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.announcements import announce, announcement, dht_settings, running_dht
from tests.support.waiting import descendants, wait_until_gone
from trainer.errors import DiscoveryError
from trainer.model.config import stage_names
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.base import Discovery
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht import DhtDiscovery
from trainer.network.discovery.dht_client import DhtProcess
from trainer.network.discovery.stage_report import StagePartitions, StageReport
from trainer.network.discovery.static import StaticDiscovery
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import Identity

_WITHIN_S = 40.0
_STAGES = stage_names(4)
_DRIVER = "-"
"""Instead of a worker's name."""


def _on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a coroutine function as a test, without a deadline of its own."""

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return wrapper


@asynccontextmanager
async def _seed(path: Path, *initial_peers: str, **settings: Any) -> AsyncIterator[tuple[DhtProcess, str]]:
    """A DHT process whose identity is in a file, and its address."""
    async with running_dht(*initial_peers, identity_path=str(path), **settings) as process:
        [address] = (await process.status(5.0)).addresses
        yield process, address


def _listen(address: str) -> tuple[str]:
    """Has a seed listen where it did before."""
    return (address.partition("/p2p/")[0],)


@asynccontextmanager
async def _endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1", stop_grace_s=0.1))
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.stop()


@asynccontextmanager
async def _discovery(name: str, *seeds: str, uid: str = "") -> AsyncIterator[DhtDiscovery]:
    """A node; with ``uid`` a worker of a run of four stages that is partitioned by stage."""
    config = DiscoveryConfig(
        initial_peers=seeds,
        dht_host="127.0.0.1",
        announce_interval_s=1.0,
        announcement_lifetime_s=8.0,
        poll_interval_s=0.3,
        request_timeout_s=5.0,
    )
    async with _endpoint() as endpoint:
        discovery = DhtDiscovery(endpoint, config, StagePartitions(_STAGES) if uid else StagePartitions())
        try:
            await discovery.start()
            await discovery.announce(_said(endpoint, name, uid))
            yield discovery
        finally:
            await discovery.close()


def _said(endpoint: Endpoint, name: str, uid: str) -> Announcement:
    certificate = (endpoint.certificate or b"").decode()
    stage = StageReport(uid=uid, incarnation="0" * 16, status="serving") if uid not in ("", _DRIVER) else None
    return announcement(
        endpoint.identity, node_id=name, address=endpoint.address, certificate_pem=certificate, stage=stage
    )


async def _until_known(discovery: Discovery, *names: str) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while (found := {said.node_id for said in await discovery.peers()}) != set(names):
        assert time.monotonic() < deadline, f"expected {names} to be known, found {found}"
        await asyncio.sleep(0.1)


async def _until_joined(process: DhtProcess, num_neighbours: int = 1) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while (await process.status(5.0)).num_neighbours < num_neighbours:
        assert time.monotonic() < deadline, "expected the nodes to join each other"
        await asyncio.sleep(0.1)


@pytest.mark.slow
@_on_a_loop
async def test_records_are_filed_and_found_and_false_ones_are_not(tmp_path: Path) -> None:
    """What every node of the DHT, seeds included, refuses to store."""
    async with _seed(tmp_path / "seed.id") as (seed, address), running_dht(address) as node:
        await _until_joined(node)
        me, other = Identity.create(), Identity.create()
        now = time.time()
        expires_at = now + 60
        true = announce(me, sent_at=now).decode()
        await node.store("run.peers", me.peer_id, true, expires_at, 5.0)
        for key, subkey, value, until in (
            ("run.peers", other.peer_id, true, expires_at),  # Under another's id.
            ("other.peers", me.peer_id, true, expires_at),  # For another run.
            ("anything", "x", "y", expires_at),  # Storage for strangers.
            ("run.head.0", me.peer_id, true, expires_at),  # Among the workers of a stage.
            ("run.peers", me.peer_id, true.replace(":4100", ":4101"), expires_at),  # Altered.
            ("run.peers", me.peer_id, true, expires_at + 600),  # Made to last.
            ("run.peers", me.peer_id, announce(me, sent_at=now, lifetime_s=4000.0).decode(), now + 4000),
        ):
            with pytest.raises(DiscoveryError, match="no DHT node took the record"):
                await node.store(key, subkey, value, until, 5.0)
        for process in (node, seed):
            records, skipped = await process.get("run.peers", 5.0)
            assert [(record.subkey, record.value) for record in records] == [(me.peer_id, true)]
            assert skipped == 0
        assert await seed.get("other.peers", 5.0) == ((), 0)


@pytest.mark.long
@_on_a_loop
async def test_workers_of_a_stage_are_found_without_the_others(tmp_path: Path) -> None:
    """Two seeds, one of them down from the start, the other killed and started again later."""
    async with _seed(tmp_path / "a.id") as (_, address_a):
        pass
    async with _seed(tmp_path / "b.id") as (b, address_b):
        seeds = (address_a, address_b)
        async with (
            _discovery("head", *seeds, uid="head.0.42") as head,
            _discovery("body", *seeds, uid="body2.0.55"),
            _discovery("driver", *seeds, uid=_DRIVER) as driver,
        ):
            await _until_known(driver, "head", "body")
            await _until_known(head, "driver", "body")
            records, _ = await b.get("run.head.0", 5.0)
            assert ['"uid":"head.0.42"' in record.value for record in records] == [True]
            records, _ = await b.get("run.peers", 5.0)
            assert ['"node_id":"driver"' in record.value for record in records] == [True]

            head.look_for(["head"])
            driver.look_for(["body-2"])
            await _until_known(head, "driver")
            await _until_known(driver, "body")
            with mock.patch.object(head.process, "get", wraps=head.process.get) as get:
                await asyncio.sleep(1.0)
            assert {call.args[0] for call in get.call_args_list} == {"run.peers", "run.head.0"}
            with pytest.raises(DiscoveryError, match="expected one of the run's stages"):
                head.look_for(["body-7"])

            await b.close()  # No seed is left; who knows each other goes on.
            await asyncio.sleep(1.0)
            await _until_known(driver, "body")
            async with _seed(tmp_path / "a.id", address_b, listen=_listen(address_a)) as (_, address_again):
                assert address_again == address_a
                async with _discovery("late", *seeds, uid="body2.0.56") as late:
                    late.look_for(["body-2"])
                    await _until_known(late, "driver", "body")
                    await _until_known(driver, "body", "late")
                await _until_known(driver, "body")


@pytest.mark.slow
@_on_a_loop
async def test_a_node_that_knows_another_and_no_seed_finds_all_and_is_found_by_all(tmp_path: Path) -> None:
    """The newcomer knows the body's address; head and driver cannot be asked, and hear of it through the DHT."""
    async with (
        _seed(tmp_path / "seed.id") as (_, address),
        _endpoint() as new,
        _discovery("head", address, uid="head.0.42") as head,
        _discovery("driver", address, uid=_DRIVER) as driver,
        _discovery("body", address, uid="body2.0.55") as body,
    ):
        await _until_known(body, "head", "driver")
        newcomer = StaticDiscovery(new, [body._endpoint.address], DiscoveryConfig(poll_interval_s=0.2))
        try:
            await newcomer.start()
            await newcomer.announce(_said(new, "new", "tail.0.7"))
            await _until_known(newcomer, "head", "driver", "body")
            await _until_known(head, "driver", "body", "new")
            await _until_known(driver, "head", "body", "new")
            head.look_for(["head"])  # It is filed with those that hold no stage, and is a worker all the same.
            await _until_known(head, "driver")
        finally:
            await newcomer.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@_on_a_loop
async def test_a_flood_of_announcements_hides_nobody(tmp_path: Path) -> None:
    """More than an answer to a look-up can carry, good for an hour; a node that was there, and one that comes then."""
    seconds, count = 3000.0, 400
    members = tuple(f"{number:064x}" for number in range(64))
    shards = tuple(range(10**15, 10**15 + 256))
    long = {"certificate_pem": "x" * 4096, "last_round_members": members, "shards": shards}
    async with (
        _seed(tmp_path / "seed.id") as (_, address),
        _discovery("before", address) as before,
        _discovery("looker", address) as looker,
    ):
        await _until_known(looker, "before")
        await asyncio.sleep(2.5)  # It has renewed its announcement.
        async with running_dht(address) as attacker:
            await _until_joined(attacker)

            async def file(number: int) -> None:
                sybil, now = Identity.create(), time.time()
                fields = {"node_id": f"sybil {number}", "address": f"127.0.0.1:{20_000 + number}", **long}
                wire = announce(sybil, sent_at=now, lifetime_s=seconds, **fields).decode()
                with contextlib.suppress(DiscoveryError):
                    await attacker.store("run.peers", sybil.peer_id, wire, now + seconds, 20.0)

            for start in range(0, count, 50):
                await asyncio.gather(*map(file, range(start, start + 50)))
            async with _discovery("after", address) as after:
                await _until_known(looker, "before", "after")
                await _until_known(after, "before", "looker")
                await _until_known(before, "looker", "after")


@pytest.mark.slow
@_on_a_loop
async def test_without_a_seed_a_node_looks_on_says_so_and_ends_in_order(tmp_path, caplog) -> None:
    """The seed is away, comes, and goes again; what the node's process logs as an error comes out as one here."""
    caplog.set_level(logging.WARNING, "trainer.network.discovery")
    async with _seed(tmp_path / "seed.id") as (_, address):
        pass
    async with running_dht(address, refresh_interval_s=0.1) as node, _discovery("alone", address) as alone:
        await asyncio.sleep(1.0)  # Several of its looks, with nobody to ask.
        assert alone.no_peers_reason() == f"nobody answers at {address}"
        async with _seed(tmp_path / "seed.id", listen=_listen(address)):
            await _until_joined(node)
            async with asyncio.timeout(_WITHIN_S):
                while alone.no_peers_reason() != f"the DHT of {address} knows nobody of run run":
                    await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("trainer.")] == []


_ROOT = Path(__file__).parents[4]
_START_S = 60.0


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="g-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@contextmanager
def _started(*arguments: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


def _family(pid: int | None) -> set[int]:
    """A DHT process and its Go daemon."""
    assert pid is not None
    family = {pid, *descendants(pid)}
    assert len(family) == 2
    return family


@pytest.mark.slow
@_on_a_loop
async def test_a_process_that_is_killed_or_hangs_is_started_again_and_leaves_nothing(monkeypatch, short_folder) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    async with running_dht() as process:
        family = _family(first := process.pid)
        os.kill(first, signal.SIGKILL)
        await asyncio.to_thread(wait_until_gone, family)
        with pytest.raises(DiscoveryError):
            await process.get("run.peers", 1.0)
        await process.wait_ready(_START_S)
        assert process.pid != first
        assert process.num_restarts == 1
        assert await process.get("run.peers", 5.0) == ((), 0)
        family = _family(second := process.pid)
        # One that hangs is killed and started again after three unanswered requests.
        os.kill(second, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(DiscoveryError, match=r"within 0\.1 s"):
                await process.get("run.peers", 0.1)
        await asyncio.to_thread(wait_until_gone, family)
        await process.wait_ready(_START_S)
    assert list(short_folder.iterdir()) == []


_PARENT = """
import asyncio, json, os, sys
from tests.support.announcements import dht_settings
from trainer.network.discovery.dht_client import DhtProcess

async def main():
    process = DhtProcess(dht_settings())
    process.start()
    await process.wait_ready(60)
    if os.fork() == 0:  # Holds a copy of the pipe open.
        import time
        time.sleep(600)
    print(json.dumps(process.pid), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
def test_no_orphans_when_the_parent_is_killed(short_folder: Path) -> None:
    family: set[int] = set()
    others: set[int] = set()
    with _started("-c", _PARENT, env={**os.environ, "TMPDIR": str(short_folder)}) as parent:
        try:
            family = _family(json.loads(parent.stdout.readline()))
            assert list(short_folder.iterdir())
            others = descendants(parent.pid) - family
            parent.kill()
            parent.wait(10)
            wait_until_gone(family)
            assert list(short_folder.iterdir()) == []
            assert others  # The fork that held the pipe was alive meanwhile.
        finally:
            for pid in family | others | descendants(parent.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_both_killed_at_once_leave_no_daemon(short_folder: Path) -> None:
    settings = dht_settings(socket_folder=str(short_folder))
    with _started("-m", "trainer.network.discovery.dht_node", stderr=subprocess.DEVNULL) as process:
        process.stdin.write(settings.model_dump_json() + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 0
        family = _family(process.pid)
        process.kill()
        process.wait(10)
        wait_until_gone(family)


@pytest.mark.slow
@_on_a_loop
async def test_it_does_not_start_where_a_port_is_taken_and_says_so() -> None:
    """The Go daemon would share the port, and answer every other connection."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = (f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}",)
        async with running_dht(ready_s=0, listen=listen) as process:
            with pytest.raises(DiscoveryError, match=r"to be ready .*127\.0\.0\.1:\d+ is taken"):
                await process.wait_ready(_START_S, first_start_only=True)


_SEED_PROGRAM = """
import sys
from trainer.network.discovery import SeedConfig, seed

config = SeedConfig(host="127.0.0.1", port=int(sys.argv[1]), identity_path=sys.argv[2])
seed(config, lambda found: print(*found, flush=True))
print("ended", flush=True)
"""


def _run_seed(port: int, identity: Path, number: int) -> str:
    """Runs a seed until it is stopped by a signal; its address."""
    with _started("-c", _SEED_PROGRAM, str(port), str(identity)) as process:
        address = process.stdout.readline().strip()
        family = descendants(process.pid)
        assert len(family) == 2
        process.send_signal(number)
        assert process.stdout.readline().strip() == "ended"
        assert process.wait(20) == 0
        wait_until_gone(family)
        return address


@pytest.mark.slow
def test_a_seeds_address_survives_a_restart(tmp_path: Path) -> None:
    identity = tmp_path / "new folder" / "seed.id"
    address = _run_seed(0, identity, signal.SIGTERM)
    assert address.startswith("/ip4/127.0.0.1/tcp/") and "/p2p/" in address
    assert identity.stat().st_mode & 0o077 == 0
    assert [path.name for path in identity.parent.iterdir()] == ["seed.id"]
    port = int(address.split("/")[4])
    assert _run_seed(port, identity, signal.SIGINT) == address


async def test_a_full_disk_at_the_start_delays_the_process_and_does_not_end_it(monkeypatch, caplog) -> None:
    full_disk = mock.Mock(side_effect=FileNotFoundError(2, "No usable temporary directory found"))
    monkeypatch.setattr("tempfile.gettempdir", full_disk)
    monkeypatch.setattr("trainer.network.discovery.dht_client._FIRST_PAUSE_S", 0.01)
    async with running_dht(ready_s=0), asyncio.timeout(20.0):
        while full_disk.call_count < 3:
            await asyncio.sleep(0.01)
    assert "cannot be started: [Errno 2] No usable temporary directory found" in caplog.text
