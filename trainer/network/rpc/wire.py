"""One call as its two ends see it: a gRPC stream at each end, which frames belong to it, and in what order.

One write is in flight at a time, as gRPC demands, and heartbeats go out while there is nothing else to send. Every
frame is bound to its call by nonce, method, run, both identities, direction and its place in the sequence; one that was
signed for another call or place is refused before its signature is looked at.

A refusal is a gRPC status, not a signed message: it can be sent before anything about the caller is known, costs no
signature that a flood could make this node spend, and an attacker who could forge one could as well cut the connection.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, cast

import grpc
from grpc import aio
from pydantic import BaseModel
from typing_extensions import Buffer

from trainer.errors import PeerUnavailableError, RefusedError, RpcError, TrainerUsageError
from trainer.network.rpc.admission import CREDENTIAL_KEY
from trainer.network.rpc.channels import ClientCall
from trainer.network.rpc.envelope import (
    HEARTBEAT,
    MAX_FRAME_BYTES,
    EnvelopeHeader,
    SealedFrame,
    parse_header,
    seal,
    verify_header,
    verify_payload,
)
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import Counters, PeerId, Reason

REASON_KEY: Final = "genesis-reason"  # The trailing metadata that carries the reason of a refusal.
CALL_FRAMES = frozenset({"reply"})
STREAM_FRAMES = frozenset({"data", "end"})

ServerContext = aio.ServicerContext[bytes, bytes]

_CERTIFICATE_HINT = ": the node restarted, or there is a man in the middle"
_MAX_INDEX = 2**53 - 1
_STATUS_TIMEOUT_S = 1.0
_CUT_TIMEOUT_S = 1.0  # GRPC notices that a connection has ended as soon as its threads get to run.
_MAX_TEXT_CHARS = 500
_REASON_PATTERN = re.compile(r"[a-z0-9_-]{1,48}")
_STATUS: dict[str, grpc.StatusCode] = {
    Reason.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.RATE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STOPPING: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_REQUEST: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.SENDER: grpc.StatusCode.PERMISSION_DENIED,
    Reason.SIGNATURE: grpc.StatusCode.UNAUTHENTICATED,
    Reason.CREDENTIAL: grpc.StatusCode.PERMISSION_DENIED,
    Reason.REVOKED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.ROLE: grpc.StatusCode.PERMISSION_DENIED,
    Reason.REPLAYED: grpc.StatusCode.ALREADY_EXISTS,
    Reason.METHOD: grpc.StatusCode.UNIMPLEMENTED,
    Reason.STALLED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


class PeerFinishedError(PeerUnavailableError):
    """The peer ended the call in good order while this side had more to say."""


@dataclass(frozen=True, slots=True)
class CallTerms:
    """What all frames of one call have in common."""

    method: str
    run_id: str
    nonce: str
    caller: PeerId
    callee: PeerId | None  # None: the caller does not know yet whom it reaches; the first answer says.
    certificate_sha256: str
    max_payload_bytes: int


class RpcCall(ABC):
    """One end of a call: sends its frames in the order in which tasks give them, and checks those of the other end.

    It writes in tasks, so that a sender can give up without breaking off a frame. Until `bind` it can read, write
    heartbeats and fail: the callee knows the terms from the first frame only.
    """

    _origin: ClassVar[Literal["caller", "callee"]]

    def __init__(self, who: str, counters: Counters) -> None:
        self.who = who  # The other end, for messages.
        self.error: RpcError | None = None
        """The first error of the call, in either direction; later ones are consequences of it."""
        self.ended = False  # Whether this end has sent its last frame.
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counters = counters
        self._writing: asyncio.Task[None] | None = None
        self._begun_s = 0.0
        self._heartbeats: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._num_sent = 0
        self._of_scopes: tuple[Counters, ...] = ()
        self._first_bytes = 0  # Received before the terms were known.
        self._other_ended = False

    def bind(self, terms: CallTerms, identity: Identity, expected: frozenset[str]) -> None:
        """Sets what the frames of the call have in common, who signs, and which kinds the other end may send."""
        self._terms = terms
        self._of_scopes = self._counters.of_method(terms.method)
        for counters in self._of_scopes:
            counters.received_bytes += self._first_bytes
        self._identity = identity
        self._expected = expected
        self._other = terms.callee if self._origin == "caller" else terms.caller
        self._num_received = 0 if self._origin == "caller" else 1  # The callee has taken the first frame already.

    @property
    def stalled_since(self) -> float | None:
        """When the write in flight began (the event loop's clock); None: nothing is in flight."""
        return None if self._writing is None or self._writing.done() else self._begun_s

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
        for counters in self._of_scopes:
            counters.received_bytes += len(frame)
        if not self._of_scopes:
            self._first_bytes += len(frame)
        return frame

    async def read_within(self, silence_s: float) -> bytes | None:
        """Reads a frame, or gives the peer up once neither frame nor heartbeat has come for ``silence_s``."""
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

    async def _settle(self) -> None:
        """Waits until no write is in flight, or raises the first error of the call; cancels nothing."""
        while self._writing is not None and not self._writing.done() and self.error is None:
            await asyncio.wait({self._writing, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if self.error is not None:
            raise self.error

    def _begin_write(self, raw: bytes) -> None:
        """Begins to write a frame; no other write may be in flight (no await since `_settle`)."""
        self._begun_s = asyncio.get_running_loop().time()
        self._writing = asyncio.create_task(self._write_frame(raw), name="genesis-rpc-write")

    async def close(self, patience_s: float, cut: Callable[[], object] | None = None) -> None:
        """Stops the heartbeats, and lets a write that is in flight come to its end, for ``patience_s``.

        It must not be broken off: gRPC's server cannot send the status of a call while a write is in flight, and would
        leave the call open. ``cut`` ends the connection of a side that takes nothing, and the write with it.
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

    async def send(
        self,
        kind: Literal["request", "open", "reply", "data", "end"],
        *,
        index: int = 0,
        body: BaseModel | None = None,
        payload: Buffer = b"",
    ) -> None:
        """Sends a frame; returns when the connection has taken the frame before, or, after the last frame, that one.

        Raises the first error of the call, or TrainerUsageError for what is no frame or comes after the last one; after
        that the call goes on.
        """
        if not 0 <= index <= _MAX_INDEX:
            raise TrainerUsageError(f"expected a frame's index from 0 to 2**53 - 1, found {index}")
        dumped = None if body is None else body.model_dump(mode="json")
        if not isinstance(dumped, dict | None):
            raise TrainerUsageError(f"expected a body with named fields, found {type(body).__name__}")
        async with self._turn:
            await asyncio.sleep(0)  # So that the write begun last is in flight while this frame is sealed.
            if self.error is not None:
                raise self.error
            if self.ended:
                raise TrainerUsageError("expected nothing after the end of the stream, found another frame")
            fields: dict[str, object] = {
                "kind": kind,
                "origin": self._origin,
                "method": self._terms.method,
                "run_id": self._terms.run_id,
                "recipient": self._other or "",
                "nonce": self._terms.nonce,
                "sequence": self._num_sent,
                "index": index,
                "sent_at": time.time(),
                "certificate_sha256": self._terms.certificate_sha256,
                "body": dumped,
            }
            raw = seal(self._identity, fields, payload)
            await self._settle()
            # From here on nothing is awaited, so that a cancelled send has either sent its frame or left no gap.
            self._begin_write(raw)
            self._num_sent += 1
            self.ended = kind in ("reply", "end")
        if self.ended:
            await self._settle()

    async def end(self) -> None:
        """Sends the end, unless it was sent before, or the other side has finished in good order without it."""
        if self.ended:
            return
        try:
            await self.send("end")
        except PeerFinishedError:
            self.ended = True

    def open(self, raw: bytes) -> SealedFrame | None:
        """Returns the frame that came, checked in full; None for a heartbeat. Raises RefusedError."""
        frame = parse_header(raw)
        if frame is None:
            return None
        header = frame.header
        if header.origin == self._origin or header.kind not in self._expected or self._other_ended:
            raise RefusedError(Reason.KIND, f"expected no frame of kind {header.kind} by the {header.origin} here")
        check_bound(frame, self._terms, self._other, self._identity.peer_id)
        if header.nonce != self._terms.nonce or header.sequence != self._num_received:
            raise RefusedError(
                Reason.SEQUENCE, f"expected frame {self._num_received} of this call, found {header.sequence} of one"
            )
        verify_header(frame)
        verify_payload(frame)
        self._num_received += 1
        self._other = header.sender
        self._other_ended = header.kind in ("reply", "end")
        return frame

    async def _write_frame(self, raw: bytes) -> None:
        try:
            await self._write(raw)
            self._counters.sent_bytes += len(raw)
            for counters in self._of_scopes:
                counters.sent_bytes += len(raw)
        except RpcError as error:
            self.fail(error)

    async def _send_heartbeats(self, heartbeat_s: float) -> None:
        loop = asyncio.get_running_loop()
        while self.error is None:
            await asyncio.sleep(max(self._begun_s + heartbeat_s - loop.time(), heartbeat_s / 8))
            if self.stalled_since is None and loop.time() - self._begun_s >= heartbeat_s:
                self._begin_write(HEARTBEAT)

    @abstractmethod
    async def _read(self) -> object: ...

    @abstractmethod
    async def _write(self, raw: bytes) -> None: ...


class CallerEnd(RpcCall):
    """The caller's end; a cancelled read or write ends the call, because gRPC does so."""

    _origin = "caller"

    def __init__(
        self,
        call: ClientCall,
        who: str,
        counters: Counters,
        answered: Callable[[EnvelopeHeader], None],
        *,
        shows_credential: bool = False,
    ) -> None:
        super().__init__(who, counters)
        self._call = call
        self._answered = answered  # Is told of the first frame that passes its checks; raises PeerUnavailableError.
        self.shows_credential = shows_credential  # Whether this side does, and so asks for that of the other.
        self.shown: bytes | None = None  # The credential that the other side has shown on this call.
        self._has_metadata = not shows_credential

    def open(self, raw: bytes) -> SealedFrame | None:
        """Returns the frame that came, checked in full; raises PeerUnavailableError where it fails a check."""
        try:
            frame = super().open(raw)
        except RefusedError as error:
            raise PeerUnavailableError(self.complaint(error)) from None
        if frame is not None and frame.header.sequence == 0:
            self._answered(frame.header)
        return frame

    def complaint(self, error: RefusedError) -> str:
        """Counts an answer that failed a check, and describes it."""
        self._counters.count_refusal(error.reason)
        return f"{self.who} gave an answer that fails a check ({error.reason}): {error}"

    async def _read(self) -> object:
        try:
            raw = await self._call.read()
            if not self._has_metadata:  # It has come before the first frame.
                self._has_metadata = True
                self.shown = credential_in(await self._call.initial_metadata())
            return raw
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
        """Returns the error of a call that takes no more frames; its status follows what was sent before."""
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
            most = f"messages of at most {MAX_FRAME_BYTES} bytes"
            return RefusedError(Reason.SIZE, f"{self.who}: expected {most}, found a larger one ({text})")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return RefusedError(Reason.PROTOCOL, f"{self.who} serves something else than this protocol ({text})")
        return PeerUnavailableError(f"{self.who} is not available ({code.name.lower()}: {text or 'no detail'})")


class CalleeEnd(RpcCall):
    """The callee's end; gRPC cancels the handler's task when the caller goes away."""

    _origin = "callee"

    def __init__(self, context: ServerContext, counters: Counters) -> None:
        super().__init__(context.peer(), counters)
        self._context = context

    def shown_credential(self) -> bytes | None:
        """Returns the credential that the caller has shown with this call."""
        return credential_in(self._context.invocation_metadata())

    async def show_credential(self, wire: bytes, timeout_s: float) -> None:
        """Shows the caller this node's own, before anything else is sent."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._context.send_initial_metadata(((CREDENTIAL_KEY, wire),))
        except (aio.BaseError, TimeoutError) as error:
            raise PeerUnavailableError(f"{self.who} went away ({error})") from None

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


def credential_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes | None:
    """Returns the credential in the metadata of a call, as it came; None: there is none."""
    for key, value in metadata or ():
        if key == CREDENTIAL_KEY and isinstance(value, bytes):
            return value
    return None


def check_bound(frame: SealedFrame, terms: CallTerms, sender: PeerId | None, recipient: PeerId) -> None:
    """Checks what a header claims against what its receiver knows (``sender`` None: anyone); raises RefusedError."""
    header = frame.header
    for reason, expected, found, hint in (
        (Reason.RUN, terms.run_id, header.run_id, ""),
        (Reason.RECIPIENT, recipient, header.recipient, ""),
        (Reason.SENDER, header.sender if sender is None else sender, header.sender, ""),
        (Reason.CERTIFICATE, terms.certificate_sha256, header.certificate_sha256, _CERTIFICATE_HINT),
        (Reason.METHOD, terms.method, header.method, ""),
    ):
        if found != expected:
            raise RefusedError(reason, f"expected a message with {reason} {expected!r}, found one with {found!r}{hint}")
    if len(frame.payload) > terms.max_payload_bytes:
        raise RefusedError(
            Reason.PAYLOAD_SIZE, f"expected at most {terms.max_payload_bytes} bytes, found {len(frame.payload)}"
        )


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
