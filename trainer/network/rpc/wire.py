"""The two ends of one gRPC stream, made alike: they pass whole frames, and fail with this package's errors.

One write is in flight at a time, as gRPC demands, and heartbeats go out while there is nothing else to send.

A refusal is a gRPC status, not a signed message: it can be sent before anything about the caller is known, costs no
signature that a flood could make this node spend, and an attacker who could forge one could as well cut the connection.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, cast

import grpc
from grpc import aio

from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.network.rpc.channels import ClientCall
from trainer.network.rpc.envelope import HEARTBEAT, MAX_FRAME_BYTES
from trainer.network.rpc.messages import Counters, Reason

__all__ = [
    "REASON_KEY",
    "ClientWire",
    "PeerFinishedError",
    "ServerContext",
    "ServerWire",
    "Wire",
    "end_task",
    "status_for",
]

REASON_KEY: Final = "genesis-reason"
"""The trailing metadata that carries the reason of a refusal."""

ServerContext = aio.ServicerContext[bytes, bytes]

_STATUS_TIMEOUT_S = 1.0
_CUT_TIMEOUT_S = 1.0
"""GRPC notices that a connection has ended as soon as its threads get to run."""
_MAX_TEXT_CHARS = 500
_REASON_PATTERN = re.compile(r"[a-z0-9_-]{1,48}")
_STATUS: dict[str, grpc.StatusCode] = {
    Reason.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.RATE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STOPPING: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_REQUEST: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.SENDER: grpc.StatusCode.PERMISSION_DENIED,
    Reason.SIGNATURE: grpc.StatusCode.UNAUTHENTICATED,
    Reason.REPLAYED: grpc.StatusCode.ALREADY_EXISTS,
    Reason.METHOD: grpc.StatusCode.UNIMPLEMENTED,
    Reason.STALLED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


class PeerFinishedError(PeerUnavailableError):
    """The peer ended the call in good order while this side had more to say."""


class Wire(ABC):
    """One end of a call.

    It writes frames one at a time, in tasks of their own, so that a sender can give up without breaking off a frame.
    """

    def __init__(self, who: str, counters: Counters) -> None:
        self.who = who
        """The other end, for messages."""
        self.error: RpcError | None = None
        """The first error of the call, in either direction; later ones are consequences of it."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counters = counters
        self._writing: asyncio.Task[None] | None = None
        self._begun_s = 0.0
        self._heartbeats: asyncio.Task[None] | None = None

    @property
    def stalled_since(self) -> float | None:
        """When the write in flight began (the event loop's clock); None: nothing is in flight."""
        return None if self._writing is None or self._writing.done() else self._begun_s

    def raise_if_failed(self) -> None:
        """Raises the first error of the call, if there is one."""
        if self.error is not None:
            raise self.error

    def fail(self, error: RpcError) -> None:
        """Records ``error``, unless there is one."""
        if self.error is None:
            self.error = error
            self._failed.set_result(None)

    async def read(self) -> bytes | None:
        """Returns the next frame; None once the other side has finished in good order."""
        raw = await self._read()
        if raw is aio.EOF:
            return None
        frame = cast(bytes, raw)
        self._counters.received_bytes += len(frame)
        return frame

    async def read_within(self, silence_s: float) -> bytes | None:
        """Reads a frame, or gives the peer up.

        Raises:
            PeerUnavailableError: neither frame nor heartbeat came for ``silence_s``, or the peer is gone.
            RefusedError: it refused.
        """
        try:
            async with asyncio.timeout(silence_s):
                return await self.read()
        except TimeoutError:
            raise PeerUnavailableError(
                f"{self.who} fell silent: expected a frame or heartbeat within {silence_s:g} s, found none"
            ) from None

    def start_heartbeats(self, heartbeat_s: float) -> None:
        """From now on keeps this side from being silent for longer, unless the other side takes nothing."""
        self._begun_s = asyncio.get_running_loop().time()
        self._heartbeats = asyncio.create_task(self._send_heartbeats(heartbeat_s), name="genesis-rpc-heartbeats")

    async def settle(self) -> None:
        """Waits until no write is in flight; cancels nothing.

        Raises:
            RpcError: the first error of the call.
        """
        while self._writing is not None and not self._writing.done() and self.error is None:
            await asyncio.wait({self._writing, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        self.raise_if_failed()

    def begin_write(self, raw: bytes) -> None:
        """Begins to write a frame; no other write may be in flight (no await since `settle`)."""
        self._begun_s = asyncio.get_running_loop().time()
        self._writing = asyncio.create_task(self._write_frame(raw), name="genesis-rpc-write")

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
            if self._writing is not None:
                await asyncio.wait({self._writing}, timeout=patience_s)
                if not self._writing.done() and cut is not None:
                    cut()
                    await asyncio.wait({self._writing}, timeout=_CUT_TIMEOUT_S)
        finally:
            if self._writing is not None:  # If this wait is cancelled, no call is left to be kept in order.
                self._writing.cancel()
        await end_task(self._writing)

    async def _write_frame(self, raw: bytes) -> None:
        try:
            await self._write(raw)
        except RpcError as error:
            self.fail(error)
        else:
            self._counters.sent_bytes += len(raw)

    async def _send_heartbeats(self, heartbeat_s: float) -> None:
        loop = asyncio.get_running_loop()
        while self.error is None:
            await asyncio.sleep(max(self._begun_s + heartbeat_s - loop.time(), heartbeat_s / 8))
            if self.stalled_since is None and loop.time() - self._begun_s >= heartbeat_s:
                self.begin_write(HEARTBEAT)

    @abstractmethod
    async def _read(self) -> object: ...

    @abstractmethod
    async def _write(self, raw: bytes) -> None: ...


class ClientWire(Wire):
    """The caller's end; a cancelled read or write ends the call, because gRPC does so."""

    def __init__(self, call: ClientCall, who: str, counters: Counters) -> None:
        super().__init__(who, counters)
        self._call = call

    async def _read(self) -> object:
        try:
            return await self._call.read()
        except aio.AioRpcError:
            raise await self._status_error() from None
        except asyncio.CancelledError:
            self._raise_if_call_was_cancelled()
            raise

    async def _write(self, raw: bytes) -> None:
        try:
            await self._call.wait_for_connection()
            # Not call.write: when the other side has ended the call, that overwrites its status with INTERNAL and drops
            # what it sent before and was not read yet (seen with grpcio 1.85). This is what it calls inside.
            await self._call._cython_call.send_serialized_message(raw)  # type: ignore[attr-defined]
        except (aio.AioRpcError, aio.BaseError):
            raise await self._error_after_end() from None
        except asyncio.CancelledError:
            self._raise_if_call_was_cancelled()
            raise

    def _raise_if_call_was_cancelled(self) -> None:
        """GRPC raises CancelledError also where only the call was cancelled, and not the task that awaits it."""
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise PeerUnavailableError(f"{self.who}: the call was ended on this side") from None

    async def _error_after_end(self) -> RpcError:
        """Returns the error of a call that takes no more frames.

        Its status follows what the other side sent before, once that is read.
        """
        ended = asyncio.Event()
        self._call.add_done_callback(lambda _call: ended.set())
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                await ended.wait()
        except TimeoutError:
            return PeerUnavailableError(f"{self.who} takes no more frames")
        return await self._status_error()

    async def _status_error(self) -> RpcError:
        """Returns the error that the status of the call stands for; the peer chose everything in it."""
        code, text = await self._call.code(), _one_line(await self._call.details() or "")
        metadata = await self._call.trailing_metadata()
        reason = None if metadata is None else metadata.get(REASON_KEY)
        if reason is not None:
            word = _word(reason.decode("ascii", "replace") if isinstance(reason, bytes) else reason)
            return RefusedError(word, f"{self.who} refused ({word}): {text or 'without a text'}")
        if code is grpc.StatusCode.OK:
            return PeerFinishedError(f"{self.who} has finished the call and takes no more frames")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return RefusedError(
                Reason.SIZE,
                f"{self.who}: expected messages of at most {MAX_FRAME_BYTES} bytes, found a larger one ({text})",
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return RefusedError(Reason.PROTOCOL, f"{self.who} serves something else than this protocol ({text})")
        return PeerUnavailableError(f"{self.who} is not available ({code.name.lower()}: {text or 'no detail'})")


class ServerWire(Wire):
    """The callee's end; gRPC cancels the handler's task when the caller goes away."""

    def __init__(self, context: ServerContext, counters: Counters) -> None:
        super().__init__(context.peer(), counters)
        self._context = context

    async def _read(self) -> object:
        try:
            return await self._context.read()
        except aio.BaseError as error:
            raise PeerUnavailableError(f"{self.who} went away ({error})") from None

    async def _write(self, raw: bytes) -> None:
        try:
            await self._context.write(raw)
        except aio.BaseError as error:
            raise PeerUnavailableError(f"{self.who} went away ({error})") from None


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task, waits for it, and ignores its error."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def status_for(error: RefusedError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Returns status, text and trailing metadata that carry ``error`` to the caller."""
    code = _STATUS.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION)
    return code, _one_line(str(error)), ((REASON_KEY, _word(error.reason)),)


def _word(reason: str) -> str:
    return reason if _REASON_PATTERN.fullmatch(reason) else "refused"


def _one_line(text: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in text[:_MAX_TEXT_CHARS])
    return printable.strip()
