"""The one form of every message: a prefix of fixed size, a signature, a JSON header, a payload.

    offset  bytes
    0       4      magic, 89 47 6E 52
    4       4      protocol version                       (unsigned 32 bit little endian, like the sizes)
    8       4      size of the header, at most 65,536
    12      4      size of the payload, at most 1,048,576
    16      64     ed25519 signature of the sender over bytes 0..16 and the header
    80      ...    header: one JSON object, `EnvelopeHeader`
    ...     ...    payload: raw bytes, whose BLAKE3 is in the header

Checks go from cheap to expensive, each with its own reason: sizes, magic and version before JSON (`parse_header`), JSON
before the signature (`verify_header`, 140 µs), that before the digest of the payload (`verify_payload`, 0.17 ms a MiB).
A header proves nothing before `verify_header`.

A heartbeat is the prefix alone with both sizes 0. It needs no signature because it carries nothing but a delay of
`stall_timeout_s`, which the deadline of the call bounds.

The signature cannot be taken for one over another kind of document of the same key: announcements and manifests are
JSON, and no JSON begins with byte 0x89.
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from blake3 import blake3
from pydantic import BaseModel, Field, ValidationError
from typing_extensions import Buffer

from trainer.errors import MalformedAnswerError, RefusedError, TrainerError, TrainerUsageError
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.network.rpc.identity import Identity, verify_signature
from trainer.network.rpc.messages import Message, Reason

MAGIC: Final = b"\x89GnR"
PROTOCOL_VERSION: Final = 3
_PREFIX: Final = struct.Struct("<4sIII")
_HEADER_START: Final = _PREFIX.size + 64
_MAX_HEADER_BYTES: Final = 1 << 16
MAX_FRAME_BYTES: Final = _HEADER_START + _MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
HEARTBEAT: Final = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, 0, 0)

_MAX_COMPLAINT_CHARS: Final = 200
_MAX_DEPTH: Final = 32
_MAX_INTEGER_DIGITS: Final = 19

BodyT = TypeVar("BodyT", bound=BaseModel)

_Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Counter = Annotated[int, Field(ge=0, lt=2**53)]


logger = logging.getLogger(__name__)


class EnvelopeHeader(Message):
    """What the sender signs about a frame."""

    kind: Literal["request", "open", "reply", "data", "end"]
    """request begins a call and reply ends it; open begins a stream, and data and end go in both its directions."""
    origin: Literal["caller", "callee"]  # The direction, so that a frame cannot be turned back at its sender.
    method: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_./-]{0,63}$")]
    run_id: Annotated[str, Field(min_length=1, max_length=128)]
    sender: _Hex32
    recipient: _Hex32 | Literal[""]  # "" in the first frame of a call to an address of which no identity is known.
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # Drawn by the caller; all frames of the call carry it.
    sequence: _Counter  # Counts the frames of each direction from 0 without gaps.
    index: _Counter = 0  # The sender's own number of a data frame.
    sent_at: Annotated[float, Field(ge=0, le=2.0**40)]
    """Seconds since 1970; checked in first frames, which alone can be replayed."""
    certificate_sha256: _Hex32 | Literal[""]
    """Of the callee's TLS certificate as the sender knows it: the two differ if there is a man in the middle."""
    payload_blake3: _Hex32
    body: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SealedFrame:
    """A frame as received, its header read, nothing about it verified yet."""

    header: EnvelopeHeader
    raw: bytes
    payload: memoryview


def seal(identity: Identity, fields: dict[str, object], payload: Buffer = b"") -> bytes:
    """Makes a frame; raises TrainerUsageError for more than a frame may hold, or what JSON cannot.

    ``fields`` are those of `EnvelopeHeader` but sender and payload_blake3, already of the right types.
    """
    view = memoryview(payload).cast("B")
    fields = {**fields, "sender": identity.peer_id, "payload_blake3": blake3(view).hexdigest()}
    try:
        header = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise TrainerUsageError(f"expected a body that JSON can hold, found {error}") from None
    if len(header) > _MAX_HEADER_BYTES:
        raise TrainerUsageError(
            f"expected a body of at most {_MAX_HEADER_BYTES} bytes with its header, found {len(header)}; "
            "send it as payload"
        )
    if len(view) > MAX_PAYLOAD_BYTES:
        raise TrainerUsageError(f"expected a payload of at most {MAX_PAYLOAD_BYTES} bytes, found {len(view)}; split it")
    prefix = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, len(header), len(view))
    return b"".join((prefix, identity.sign(prefix + header), header, view))


def parse_header(raw: bytes) -> SealedFrame | None:
    """Reads sizes and header of a frame; returns None for a heartbeat. Raises RefusedError."""
    if raw == HEARTBEAT:
        return None
    if not _PREFIX.size <= len(raw) <= MAX_FRAME_BYTES:
        raise RefusedError(Reason.SIZE, f"expected {_PREFIX.size} to {MAX_FRAME_BYTES} bytes, found {len(raw)}")
    magic, version, header_bytes, payload_bytes = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise RefusedError(Reason.MAGIC, f"expected a frame beginning {MAGIC!r}, found {magic!r}")
    if version != PROTOCOL_VERSION:
        text = f"expected protocol version {PROTOCOL_VERSION}, found {version}; run the same release on all nodes"
        raise RefusedError(Reason.PROTOCOL, text)
    if header_bytes > _MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        most = f"{_MAX_HEADER_BYTES} + {MAX_PAYLOAD_BYTES}"
        raise RefusedError(Reason.SIZE, f"expected at most {most} bytes, found {header_bytes} + {payload_bytes}")
    payload_start = _HEADER_START + header_bytes
    if len(raw) != payload_start + payload_bytes:
        expected = payload_start + payload_bytes
        raise RefusedError(Reason.SIZE, f"expected {expected} bytes as the prefix says, found {len(raw)}")
    try:
        header = EnvelopeHeader.model_validate(parse_strict_json(raw[_HEADER_START:payload_start]))
    except (ValidationError, ValueError, RecursionError) as error:
        raise RefusedError(Reason.HEAD, f"expected a header of this protocol, found {first_line(error)}") from None
    return SealedFrame(header, raw, memoryview(raw)[payload_start:])


def verify_header(frame: SealedFrame) -> None:
    """Checks that the sender named in the header signed it; raises RefusedError (``signature``)."""
    raw, sender = frame.raw, frame.header.sender
    signed = raw[: _PREFIX.size] + raw[_HEADER_START : len(raw) - len(frame.payload)]
    if not verify_signature(sender, signed, raw[_PREFIX.size : _HEADER_START]):
        raise RefusedError(Reason.SIGNATURE, f"expected a signature by {sender}, found none or a wrong one")


def verify_payload(frame: SealedFrame) -> None:
    """Checks that the payload is the one that was signed; raises RefusedError (``digest``)."""
    expected, found = frame.header.payload_blake3, blake3(frame.payload).hexdigest()
    if found != expected:
        raise RefusedError(Reason.DIGEST, f"expected a payload with BLAKE3 {expected}, found {found}")


def first_line(error: Exception) -> str:
    """Returns the first complaint of a parser or model, cut short, because names in it came from outside."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"[:_MAX_COMPLAINT_CHARS]
    return str(error).partition("\n")[0][:_MAX_COMPLAINT_CHARS]


@contextmanager
def peer_boundary(who: str) -> Iterator[None]:
    """Encloses where a message of the peer ``who`` becomes a value, and nothing that is this node's own affair.

    Errors of this package, time-outs and cancellations pass through unchanged. What nobody foresaw is logged with its
    traceback and becomes a MalformedAnswerError: passed through it would end the task that had asked, and the process.
    """
    try:
        yield
    except (TrainerError, TimeoutError):
        raise
    except Exception as error:
        logger.warning("%s sent what cannot be handled", who, exc_info=True)
        raise MalformedAnswerError(
            f"{who} sent what cannot be handled ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def parse_body(frame: SealedFrame, model: type[BodyT]) -> BodyT:
    """Parses the body of a verified frame; raises RefusedError (``body``) where the model does not take it."""
    expected = f"expected a body such as {model.__name__}"
    if frame.header.body is None:
        raise RefusedError(Reason.BODY, f"{expected}, found none")
    try:
        # As JSON, not as the parsed object: strict models take a list for a tuple only where JSON has no tuples.
        return model.model_validate_json(json.dumps(frame.header.body))
    except ValidationError as error:
        raise RefusedError(Reason.BODY, f"{expected}, found {first_line(error)}") from None


def parse_strict_json(data: bytes) -> dict[str, Any]:
    """Parses one JSON object that has one reading only; raises ValueError for anything else.

    Two parsers that disagree about a message are a way to have it signed as one thing and obeyed as another. So what
    parsers are known to disagree on is refused: repeated keys, NaN and infinities (also spelled 1e999), bytes that are
    not UTF-8, lone surrogates, integers that do not fit 64 bits, and nesting deeper than any message here.

    The size of ``data``, which the caller has bounded, bounds what is built here (some 30 bytes a byte).
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("expected a JSON object, found bytes that are not UTF-8") from None
    _check_depth(text)
    value = _DECODER.decode(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")  # noqa: TRY004
    if "\\u" in text:
        # Escapes can spell lone surrogates, which UTF-8 cannot: writing finds them (UnicodeEncodeError).
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_depth(text: str) -> None:
    """Bounds the nesting before the parser recurses; counting brackets is enough for most messages."""
    if text.count("[") + text.count("{") <= _MAX_DEPTH:
        return
    depth = 0
    in_string = False
    for token in re.finditer(r'\\.|["\[\]{}]', text):
        char = token.group()
        if char == '"':
            in_string = not in_string
        elif not in_string and char in "[{":
            depth += 1
            if depth > _MAX_DEPTH:
                raise ValueError(f"expected at most {_MAX_DEPTH} levels of nesting, found more")
        elif not in_string and char in "]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("expected each key once, found one repeated")
    return result


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"expected finite numbers, found {text[:24]}")
    return value


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"expected integers of at most {_MAX_INTEGER_DIGITS} digits, found one of {len(text)}")
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_float, parse_float=_float, parse_int=_integer)
