"""More TLS connections than a node accepts, which say nothing: 1,200 at each of two nodes, opened anew when closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys

from tests.support.attacks import Target
from tests.support.raw_http2 import any_certificate

__all__ = ["attack"]

_CONNECTIONS_PER_NODE = 1200
_VICTIMS = ("head.1", "driver-1")
_AT_ONCE = 8


async def attack(target: Target) -> None:
    """Keeps as many connections as it gets."""
    context = any_certificate()
    opened: list[asyncio.StreamWriter] = []
    counts = {"opened": 0, "refused": 0, "most_held": 0}
    victims = [name for name in target.addresses if name in _VICTIMS] or list(target.addresses)[:2]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(target.seconds), asyncio.TaskGroup() as tasks:
                for name in victims:
                    for _ in range(_AT_ONCE):
                        tasks.create_task(_keep_opening(target, name, context, opened, counts))
    finally:
        for writer in opened:
            writer.transport.abort()
    sys.stdout.write(json.dumps(counts) + "\n")


async def _keep_opening(
    target: Target, name: str, context: ssl.SSLContext, opened: list[asyncio.StreamWriter], counts: dict[str, int]
) -> None:
    host, _, port = target.addresses[name].rpartition(":")
    own: list[asyncio.StreamWriter] = []
    while True:
        own = [writer for writer in own if not writer.transport.is_closing()]
        if len(own) >= _CONNECTIONS_PER_NODE // _AT_ONCE:
            await asyncio.sleep(0.1)
            continue
        try:
            connecting = asyncio.open_connection(host, int(port), ssl=context, local_addr=(target.source_host, 0))
            _, writer = await connecting
        except OSError:
            counts["refused"] += 1
            await asyncio.sleep(0.05)
            continue
        own.append(writer)
        opened.append(writer)
        counts["opened"] += 1
        counts["most_held"] = max(counts["most_held"], sum(not it.transport.is_closing() for it in opened))
