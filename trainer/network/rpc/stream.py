"""Frames in both directions over one exchange: in order, with backpressure and heartbeats.

`Stream.send` returns once the connection has taken the frame before, so that hashing a frame overlaps with sending the
one before; `Outgoing` seals frames, and `FrameWriter` keeps one write in flight, as gRPC demands. `Stream.receive`
takes from at most ``max_queued_frames`` frames that `Incoming` has read ahead and checked. A side that has nothing to
send sends heartbeats, and a side that hears nothing for ``stall_timeout_s`` gives up. Silence is judged only while this
side is reading: a peer is not called dead because this node leaves its frames unread; gRPC's pings and the deadline of
the call notice what is left. `Failure` holds the first error of either half, so that both halves report it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from typing_extensions import Buffer

from trainer.errors import PeerUnavailableError, RpcError, TrainerUsageError
from trainer.network.rpc.boundary import peer_boundary
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.network.rpc.envelope import HEARTBEAT, SealedFrame
from trainer.network.rpc.exchange import Exchange
from trainer.network.rpc.limits import ByteBudget
from trainer.network.rpc.messages import Frame
from trainer.network.rpc.reasons import PeerFinishedError
from trainer.network.rpc.standing import Share
from trainer.network.rpc.wire import Wire, read_within

__all__ = [
    "Failure",
    "FrameWriter",
    "Incoming",
    "OpenFrame",
    "Outgoing",
    "ReadAhead",
    "ServerStream",
    "Stream",
    "end_task",
]


class Failure:
    """Set at most once; later errors are consequences of the first."""

    def __init__(self) -> None:
        self.error: RpcError | None = None
        self._happened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self, error: RpcError) -> None:
        """Records ``error``, unless there is one."""
        if self.error is None:
            self.error = error
            self._happened.set_result(None)

    def raise_if_set(self) -> None:
        """Raises the error, if there is one."""
        if self.error is not None:
            raise self.error

    async def race(self, task: asyncio.Task[None]) -> None:
        """Waits until ``task`` is done or something went wrong; cancels nothing."""
        await asyncio.wait({task, self._happened}, return_when=asyncio.FIRST_COMPLETED)


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


OpenFrame: TypeAlias = Callable[[bytes], SealedFrame | None]
"""Checks a frame in full; None: a heartbeat."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How much of a stream may wait for its reader."""

    share: Share
    """What their bytes count for."""
    max_frames: int
    budget: ByteBudget


class Incoming:
    """What came and was not taken yet.

    Args:
        wire: read from here only.
        open_frame: checks a frame.
        stall_timeout_s: silence after which the peer is given up.
        ahead: how much may wait.
        failure: shared with the sending half.
    """

    def __init__(
        self, wire: Wire, open_frame: OpenFrame, stall_timeout_s: float, ahead: ReadAhead, failure: Failure
    ) -> None:
        self._wire = wire
        self._open_frame = open_frame
        self._stall_timeout_s = stall_timeout_s
        self._ahead = ahead
        self._failure = failure
        self._waiting: deque[tuple[Frame, int]] = deque()
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended = False
        self._error: RpcError | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def error(self) -> RpcError | None:
        """Why nothing more can be read, if that is so."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether the other side has said that nothing more comes."""
        return self._ended

    def start(self) -> None:
        """Starts reading."""
        self._pump = asyncio.create_task(self._read_all(), name="genesis-rpc-read")

    async def receive(self) -> Frame | None:
        """See `Stream.receive`."""
        while True:
            if self._waiting:
                frame, size_bytes = self._waiting.popleft()
                self._ahead.budget.give(self._ahead.share, size_bytes)
                self._taken.set()
                return frame
            if self._ended:
                return None
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()

    async def finished(self) -> None:
        """Waits, after `receive` returned None, until the other side has finished altogether.

        Raises:
            PeerUnavailableError, RefusedError: it did not finish in good order.
        """
        if self._pump is not None:
            await asyncio.wait({self._pump})
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Stops reading and drops what waits."""
        await end_task(self._pump)
        self._fail(PeerUnavailableError(f"{self._wire.who}: this side closed the stream"))
        while self._waiting:
            _, size_bytes = self._waiting.popleft()
            self._ahead.budget.give(self._ahead.share, size_bytes)

    async def _read_all(self) -> None:
        try:
            await self._read_frames()
            if not self._ended:
                raise PeerUnavailableError(f"{self._wire.who} stopped before the end of the stream")
        except RpcError as error:
            self._fail(error)

    async def _read_frames(self) -> None:
        """Verifies a frame while the next one comes in."""
        reading = self._start_reading()
        try:
            while (raw := await reading) is not None:
                await self._room()
                reading = self._start_reading()
                await asyncio.sleep(0)  # So that it is under way while this frame is verified.
                with peer_boundary(self._wire.who):
                    frame = self._open_frame(raw)
                if frame is not None:
                    self._take(frame, len(raw))
        finally:
            await end_task(reading)

    def _start_reading(self) -> asyncio.Task[bytes | None]:
        return asyncio.create_task(read_within(self._wire, self._stall_timeout_s), name="genesis-rpc-read")

    async def _room(self) -> None:
        """Waits while the queue is full; an empty one may always take a frame, so that no stream waits for another."""
        ahead = self._ahead
        while self._waiting and not (
            len(self._waiting) < ahead.max_frames and ahead.budget.has_room(ahead.share, MAX_PAYLOAD_BYTES)
        ):
            self._taken.clear()
            await self._taken.wait()

    def _take(self, frame: SealedFrame, size_bytes: int) -> None:
        if frame.head.kind == "end":
            self._ended = True
        else:
            self._waiting.append((Frame(frame.head.index, frame.payload), size_bytes))
            self._ahead.budget.take(self._ahead.share, size_bytes)
        self._arrived.set()

    def _fail(self, error: RpcError) -> None:
        if self._error is None:
            self._error = error
        self._failure.set(error)
        self._arrived.set()


_MAX_INDEX = 2**53 - 1


class Outgoing:
    """Numbers the frames and keeps them in the order in which they were given, whoever sends."""

    def __init__(self, exchange: Exchange, writer: FrameWriter, failure: Failure) -> None:
        self._exchange = exchange
        self._writer = writer
        self._failure = failure
        self._turn = asyncio.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the last frame was given."""
        return self._ended

    async def send(
        self,
        kind: Literal["request", "open", "reply", "data", "end"],
        *,
        index: int = 0,
        body: dict[str, Any] | None = None,
        payload: Buffer = b"",
    ) -> None:
        """Sends a frame; returns when the one before it was taken by the connection, after the last one: it itself.

        Raises:
            RpcError: what went wrong with the exchange.
            TrainerUsageError: the frame cannot be sent; the exchange goes on.
        """
        if not 0 <= index <= _MAX_INDEX:
            raise TrainerUsageError(f"expected a frame's index from 0 to 2**53 - 1, found {index}")
        async with self._turn:
            await asyncio.sleep(0)  # So that the write begun last is under way while this frame is sealed.
            self._failure.raise_if_set()
            if self._ended:
                raise TrainerUsageError("expected nothing after the end of the stream, found another frame")
            raw = self._exchange.seal(kind, index=index, body=body, payload=payload)
            await self._writer.settle()
            # From here on nothing is awaited, so that a cancelled send has either sent its frame or left no gap.
            self._writer.begin(raw)
            self._exchange.sent()
            self._ended = kind in ("reply", "end")
        if self._ended:
            await self._writer.settle()

    async def end(self) -> None:
        """Sends the end, unless it was sent before, or the other side has gone in good order without waiting for it."""
        if self._ended:
            return
        try:
            await self.send("end")
        except PeerFinishedError:
            self._ended = True


class Stream:
    """One end of a stream; `send` and `receive` may be awaited side by side, on the endpoint's event loop."""

    def __init__(self, incoming: Incoming, outgoing: Outgoing) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

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
        """The next frame, or None after the other side's `end`. May be cancelled without losing a frame.

        Raises:
            PeerUnavailableError: the peer died or fell silent, or stopped without `end`.
            RefusedError: it refused the stream; in a handler: a frame of the caller was refused.
        """
        return await self._incoming.receive()


ServerStream = Stream
"""The handler's end; it ends by itself when the handler returns."""
