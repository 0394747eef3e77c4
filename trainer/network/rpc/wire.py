"""The two ends of one gRPC stream, made alike: `read` and `write` whole frames, and fail with this package's errors."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from grpc import aio

from trainer.errors import PeerUnavailableError, RpcError
from trainer.network.rpc.envelope import MAX_FRAME_BYTES
from trainer.network.rpc.links import ClientCall
from trainer.network.rpc.messages import Counters
from trainer.network.rpc.reasons import REASON_KEY, error_from_status

_STATUS_S = 1.0

__all__ = ["ClientWire", "ServerContext", "ServerWire", "Wire", "read_within"]

ServerContext = aio.ServicerContext[bytes, bytes]


class Wire(Protocol):
    """One end."""

    who: str
    """The other end, for messages."""

    async def read(self) -> bytes | None:
        """The next frame, None when the other side has finished in good order."""

    async def write(self, raw: bytes) -> None:
        """Hands a frame to the connection; waits while the other side takes none."""


class ClientWire:
    """The caller's end; a cancelled read or write ends the call (as gRPC has it)."""

    def __init__(self, call: ClientCall, who: str, counters: Counters) -> None:
        self._call = call
        self._counters = counters
        self.who = who

    async def read(self) -> bytes | None:
        """See `Wire`."""
        try:
            raw = await self._call.read()
        except aio.AioRpcError:
            raise await self._error() from None
        except asyncio.CancelledError:
            self._raise_if_call_was_cancelled()
            raise
        if raw is aio.EOF:
            return None
        frame = cast(bytes, raw)
        self._counters.received_bytes += len(frame)
        return frame

    async def write(self, raw: bytes) -> None:
        """See `Wire`."""
        try:
            await self._call.wait_for_connection()
            # Not call.write: when the other side has ended the call, that overwrites its status with INTERNAL and drops
            # what it sent before and was not read yet (seen with grpcio 1.85). This is what it calls inside.
            await self._call._cython_call.send_serialized_message(raw)  # type: ignore[attr-defined]
        except (aio.AioRpcError, aio.BaseError):
            raise await self._why_ended() from None
        except asyncio.CancelledError:
            self._raise_if_call_was_cancelled()
            raise
        self._counters.sent_bytes += len(raw)

    def _raise_if_call_was_cancelled(self) -> None:
        """GRPC raises CancelledError also where only the call was cancelled, and not the task that awaits it."""
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise PeerUnavailableError(f"{self.who}: the exchange was ended on this side") from None

    async def _why_ended(self) -> RpcError:
        """The status of a call that takes no more; it follows what the other side sent before, once that is read."""
        ended = asyncio.Event()
        self._call.add_done_callback(lambda _call: ended.set())
        try:
            async with asyncio.timeout(_STATUS_S):
                await ended.wait()
        except TimeoutError:
            return PeerUnavailableError(f"{self.who} takes no more frames")
        return await self._error()

    async def _error(self) -> RpcError:
        metadata = await self._call.trailing_metadata()
        reason = metadata.get(REASON_KEY) if metadata is not None else None
        return error_from_status(
            self.who,
            await self._call.code(),
            await self._call.details(),
            reason.decode("ascii", "replace") if isinstance(reason, bytes) else reason,
            max_message_bytes=MAX_FRAME_BYTES,
        )


class ServerWire:
    """The callee's end; gRPC cancels the handler's task when the caller goes away."""

    def __init__(self, context: ServerContext, who: str, counters: Counters) -> None:
        self._context = context
        self._counters = counters
        self.who = who

    async def read(self) -> bytes | None:
        """See `Wire`."""
        try:
            raw: object = await self._context.read()
        except aio.BaseError as error:
            raise PeerUnavailableError(f"{self.who} went away ({error})") from None
        if raw is aio.EOF:
            return None
        frame = cast(bytes, raw)
        self._counters.received_bytes += len(frame)
        return frame

    async def write(self, raw: bytes) -> None:
        """See `Wire`."""
        try:
            await self._context.write(raw)
        except aio.BaseError as error:
            raise PeerUnavailableError(f"{self.who} went away ({error})") from None
        self._counters.sent_bytes += len(raw)


async def read_within(wire: Wire, silence_s: float) -> bytes | None:
    """Reads a frame, or gives the peer up.

    Raises:
        PeerUnavailableError: neither frame nor heartbeat came for ``silence_s``, or the peer is gone.
        RefusedError: it refused.
    """
    try:
        async with asyncio.timeout(silence_s):
            return await wire.read()
    except TimeoutError:
        raise PeerUnavailableError(
            f"{wire.who} fell silent: expected a frame or heartbeat within {silence_s:g} s, found none"
        ) from None
