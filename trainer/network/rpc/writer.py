"""One write in flight on a wire, as gRPC demands, and heartbeats while there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from trainer.errors import RpcError
from trainer.network.rpc.envelope import HEARTBEAT
from trainer.network.rpc.failure import Failure
from trainer.network.rpc.wire import Wire

__all__ = ["FrameWriter", "end_task"]

_CUT_WITHIN_S = 1.0
"""GRPC notices that a connection has ended as soon as its threads get to run."""


class FrameWriter:
    """Writes in a task of its own, so that who waits for it can give up without breaking off a frame."""

    def __init__(self, wire: Wire, failure: Failure) -> None:
        self._wire = wire
        self._failure = failure
        self._write: asyncio.Task[None] | None = None
        self._begun_at = 0.0
        self._beat: asyncio.Task[None] | None = None

    @property
    def stalled_since(self) -> float | None:
        """Since when a write has been on its way (the event loop's clock); None: nothing is."""
        return None if self._write is None or self._write.done() else self._begun_at

    def start_heartbeats(self, heartbeat_s: float) -> None:
        """From now on nothing is ever silent for longer than ``heartbeat_s``, unless the other side takes nothing."""
        self._begun_at = asyncio.get_running_loop().time()
        self._beat = asyncio.create_task(self._send_heartbeats(heartbeat_s), name="genesis-rpc-heartbeats")

    async def settle(self) -> None:
        """Waits until nothing is on its way.

        Raises:
            RpcError: what went wrong with the exchange meanwhile or before.
        """
        while self._write is not None and not self._write.done() and self._failure.error is None:
            await self._failure.race(self._write)
        self._failure.raise_if_set()

    def begin(self, raw: bytes) -> None:
        """Sets a frame on its way; nothing else may be (no await since `settle`)."""
        self._begun_at = asyncio.get_running_loop().time()
        self._write = asyncio.create_task(self._write_out(raw), name="genesis-rpc-write")

    async def close(self, patience_s: float, cut: Callable[[], object] | None = None) -> None:
        """Stops the heartbeats, and lets a write that is in flight come to its end.

        It must not be broken off: gRPC's server cannot send the status of a call while one is in flight, and would
        leave the call open. It ends when the other side reads, cancels the call, or is found dead by gRPC's pings.

        Args:
            patience_s: how long it may take.
            cut: ends the connection of a side that has taken nothing for so long; the write ends with it.
        """
        try:
            await end_task(self._beat)
            if self._write is not None and not self._write.done():
                await asyncio.wait({self._write}, timeout=patience_s)
            if self._write is not None and not self._write.done() and cut is not None:
                cut()
                await asyncio.wait({self._write}, timeout=_CUT_WITHIN_S)
        finally:
            if self._write is not None:  # Who is cancelled while it waits here has no call any more to keep in order.
                self._write.cancel()
        await end_task(self._write)

    async def _write_out(self, raw: bytes) -> None:
        try:
            await self._wire.write(raw)
        except RpcError as error:
            self._failure.set(error)

    async def _send_heartbeats(self, heartbeat_s: float) -> None:
        loop = asyncio.get_running_loop()
        while self._failure.error is None:
            await asyncio.sleep(max(self._begun_at + heartbeat_s - loop.time(), heartbeat_s / 8))
            idle = self._write is None or self._write.done()
            if idle and loop.time() - self._begun_at >= heartbeat_s:
                self.begin(HEARTBEAT)


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task and waits for it; its error is nobody's concern any more."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
