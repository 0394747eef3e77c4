"""Two joined connections: bytes from each to the other, paced, until both have ended or nothing moves any more.

A side that reads slowly holds the other back (asyncio's flow control): in each direction at most 2 `COPY_BYTES` wait to
be read, one is on its way, and one is written ahead. So a connection takes at most half a MiB, however much is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from trainer.network.relay.protocol import COPY_BYTES, end

IDLE_S: Final = 900.0
"""Seconds without a byte in either direction after which a carried connection is ended; gRPC's pings come each 10 s."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Pay = Callable[[int, bool], Awaitable[None]]
"""Waits until so many bytes may be passed on; whether they come from the first of the two."""


@dataclass(slots=True)
class FairShares:
    """A bandwidth shared evenly by those that use it, whatever number of connections each has; 0: no bound.

    Who has passed nothing on for a second counts as not using it, so one that is alone has all of it.
    """

    bytes_per_s: float
    clock: Callable[[], float] = time.monotonic
    _free_at_s: dict[str, float] = field(default_factory=dict)  # By user: when its next byte may go.

    def owed_s(self, user: str, size_bytes: int) -> float:
        """Charges ``user`` for bytes; returns the seconds that it has to wait before it passes them on."""
        if not self.bytes_per_s:
            return 0.0
        now_s = self.clock()
        self._free_at_s = {name: at_s for name, at_s in self._free_at_s.items() if at_s > now_s - 1.0}
        begins_s = max(now_s, self._free_at_s.get(user, 0.0))
        num_users = len(self._free_at_s.keys() | {user})
        self._free_at_s[user] = begins_s + size_bytes * num_users / self.bytes_per_s
        return begins_s - now_s


async def carry(one: Streams, other: Streams, pay: Pay, idle_s: float = IDLE_S) -> None:
    """Passes bytes on both ways until both sides have ended, or one breaks off; closes both, and raises nothing."""
    moved_at_s = time.monotonic()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_from_one: bool) -> None:
        nonlocal moved_at_s
        while data := await reader.read(COPY_BYTES):
            moved_at_s = time.monotonic()
            await pay(len(data), is_from_one)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def watch() -> None:
        while (left_s := moved_at_s + idle_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)

    is_whole = False
    copies = [
        asyncio.create_task(copy(one[0], other[1], True)),
        asyncio.create_task(copy(other[0], one[1], False)),
    ]
    watching = asyncio.create_task(watch())
    try:
        pending: set[asyncio.Task[None]] = set(copies)
        while pending and not watching.done():
            done, rest = await asyncio.wait({*pending, watching}, return_when=asyncio.FIRST_COMPLETED)
            pending = rest - {watching}
            if any(not it.cancelled() and it.exception() is not None for it in done):
                break
        is_whole = not pending and all(it.exception() is None for it in copies)
    finally:
        for task in (*copies, watching):
            task.cancel()
        for _, writer in (one, other):  # Before anything is awaited, which may be broken off.
            if is_whole:
                writer.close()
            else:
                writer.transport.abort()
        await asyncio.gather(*copies, watching, return_exceptions=True)
        for _, writer in (one, other):
            await end(writer, at_once=not is_whole)
