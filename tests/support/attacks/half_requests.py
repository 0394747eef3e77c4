"""Half of an HTTP request on each of 200 connections to every API, opened anew when they are closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from tests.support.attacks import Target

__all__ = ["attack"]

_CONNECTIONS_PER_API = 200
_HALF = b"GET /api/training/global HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


async def attack(target: Target) -> None:
    """Holds what connections it can; and asks itself, as an operator would, how long the API takes to answer."""
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
