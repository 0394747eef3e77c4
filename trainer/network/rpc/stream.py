"""Streams: frames in both directions over one call, in order, with backpressure.

A side that hears neither frame nor heartbeat for ``stall_timeout_s`` gives up. Silence is judged only while this side
reads, so a peer is not called dead because this node leaves its frames unread; gRPC's pings and the call's deadline
notice the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from typing_extensions import Buffer

from trainer.errors import PeerUnavailableError, RpcError
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES, RpcConfig
from trainer.network.rpc.envelope import peer_boundary
from trainer.network.rpc.limits import ByteBudget, Share
from trainer.network.rpc.messages import Frame
from trainer.network.rpc.wire import RpcCall, end_task


class Stream:
    """One end of a stream; `send` and `receive` may be awaited concurrently, on the endpoint's event loop.

    Nothing else may read from ``call``. The bytes of frames that wait, read ahead and checked, count for ``share`` in
    ``budget``.
    """

    def __init__(
        self, call: RpcCall, config: RpcConfig, share: Share, budget: ByteBudget, silence_s: float | None = None
    ) -> None:
        self._call = call
        self._silence_s = config.stall_timeout_s if silence_s is None else silence_s
        self._share = share
        self._max_frames = config.max_queued_frames
        self._budget = budget
        self._waiting: deque[tuple[Frame, int]] = deque()
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended = False
        self._pump: asyncio.Task[None] | None = None
        self.error: RpcError | None = None  # Why nothing more can be read, if that is so.

    async def send(self, index: int, payload: Buffer) -> None:
        """Sends a frame after those sent before; waits until the connection has taken the one before.

        ``index`` is the sender's own number for it, in [0, 2**53). The payload, at most the method's
        ``max_payload_bytes``, may be changed once this returns.

        Raises PeerUnavailableError where the peer died, fell silent or has finished, RefusedError where it refused the
        stream or a frame, TrainerUsageError after `end` or for a payload larger than a frame may be.
        """
        await self._call.send("data", index=index, payload=payload)

    async def end(self) -> None:
        """Says that no more frames come, with the errors of `send`; further calls do nothing."""
        await self._call.end()

    async def receive(self) -> Frame | None:
        """Returns the next frame, or None after the other side's `end`. May be cancelled without losing a frame.

        Raises PeerUnavailableError where the peer died, fell silent or stopped without `end`, RefusedError where it
        refused the stream or, in a handler, where a frame of the caller was refused.
        """
        while True:
            if self._waiting:
                frame, size_bytes = self._waiting.popleft()
                self._budget.give(self._share, size_bytes)
                self._taken.set()
                return frame
            if self._ended:
                return None
            if self.error is not None:
                raise self.error
            self._arrived.clear()
            await self._arrived.wait()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Stream]:
        """Reads frames ahead, for the endpoint; drops those not taken at the end of the block."""
        self._pump = asyncio.create_task(self._read_frames(), name="genesis-rpc-read")
        try:
            yield self
        finally:
            await end_task(self._pump)
            self._fail(PeerUnavailableError(f"{self._call.who}: this side closed the stream"))
            while self._waiting:
                _, size_bytes = self._waiting.popleft()
                self._budget.give(self._share, size_bytes)

    async def finish(self) -> None:
        """Waits, where both sides have sent their end, until the other side has finished in good order."""
        if self._pump is None or not (self._call.ended and self._ended):
            return
        await asyncio.wait({self._pump})
        if self.error is not None:
            raise self.error

    async def _read_frames(self) -> None:
        """Verifies a frame while the next one comes in."""
        reading = self._begin_reading()
        try:
            while (raw := await reading) is not None:
                await self._wait_for_room()
                reading = self._begin_reading()
                await asyncio.sleep(0)  # So that it is under way while this frame is verified.
                with peer_boundary(self._call.who):
                    frame = self._call.open(raw)
                if frame is None:
                    continue
                if frame.header.kind == "end":
                    self._ended = True
                else:
                    self._waiting.append((Frame(frame.header.index, frame.payload), len(raw)))
                    self._budget.take(self._share, len(raw))
                self._arrived.set()
            if not self._ended:
                raise PeerUnavailableError(f"{self._call.who} stopped before the end of the stream")
        except RpcError as error:
            self._fail(error)
        finally:
            await end_task(reading)

    def _begin_reading(self) -> asyncio.Task[bytes | None]:
        return asyncio.create_task(self._call.read_within(self._silence_s), name="genesis-rpc-read")

    async def _wait_for_room(self) -> None:
        """Waits while the queue is full; an empty one may always take a frame, so that no stream waits for another."""
        while self._waiting and not (
            len(self._waiting) < self._max_frames and self._budget.has_room(self._share, MAX_PAYLOAD_BYTES)
        ):
            self._taken.clear()
            await self._taken.wait()

    def _fail(self, error: RpcError) -> None:
        if self.error is None:
            self.error = error
        self._call.fail(error)
        self._arrived.set()


ServerStream = Stream  # The handler's end; it ends by itself when the handler returns.
