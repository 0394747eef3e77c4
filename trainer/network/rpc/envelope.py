"""The one form of every message: a prefix of fixed size, a signature, a JSON head, a payload.

    offset  bytes
    0       4      magic, 89 47 6E 52
    4       4      protocol version                       (unsigned 32 bit little endian, like the sizes)
    8       4      size of the head, at most 65,536
    12      4      size of the payload, at most 1,048,576
    16      64     ed25519 signature of the sender over bytes 0..16 and the head
    80      ...    head: one JSON object, `Head`
    ...     ...    payload: raw bytes, whose BLAKE3 is in the head

Checks go from cheap to dear, each with its own reason: sizes, magic and version before JSON (`parse_head`), JSON before
the signature (`verify_head`, 140 µs), that before the digest of the payload (`verify_payload`, 0.17 ms a MiB). What a
head says is nobody's word before `verify_head`.

BLAKE3 and not SHA-256, which takes 0.62 ms a MiB: each frame is hashed at both ends, and that was a quarter of all the
processor time it takes to get it there. It is short enough to be done in the event loop; handing it to a thread costs
more.

A heartbeat is the prefix alone with both sizes 0. It needs no signature because it carries nothing: it can start no
handler and ends up in no result, and the one thing it does, to put off `stall_timeout_s`, is bounded by the deadline
of the call; whoever can inject one into the connection (TLS: nobody else) could as well delay the real ones.

The signature cannot be taken for one over another kind of document of the same key: announcements and manifests are
JSON, and no JSON begins with byte 0x89.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Buffer

from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc.config import MAX_HEAD_BYTES, MAX_PAYLOAD_BYTES
from trainer.network.rpc.identity import Identity, verify_signature
from trainer.network.rpc.reasons import Reason
from trainer.network.rpc.strict_json import parse_strict_json

__all__ = [
    "HEARTBEAT",
    "MAX_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "Head",
    "SealedFrame",
    "first_line",
    "parse_head",
    "seal",
    "verify_head",
    "verify_payload",
]

MAGIC: Final = b"\x89GnR"
PROTOCOL_VERSION: Final = 2
_PREFIX: Final = struct.Struct("<4sIII")
_SIGNATURE_BYTES: Final = 64
_MAX_COMPLAINT_CHARS: Final = 200
_HEAD_START: Final = _PREFIX.size + _SIGNATURE_BYTES
MAX_FRAME_BYTES: Final = _HEAD_START + MAX_HEAD_BYTES + MAX_PAYLOAD_BYTES
HEARTBEAT: Final = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, 0, 0)

_Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Counter = Annotated[int, Field(ge=0, lt=2**53)]


class Head(BaseModel):
    """What the sender signs about a frame."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["request", "open", "reply", "data", "end"]
    """request begins a call and reply ends it; open begins a stream, and data and end go in both its directions."""
    origin: Literal["caller", "callee"]
    """The direction, so that a frame cannot be turned back at its sender."""
    method: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_./-]{0,63}$")]
    run_id: Annotated[str, Field(min_length=1, max_length=128)]
    sender: _Hex32
    recipient: _Hex32 | Literal[""]
    """"" in the first frame of an exchange: whoever is reached."""
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Drawn by the caller; all frames of the exchange carry it."""
    sequence: _Counter
    """Counts the frames of each direction from 0 without gaps."""
    index: _Counter = 0
    """The sender's own number of a data frame."""
    sent_at: Annotated[float, Field(ge=0, le=2.0**40)]
    """Seconds since 1970; checked in first frames, which alone can be replayed."""
    certificate_sha256: _Hex32 | Literal[""]
    """Of the callee's TLS certificate, as this side knows it: the two differ if somebody stands in between."""
    payload_blake3: _Hex32
    body: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SealedFrame:
    """A frame as received, its head read, nothing about it verified yet."""

    head: Head
    raw: bytes
    payload: memoryview

    @property
    def signature(self) -> bytes:
        """The 64 bytes that are to be one."""
        return self.raw[_PREFIX.size : _HEAD_START]

    @property
    def signed(self) -> bytes:
        """What the signature is over."""
        return self.raw[: _PREFIX.size] + self.raw[_HEAD_START : len(self.raw) - len(self.payload)]


def seal(identity: Identity, fields: dict[str, object], payload: Buffer = b"") -> bytes:
    """Makes a frame; hashes the payload once and copies it once.

    Args:
        identity: signs; becomes the head's sender.
        fields: `Head`'s fields but sender and payload_blake3, already of the right types.
        payload: at most 1 MiB.

    Raises:
        TrainerUsageError: head or payload are larger than a frame may be, or hold what JSON cannot.
    """
    view = memoryview(payload).cast("B")
    digest = blake3(view).hexdigest()
    try:
        text = json.dumps(
            {**fields, "sender": identity.peer_id, "payload_blake3": digest},
            ensure_ascii=False,
            separators=(",", ":"),
            allow_nan=False,
        )
        head = text.encode()
    except ValueError as error:
        raise TrainerUsageError(f"expected a body that JSON can hold, found {error}") from None
    if len(head) > MAX_HEAD_BYTES:
        raise TrainerUsageError(
            f"expected a body of at most {MAX_HEAD_BYTES} bytes with its head, found {len(head)}; send it as payload"
        )
    if len(view) > MAX_PAYLOAD_BYTES:
        raise TrainerUsageError(f"expected a payload of at most {MAX_PAYLOAD_BYTES} bytes, found {len(view)}; split it")
    prefix = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, len(head), len(view))
    return b"".join((prefix, identity.sign(prefix + head), head, view))


def parse_head(raw: bytes) -> SealedFrame | None:
    """Reads sizes and head; None: a heartbeat.

    Raises:
        RefusedError: ``size``, ``magic``, ``protocol`` or ``head``.
    """
    if raw == HEARTBEAT:
        return None
    head_bytes, payload_bytes = _check_prefix(raw)
    payload_start = _HEAD_START + head_bytes
    try:
        head = Head.model_validate(parse_strict_json(raw[_HEAD_START:payload_start]))
    except (ValidationError, ValueError, RecursionError) as error:
        raise RefusedError(Reason.HEAD, f"expected a head of this protocol, found {first_line(error)}") from None
    return SealedFrame(head, raw, memoryview(raw)[payload_start : payload_start + payload_bytes])


def verify_head(frame: SealedFrame) -> None:
    """Checks that the sender named in the head signed it.

    Raises:
        RefusedError: ``signature``.
    """
    if not verify_signature(frame.head.sender, frame.signed, frame.signature):
        raise RefusedError(Reason.SIGNATURE, f"expected a signature by {frame.head.sender}, found none or a wrong one")


def verify_payload(frame: SealedFrame) -> None:
    """Checks that the payload is the one that was signed.

    Raises:
        RefusedError: ``digest``.
    """
    digest = blake3(frame.payload).hexdigest()
    if digest != frame.head.payload_blake3:
        raise RefusedError(Reason.DIGEST, f"expected a payload with BLAKE3 {frame.head.payload_blake3}, found {digest}")


def _check_prefix(raw: bytes) -> tuple[int, int]:
    if not _PREFIX.size <= len(raw) <= MAX_FRAME_BYTES:
        raise RefusedError(Reason.SIZE, f"expected {_PREFIX.size} to {MAX_FRAME_BYTES} bytes, found {len(raw)}")
    magic, version, head_bytes, payload_bytes = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise RefusedError(Reason.MAGIC, f"expected a frame beginning {MAGIC!r}, found {magic!r}")
    if version != PROTOCOL_VERSION:
        raise RefusedError(
            Reason.PROTOCOL,
            f"expected protocol version {PROTOCOL_VERSION}, found {version}; run the same release on all nodes",
        )
    if head_bytes > MAX_HEAD_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise RefusedError(
            Reason.SIZE,
            f"expected at most {MAX_HEAD_BYTES} + {MAX_PAYLOAD_BYTES} bytes, found {head_bytes} + {payload_bytes}",
        )
    if _HEAD_START + head_bytes + payload_bytes != len(raw):
        expected = _HEAD_START + head_bytes + payload_bytes
        raise RefusedError(Reason.SIZE, f"expected {expected} bytes as the prefix says, found {len(raw)}")
    return head_bytes, payload_bytes


def first_line(error: Exception) -> str:
    """The first complaint of a parser or model; short, because names in it came from outside."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"[:_MAX_COMPLAINT_CHARS]
    return str(error).partition("\n")[0][:_MAX_COMPLAINT_CHARS]
