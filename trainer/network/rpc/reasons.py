"""Why a message is refused: one word each, for counters, programs and tests; and how it travels as a gRPC status.

A refusal is a gRPC status, not a signed message: it can be sent before anything about the caller is known, costs no
signature a flood could make this node spend, and whoever could forge one on the way could as well cut the connection.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

import grpc

from trainer.errors import PeerUnavailableError, RefusedError, RpcError

__all__ = ["REASON_KEY", "PeerFinishedError", "Reason", "error_from_status", "status_for"]

REASON_KEY: Final = "genesis-reason"
"""The trailing metadata that carries the word."""

_MAX_TEXT_CHARS = 500
_REASON_PATTERN = re.compile(r"[a-z0-9_-]{1,48}")


class PeerFinishedError(PeerUnavailableError):
    """The peer ended the exchange in good order while this side had more to say."""


class Reason(StrEnum):
    """The refusals this package itself makes, in the order in which the checks are made."""

    BUSY = "busy"
    """A limit of concurrent calls or streams is reached; come again later."""
    STOPPING = "stopping"
    """The node is going down."""
    NO_REQUEST = "no_request"
    """The call was opened, but no request came in time."""
    SIZE = "size"
    """Shorter than a frame can be, longer than it may be, or not as long as it says."""
    MAGIC = "magic"
    """Not a frame of this protocol."""
    PROTOCOL = "protocol"
    """Another version of it."""
    HEAD = "head"
    """The head is not JSON as this protocol spells it, or has wrong fields."""
    KIND = "kind"
    """A kind of frame that has no place here, or of the wrong direction."""
    RUN = "run"
    """For another run."""
    RECIPIENT = "recipient"
    """For another node."""
    SENDER = "sender"
    """Not from the node this exchange is with, or from one the allow-list does not name."""
    CERTIFICATE = "certificate"
    """Meant for another TLS certificate: somebody stands in between, or the node has restarted."""
    METHOD = "method"
    """No such method, or called as a stream though it is none."""
    PAYLOAD_SIZE = "payload_size"
    """More payload than the method takes."""
    CLOCK = "clock"
    """Sent too far in the past or the future by this node's clock."""
    SIGNATURE = "signature"
    """Unsigned, or not signed by the sender it names."""
    REPLAYED = "replayed"
    """The same request came before."""
    RATE = "rate"
    """More requests from this sender within the clock window than are remembered."""
    SEQUENCE = "sequence"
    """A frame of a stream out of order, missing, repeated, or of another stream."""
    DIGEST = "digest"
    """The payload is not the one that was signed."""
    BODY = "body"
    """The body is not what the method takes."""
    STALLED = "stalled"
    """The caller took no answer, or the node needed the place of a call that stood still."""
    TIMEOUT = "timeout"
    """The handler took longer than this node lets any."""
    INTERNAL = "internal"
    """The handler failed; its log says how."""


_STATUS = {
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


def status_for(error: RefusedError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status, text and trailing metadata that carry ``error`` to the caller."""
    by_reason: dict[str, grpc.StatusCode] = {str(reason): status for reason, status in _STATUS.items()}
    code = by_reason.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION)
    reason = error.reason if _REASON_PATTERN.fullmatch(error.reason) else "refused"
    return code, _one_line(str(error)), ((REASON_KEY, reason),)


def error_from_status(
    who: str, code: grpc.StatusCode, text: str | None, reason: str | None, *, max_message_bytes: int
) -> RpcError:
    """What a call that ended with this status raises; everything in it was chosen by the peer and is not trusted."""
    line = _one_line(text or "")
    if reason is not None:
        word = reason if _REASON_PATTERN.fullmatch(reason) else "refused"
        return RefusedError(word, f"{who} refused ({word}): {line or 'without a text'}")
    if code is grpc.StatusCode.OK:
        return PeerFinishedError(f"{who} has finished the exchange and takes no more frames")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RefusedError(
            Reason.SIZE, f"{who}: expected messages of at most {max_message_bytes} bytes, found a larger one ({line})"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RefusedError(Reason.PROTOCOL, f"{who} serves something else than this protocol ({line})")
    return PeerUnavailableError(f"{who} is not available ({code.name.lower()}: {line or 'no detail'})")


def _one_line(text: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in text[:_MAX_TEXT_CHARS])
    return printable.strip()
