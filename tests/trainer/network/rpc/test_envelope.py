"""The form of a frame: what is written is read back, and nothing else is."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc import Identity
from trainer.network.rpc.envelope import (
    HEARTBEAT,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    SealedFrame,
    parse_head,
    seal,
    verify_head,
    verify_payload,
)

_IDENTITY = Identity.create()
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def fields(**changes: object) -> dict[str, object]:
    """A head's fields as an honest node gives them."""
    return {
        "kind": "request",
        "origin": "caller",
        "method": "test/echo",
        "run_id": "run",
        "recipient": _IDENTITY.peer_id,
        "nonce": "0" * 32,
        "sequence": 0,
        "index": 0,
        "sent_at": 1.5,
        "certificate_sha256": "",
        "body": {"text": "x"},
        **changes,
    }


def opened(raw: bytes) -> SealedFrame | None:
    """All checks of this module."""
    frame = parse_head(raw)
    if frame is not None:
        verify_head(frame)
        verify_payload(frame)
    return frame


def reason_of(raw: bytes) -> str:
    """Why it is refused; "" if it is not."""
    try:
        opened(raw)
    except RefusedError as error:
        return error.reason
    return ""


@pytest.mark.slow
@given(
    kind=st.sampled_from(["request", "open", "reply", "data", "end"]),
    origin=st.sampled_from(["caller", "callee"]),
    method=st.from_regex(r"[a-z0-9][a-z0-9_./-]{0,63}", fullmatch=True),
    run_id=_TEXT.filter(bool),
    nonce=st.binary(min_size=16, max_size=16),
    sequence=st.integers(0, 2**53 - 1),
    index=st.integers(0, 2**53 - 1),
    sent_at=st.floats(0, 2.0**40),
    body=st.none() | st.dictionaries(_TEXT, st.integers(-(2**62), 2**62) | _TEXT | st.lists(st.booleans(), max_size=3)),
    payload=st.binary(max_size=5000),
)
def test_what_is_sealed_is_read_back(nonce: bytes, payload: bytes, **changes: object) -> None:
    frame = opened(seal(_IDENTITY, fields(nonce=nonce.hex(), **changes), payload))
    assert frame is not None
    assert frame.payload == payload
    assert frame.head.sender == _IDENTITY.peer_id
    assert {name: getattr(frame.head, name) for name in changes} == changes


@pytest.mark.parametrize("payload", [bytearray(b"abc"), memoryview(b"xabcx")[1:4], memoryview(b"abc")])
def test_any_buffer_can_be_a_payload(payload: bytes) -> None:
    frame = opened(seal(_IDENTITY, fields(), payload))
    assert frame is not None
    assert frame.payload == b"abc"


def test_an_array_goes_as_its_bytes() -> None:
    frame = opened(seal(_IDENTITY, fields(), memoryview(struct.pack("<2i", 1, 2)).cast("i")))
    assert frame is not None
    assert bytes(frame.payload) == struct.pack("<2i", 1, 2)


def test_the_largest_frame_fits_and_one_byte_more_does_not() -> None:
    frame = opened(seal(_IDENTITY, fields(), bytes(1 << 20)))
    assert frame is not None
    assert len(frame.payload) == 1 << 20
    with pytest.raises(TrainerUsageError, match="split it"):
        seal(_IDENTITY, fields(), bytes((1 << 20) + 1))


@pytest.mark.parametrize("body", [{"text": "x" * 65536}, {"number": float("nan")}, {"text": "\ud800"}])
def test_a_body_that_does_not_fit_is_the_senders_mistake(body: dict[str, object]) -> None:
    with pytest.raises(TrainerUsageError, match="expected a body"):
        seal(_IDENTITY, fields(body=body))


def test_a_heartbeat_is_nothing_but_its_prefix() -> None:
    assert opened(HEARTBEAT) is None
    assert reason_of(HEARTBEAT + b"x") == "size"
    assert reason_of(HEARTBEAT[:-1]) == "size"
    assert reason_of(HEARTBEAT[:4] + struct.pack("<I", PROTOCOL_VERSION + 1) + HEARTBEAT[8:]) == "protocol"


def _resized(raw: bytes, head_bytes: int, payload_bytes: int) -> bytes:
    return raw[:8] + struct.pack("<II", head_bytes, payload_bytes) + raw[16:]


def test_each_kind_of_damage_has_its_reason() -> None:
    raw = seal(_IDENTITY, fields(), b"payload")
    head_bytes, payload_bytes = struct.unpack_from("<II", raw, 8)
    damaged = {
        "short": (raw[:15], "size"),
        "empty": (b"", "size"),
        "long": (bytes(MAX_FRAME_BYTES + 1), "size"),
        "truncated": (raw[:-1], "size"),
        "extended": (raw + b"x", "size"),
        "sizes of 4 GiB": (_resized(raw, 2**32 - 1, 2**32 - 1), "size"),
        "head over its bound": (_resized(raw, 65537, payload_bytes), "size"),
        "payload over its bound": (_resized(raw, head_bytes, (1 << 20) + 1), "size"),
        "border moved": (_resized(raw, head_bytes - 1, payload_bytes + 1), "head"),
        "other magic": (b"\x16\x03\x01\x00" + raw[4:], "magic"),
        "other version": (raw[:4] + struct.pack("<I", PROTOCOL_VERSION + 1) + raw[8:], "protocol"),
        "unsigned": (raw[:16] + bytes(64) + raw[80:], "signature"),
        "signature changed": (raw[:20] + bytes([raw[20] ^ 1]) + raw[21:], "signature"),
        "head changed": (raw.replace(b'"sequence":0', b'"sequence":1'), "signature"),
        "sender changed": (raw.replace(_IDENTITY.peer_id.encode(), Identity.create().peer_id.encode()), "signature"),
        "payload changed": (raw[:-1] + b"D", "digest"),
    }
    assert {name: reason_of(frame) for name, (frame, _) in damaged.items()} == {
        name: reason for name, (_, reason) in damaged.items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "reset"},
        {"origin": "nobody"},
        {"method": "Echo"},
        {"method": "a" * 65},
        {"method": "echo\n"},
        {"run_id": ""},
        {"run_id": "r" * 129},
        {"recipient": "x"},
        {"recipient": "A" * 64},
        {"nonce": "0" * 31},
        {"nonce": None},
        {"sequence": -1},
        {"sequence": 2**53},
        {"sequence": 1.5},
        {"sequence": "0"},
        {"sequence": True},
        {"index": 2**60},
        {"sent_at": -1},
        {"sent_at": 1e300},
        {"sent_at": "now"},
        {"certificate_sha256": None},
        {"body": []},
        {"body": "x"},
        {"extra": 1},
    ],
)
def test_a_signed_head_with_wrong_fields_is_refused(changes: dict[str, object]) -> None:
    assert reason_of(seal(_IDENTITY, fields(**changes))) == "head"


def test_a_head_without_a_field_is_refused() -> None:
    for name in fields():
        rest = {key: value for key, value in fields().items() if key != name}
        assert reason_of(seal(_IDENTITY, rest)) == ("" if name in ("index", "body") else "head")


@pytest.mark.slow
@settings(max_examples=300)
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7), payload=st.binary(max_size=100))
def test_no_bit_of_a_frame_can_be_flipped(position: int, bit: int, payload: bytes) -> None:
    raw = bytearray(seal(_IDENTITY, fields(), payload))
    raw[position % len(raw)] ^= 1 << bit
    assert reason_of(bytes(raw)) in {"magic", "protocol", "size", "head", "signature", "digest"}


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert reason_of(data) in {"size", "magic"} or data == HEARTBEAT


@given(st.binary(max_size=300), st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_random_bytes_after_a_good_prefix_are_refused(data: bytes, head_bytes: int, payload_bytes: int) -> None:
    prefix = HEARTBEAT[:8]
    assert reason_of(prefix + struct.pack("<II", head_bytes, payload_bytes) + data) in {"size", "head", "signature"}
    if len(data) > 80:
        fitting = prefix + struct.pack("<II", len(data) - 64, 0) + data
        assert reason_of(fitting) == "head"


def test_complaints_are_short_whatever_the_head_says() -> None:
    with pytest.raises(RefusedError) as caught:
        opened(seal(_IDENTITY, fields(**{"k" * 60000: 1})))
    assert len(str(caught.value)) < 400
