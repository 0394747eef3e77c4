"""The receiving half of a stream: reads ahead a little, checks every frame, and notices silence."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from trainer.errors import PeerUnavailableError, RpcError
from trainer.network.rpc.boundary import peer_boundary
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.network.rpc.envelope import SealedFrame
from trainer.network.rpc.failure import Failure
from trainer.network.rpc.limits import ByteBudget
from trainer.network.rpc.messages import Frame
from trainer.network.rpc.standing import Share
from trainer.network.rpc.wire import Wire, read_within
from trainer.network.rpc.writer import end_task

__all__ = ["Incoming", "OpenFrame", "ReadAhead"]

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
