"""Signed announcements of made-up nodes, and real DHT processes on 127.0.0.1."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from trainer.network.discovery.announcement import Announcement, sign_announcement
from trainer.network.discovery.dht_client import DhtProcess, DhtSettings
from trainer.network.rpc.identity import Identity


def announcement(identity: Identity, **fields: object) -> Announcement:
    content = {"peer_id": identity.peer_id, "node_id": "node", "run_id": "run", "address": "127.0.0.1:4100"}
    return Announcement.model_validate(content | fields)


def announce(identity: Identity, *, lifetime_s: float = 60.0, sent_at: float | None = None, **fields: object) -> bytes:
    stamped = announcement(identity, **fields).stamped(time.time() if sent_at is None else sent_at, lifetime_s)
    return sign_announcement(stamped, identity)


def dht_settings(*initial_peers: str, **settings: Any) -> DhtSettings:
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
