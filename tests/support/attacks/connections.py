"""Attacks that hold what a node has few of: connections, requests, calls; opened anew when they are closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
from pathlib import Path

from tests.support.attacks import Target
from tests.support.hostile_caller import any_certificate, no_window_connection
from trainer.network.discovery.exchange import EXCHANGE_METHOD
from trainer.network.rpc import Identity
from trainer.run.config import read_yaml

_CONNECTIONS_PER_API = 200
_HALF = b"GET /api/training/global HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
_IDLE_PER_NODE, _AT_ONCE = 1200, 8
_VICTIMS = ("head.1", "driver-1")
_WINDOWLESS_PER_NODE, _CALLS_PER_CONNECTION = 9, 32


async def half_requests(target: Target) -> None:
    """Half of an HTTP request on each of 200 connections to every API; an operator asks how long an answer takes."""
    asked: list[float] = []
    counts = {"opened": 0, "answered": 0, "unanswered": 0}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(target.seconds), asyncio.TaskGroup() as tasks:
            for url in target.apis.values():
                host, _, port = url.removeprefix("http://").rpartition(":")
                for _ in range(_CONNECTIONS_PER_API):
                    tasks.create_task(_half(target, host, int(port), counts))
                tasks.create_task(_operator(host, int(port), counts, asked))
    slowest_s = round(max(asked, default=0.0), 3)
    sys.stdout.write(json.dumps({**counts, "slowest_answer_s": slowest_s}) + "\n")
    if counts["unanswered"] > counts["answered"]:
        sys.exit(f"the API answered {counts['answered']} of {counts['answered'] + counts['unanswered']} requests")


async def _half(target: Target, host: str, port: int, counts: dict[str, int]) -> None:
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port, local_addr=(target.source_host, 0))
            counts["opened"] += 1
            try:
                writer.write(_HALF)
                while not reader.at_eof():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await reader.read(4096)
                    writer.write(b"x")
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.5)


async def _operator(host: str, port: int, counts: dict[str, int], asked: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(1.0)
        begun_s = loop.time()
        answer = b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(10.0):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                    answer = await reader.read(64)
                finally:
                    writer.transport.abort()
        counts["answered" if answer.startswith(b"HTTP/1.1 200") else "unanswered"] += 1
        asked.append(loop.time() - begun_s)


async def idle_connections(target: Target) -> None:
    """More TLS connections than a node accepts, which say nothing: 1,200 at each of two nodes."""
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
        if len(own) >= _IDLE_PER_NODE // _AT_ONCE:
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


async def no_window(target: Target) -> None:
    """Calls whose answers cannot be sent: each connection grants no HTTP/2 window, each identity makes 32 calls."""
    run_id = str(read_yaml(Path(target.run_file))["run_id"])
    counts = {"connections": 0, "calls": 0, "refused": 0}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(target.seconds), asyncio.TaskGroup() as tasks:
            for name in target.addresses:
                for _ in range(_WINDOWLESS_PER_NODE):
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
