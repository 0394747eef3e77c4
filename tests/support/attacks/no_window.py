"""Calls whose answers cannot be sent: each connection grants no HTTP/2 window, each identity makes 32 calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from tests.support.attacks import Target
from tests.support.raw_http2 import no_window_connection
from trainer.network.discovery.exchange import EXCHANGE_METHOD
from trainer.network.rpc import Identity
from trainer.run.config import read_yaml

__all__ = ["attack"]

_CONNECTIONS_PER_NODE = 9
_CALLS_PER_CONNECTION = 32


async def attack(target: Target) -> None:
    """Holds as many calls at every node as it can, and takes what is freed at once."""
    run_id = str(read_yaml(Path(target.run_file))["run_id"])
    counts = {"connections": 0, "calls": 0, "refused": 0}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(target.seconds), asyncio.TaskGroup() as tasks:
            for name in target.addresses:
                for _ in range(_CONNECTIONS_PER_NODE):
                    tasks.create_task(_hold(target, name, run_id, counts))
    sys.stdout.write(json.dumps(counts) + "\n")


async def _hold(target: Target, name: str, run_id: str, counts: dict[str, int]) -> None:
    while True:
        with contextlib.suppress(OSError):
            connecting = no_window_connection(target.peer(name), run_id, tls=True, source_host=target.source_host)
            async with connecting as connection:
                counts["connections"] += 1
                identity = Identity.create()
                for _ in range(_CALLS_PER_CONNECTION):
                    connection.call(EXCHANGE_METHOD, {"own_bytes": 0}, identity=identity)
                    counts["calls"] += 1
                while not connection.is_closed:
                    await asyncio.sleep(0.2)
                    # What was refused is tried again, so that nothing that gets free stays free.
                    while connection.num_ended:
                        connection.num_ended -= 1
                        counts["refused"] += 1
                        connection.call(EXCHANGE_METHOD, {"own_bytes": 0}, identity=identity)
        await asyncio.sleep(0.2)
