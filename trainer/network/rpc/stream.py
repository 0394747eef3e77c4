"""Frames in both directions over one call: in order, with backpressure and heartbeats.

`Stream.send` returns once the connection has taken the frame before, so that hashing a frame overlaps with sending the
one before. `FrameWriter` keeps one write in flight, as gRPC demands. `Stream.receive` takes from at most
``max_queued_frames`` frames that were read ahead and checked.

A side that has nothing to send sends heartbeats; one that hears nothing for ``stall_timeout_s`` gives up. Silence is
judged only while this side reads, so a peer is not called dead because this node leaves its frames unread. gRPC's pings
and the deadline of the call notice the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel
from typing_extensions import Buffer

from trainer.errors import PeerUnavailableError, RpcError, TrainerUsageError
from trainer.network.rpc.boundary import peer_boundary
from trainer.network.rpc.call import FrameKind, RpcCall
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.network.rpc.envelope import HEARTBEAT, SealedFrame
from trainer.network.rpc.limits import ByteBudget
from trainer.network.rpc.messages import Frame
from trainer.network.rpc.standing import Share
from trainer.network.rpc.wire import PeerFinishedError, Wire

__all__ = ["FrameWriter", "Outgoing", "ServerStream", "Stream", "end_task"]

_CUT_TIMEOUT_S = 1.0
"""GRPC notices that a connection has ended as soon as its threads get to run."""

_MAX_INDEX = 2**53 - 1


class FrameWriter:
    """Writes frames one at a time, in tasks of their own, so that a sender can give up without breaking off a frame.

    Args:
        wire: written to from here only.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._write: asyncio.Task[None] | None = None
        self._begun_s = 0.0
        self._heartbeats: asyncio.Task[None] | None = None
        self.error: RpcError | None = None
        """The first error of the call, in either direction; later ones are consequences of it."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_writing(self) -> bool:
        """Whether a write is in flight."""
        return self._write is not None and not self._write.done()

    @property
    def stalled_since(self) -> float | None:
        """When the write in flight began (the event loop's clock); None: nothing is in flight."""
        return self._begun_s if self.is_writing else None

    def fail(self, error: RpcError) -> None:
        """Records ``error``, unless there is one."""
        if self.error is None:
            self.error = error
            self._failed.set_result(None)

    def start_heartbeats(self, heartbeat_s: float) -> None:
        """From now on keeps this side from being silent for longer, unless the other side takes nothing."""
        self._begun_s = asyncio.get_running_loop().time()
        self._heartbeats = asyncio.create_task(self._send_heartbeats(heartbeat_s), name="genesis-rpc-heartbeats")

    async def settle(self) -> None:
        """Waits until nothing is in flight; cancels nothing.

        Raises:
            RpcError: the first error of the call.
        """
        while self._write is not None and not self._write.done() and self.error is None:
            await asyncio.wait({self._write, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if self.error is not None:
            raise self.error

    def begin(self, raw: bytes) -> None:
        """Begins to write a frame; nothing else may be in flight (no await since `settle`)."""
        self._begun_s = asyncio.get_running_loop().time()
        self._write = asyncio.create_task(self._write_frame(raw), name="genesis-rpc-write")

    async def close(self, patience_s: float, cut: Callable[[], object] | None = None) -> None:
        """Stops the heartbeats, and lets a write that is in flight come to its end.

        It must not be broken off: gRPC's server cannot send the status of a call while a write is in flight, and would
        leave the call open. The write ends when the other side reads, cancels the call, or gRPC's pings find it dead.

        Args:
            patience_s: how long it may take.
            cut: ends the connection of a side that has taken nothing for so long; the write ends with it.
        """
        try:
            await end_task(self._heartbeats)
            if self._write is not None and not self._write.done():
                await asyncio.wait({self._write}, timeout=patience_s)
            if self._write is not None and not self._write.done() and cut is not None:
                cut()
                await asyncio.wait({self._write}, timeout=_CUT_TIMEOUT_S)
        finally:
            if self._write is not None:  # If this wait is cancelled, no call is left to be kept in order.
                self._write.cancel()
        await end_task(self._write)

    async def _write_frame(self, raw: bytes) -> None:
        try:
            await self.wire.write(raw)
        except RpcError as error:
            self.fail(error)

    async def _send_heartbeats(self, heartbeat_s: float) -> None:
        loop = asyncio.get_running_loop()
        while self.error is None:
            await asyncio.sleep(max(self._begun_s + heartbeat_s - loop.time(), heartbeat_s / 8))
            if not self.is_writing and loop.time() - self._begun_s >= heartbeat_s:
                self.begin(HEARTBEAT)


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task, waits for it, and ignores its error."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


class Outgoing:
    """Numbers the frames of one end and keeps them in the order in which tasks sent them."""

    def __init__(self, call: RpcCall, writer: FrameWriter) -> None:
        self._call = call
        self.writer = writer
        self._turn = asyncio.Lock()
        self.ended = False
        """Whether the last frame was sent."""

    async def send(
        self, kind: FrameKind, *, index: int = 0, body: BaseModel | None = None, payload: Buffer = b""
    ) -> None:
        """Sends a frame; returns when the connection has taken the frame before, or, after the last frame, that one.

        Raises:
            RpcError: the first error of the call.
            TrainerUsageError: the frame cannot be sent; the call goes on.
        """
        if not 0 <= index <= _MAX_INDEX:
            raise TrainerUsageError(f"expected a frame's index from 0 to 2**53 - 1, found {index}")
        async with self._turn:
            await asyncio.sleep(0)  # So that the write begun last is in flight while this frame is sealed.
            if self.writer.error is not None:
                raise self.writer.error
            if self.ended:
                raise TrainerUsageError("expected nothing after the end of the stream, found another frame")
            raw = self._call.seal(kind, index=index, body=body, payload=payload)
            await self.writer.settle()
            # From here on nothing is awaited, so that a cancelled send has either sent its frame or left no gap.
            self.writer.begin(raw)
            self._call.sent()
            self.ended = kind in ("reply", "end")
        if self.ended:
            await self.writer.settle()

    async def end(self) -> None:
        """Sends the end, unless it was sent before, or the other side has finished in good order without it."""
        if self.ended:
            return
        try:
            await self.send("end")
        except PeerFinishedError:
            self.ended = True


class Stream:
    """One end of a stream; `send` and `receive` may be awaited concurrently, on the endpoint's event loop.

    Args:
        outgoing: sends; from its wire nothing else may read.
        open_frame: checks a frame in full; returns None for a heartbeat.
        silence_s: after which the peer is given up.
        share: what the bytes of frames that wait count for.
        max_frames: frames that may wait.
        budget: bytes that may wait.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        open_frame: Callable[[bytes], SealedFrame | None],
        *,
        silence_s: float,
        share: Share,
        max_frames: int,
        budget: ByteBudget,
    ) -> None:
        self._wire = outgoing.writer.wire
        self._outgoing = outgoing
        self._open_frame = open_frame
        self._silence_s = silence_s
        self._share = share
        self._max_frames = max_frames
        self._budget = budget
        self._waiting: deque[tuple[Frame, int]] = deque()
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended = False
        self._pump: asyncio.Task[None] | None = None
        self.error: RpcError | None = None
        """Why nothing more can be read, if that is so."""

    async def send(self, index: int, payload: Buffer) -> None:
        """Sends a frame after those sent before; waits while the other side takes none.

        Args:
            index: the sender's own number for it, in [0, 2**53).
            payload: at most the method's ``max_payload_bytes``; may be changed once this returns.

        Raises:
            PeerUnavailableError: the peer died, fell silent, or has finished.
            RefusedError: it refused the stream, or a frame of it.
            TrainerUsageError: after `end`, or a payload larger than a frame may be.
        """
        await self._outgoing.send("data", index=index, payload=payload)

    async def end(self) -> None:
        """Says that no more frames come; returns when all are handed to the connection. Further calls do nothing.

        Raises:
            PeerUnavailableError, RefusedError: as `send`.
        """
        await self._outgoing.end()

    async def receive(self) -> Frame | None:
        """Returns the next frame, or None after the other side's `end`. May be cancelled without losing a frame.

        Raises:
            PeerUnavailableError: the peer died or fell silent, or stopped without `end`.
            RefusedError: it refused the stream; in a handler: a frame of the caller was refused.
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
        """Reads frames ahead, for the endpoint; drops at the end of the block what nobody took."""
        self._pump = asyncio.create_task(self._read_all(), name="genesis-rpc-read")
        try:
            yield self
        finally:
            await end_task(self._pump)
            self._fail(PeerUnavailableError(f"{self._wire.who}: this side closed the stream"))
            while self._waiting:
                _, size_bytes = self._waiting.popleft()
                self._budget.give(self._share, size_bytes)

    async def finish(self) -> None:
        """Waits, for the endpoint and if both sides have sent their end, until the other side has finished altogether.

        Raises:
            PeerUnavailableError, RefusedError: it did not finish in good order.
        """
        if self._pump is None or not (self._outgoing.ended and self._ended):
            return
        await asyncio.wait({self._pump})
        if self.error is not None:
            raise self.error

    async def _read_all(self) -> None:
        try:
            await self._read_frames()
            if not self._ended:
                raise PeerUnavailableError(f"{self._wire.who} stopped before the end of the stream")
        except RpcError as error:
            self._fail(error)

    async def _read_frames(self) -> None:
        """Verifies a frame while the next one comes in."""
        reading = self._begin_reading()
        try:
            while (raw := await reading) is not None:
                await self._wait_for_room()
                reading = self._begin_reading()
                await asyncio.sleep(0)  # So that it is under way while this frame is verified.
                with peer_boundary(self._wire.who):
                    frame = self._open_frame(raw)
                if frame is not None:
                    self._queue(frame, len(raw))
        finally:
            await end_task(reading)

    def _begin_reading(self) -> asyncio.Task[bytes | None]:
        return asyncio.create_task(self._wire.read_within(self._silence_s), name="genesis-rpc-read")

    async def _wait_for_room(self) -> None:
        """Waits while the queue is full; an empty one may always take a frame, so that no stream waits for another."""
        while self._waiting and not (
            len(self._waiting) < self._max_frames and self._budget.has_room(self._share, MAX_PAYLOAD_BYTES)
        ):
            self._taken.clear()
            await self._taken.wait()

    def _queue(self, frame: SealedFrame, size_bytes: int) -> None:
        if frame.header.kind == "end":
            self._ended = True
        else:
            self._waiting.append((Frame(frame.header.index, frame.payload), size_bytes))
            self._budget.take(self._share, size_bytes)
        self._arrived.set()

    def _fail(self, error: RpcError) -> None:
        if self.error is None:
            self.error = error
        self._outgoing.writer.fail(error)
        self._arrived.set()


ServerStream = Stream
"""The handler's end; it ends by itself when the handler returns."""
