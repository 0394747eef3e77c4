"""Real DHT processes on 127.0.0.1, and which processes are below another."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from trainer.network.discovery.dht_client import DhtProcess, DhtSettings


def dht_settings(*initial_peers: str, **settings: Any) -> DhtSettings:
    """Of a node that listens on any port of 127.0.0.1."""
    own = {"parent_pid": os.getpid(), "listen": ("/ip4/127.0.0.1/tcp/0",), "map_port": False, "rejoin_interval_s": 0.5}
    return DhtSettings(initial_peers=initial_peers, **(own | settings))


@asynccontextmanager
async def running_dht(*initial_peers: str, ready_s: float = 60.0, **settings: Any) -> AsyncIterator[DhtProcess]:
    """A process; it is waited for unless ``ready_s`` is 0."""
    process = DhtProcess(dht_settings(*initial_peers, **settings))
    process.start()
    try:
        if ready_s:
            await process.wait_ready(ready_s)
        yield process
    finally:
        await process.close()


def descendants(pid: int) -> set[int]:
    """All processes below ``pid``, by the kernel's list."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def wait_until_gone(pids: set[int], timeout_s: float = 20.0) -> None:
    """Until none of them runs any more (a zombie does not)."""
    deadline = time.monotonic() + timeout_s
    while left := {pid for pid in pids if _runs(pid)}:
        if time.monotonic() > deadline:
            raise AssertionError(f"expected the processes {sorted(left)} to have ended")
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
