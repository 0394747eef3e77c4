"""DHT processes and seeds start, restart and end, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.dht_processes import descendants, dht_settings, running_dht, wait_until_gone
from trainer.errors import DiscoveryError
from trainer.network.discovery.dht_client import DhtProcess

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
def test_a_process_that_is_killed_or_hangs_is_started_again_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    async def scenario() -> None:
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

    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    asyncio.run(scenario())
    assert list(short_folder.iterdir()) == []


_PARENT = """
import asyncio, json, os, sys
from tests.support.dht_processes import dht_settings
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
def test_it_does_not_start_where_a_port_is_taken_and_says_so() -> None:
    """The Go daemon would share the port, and answer every other connection."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            listen = (f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}",)
            async with running_dht(ready_s=0, listen=listen) as process:
                with pytest.raises(DiscoveryError, match=r"to be ready .*127\.0\.0\.1:\d+ is taken"):
                    await process.wait_ready(_START_S, first_start_only=True)

    asyncio.run(scenario())


_SEED = """
import sys
from trainer.network.discovery import SeedConfig, seed

config = SeedConfig(host="127.0.0.1", port=int(sys.argv[1]), identity_path=sys.argv[2])
seed(config, lambda found: print(*found, flush=True))
print("ended", flush=True)
"""


def _run_seed(port: int, identity: Path, number: int) -> str:
    """Runs a seed until it is stopped by a signal; its address."""
    with _started("-c", _SEED, str(port), str(identity)) as process:
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


def test_a_full_disk_at_the_start_delays_the_process_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = DhtProcess(dht_settings())
    attempts = 0

    def full_disk() -> str:
        nonlocal attempts
        attempts += 1
        raise FileNotFoundError(2, "No usable temporary directory found")

    async def scenario() -> None:
        monkeypatch.setattr("tempfile.gettempdir", full_disk)
        monkeypatch.setattr("trainer.network.discovery.dht_client._FIRST_PAUSE_S", 0.01)
        process.start()
        async with asyncio.timeout(20.0):
            while attempts < 3:
                await asyncio.sleep(0.01)
        await process.close()

    asyncio.run(scenario())
    assert "cannot be started: [Errno 2] No usable temporary directory found" in caplog.text
