"""The form of a frame, and JSON with one reading only: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.hostile_caller import header_fields
from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc import Identity, parse_strict_json
from trainer.network.rpc.envelope import (
    HEARTBEAT,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    SealedFrame,
    parse_header,
    seal,
    verify_header,
    verify_payload,
)

_IDENTITY = Identity.create()
_CHARACTERS = st.characters(exclude_categories=["Cs"])
_TEXT = st.text(_CHARACTERS, max_size=20)
_NEXT_VERSION = struct.pack("<I", PROTOCOL_VERSION + 1)


def _sealed(payload: object = b"", **changes: object) -> bytes:
    return seal(_IDENTITY, {**header_fields(_IDENTITY.peer_id), **changes}, payload)  # type: ignore[arg-type]


def _opened(raw: bytes) -> SealedFrame | None:
    """The frame after all checks."""
    frame = parse_header(raw)
    if frame is not None:
        verify_header(frame)
        verify_payload(frame)
    return frame


def _reason(raw: bytes) -> str:
    """Why it is refused; "" if it is not."""
    try:
        _opened(raw)
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
    frame = _opened(_sealed(payload, nonce=nonce.hex(), **changes))
    assert frame is not None
    assert frame.payload == payload
    assert frame.header.sender == _IDENTITY.peer_id
    assert {name: getattr(frame.header, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"xabcx")[1:4], b"abc"),
        (memoryview(struct.pack("<2i", 1, 2)).cast("i"), struct.pack("<2i", 1, 2)),
        (bytes(1 << 20), bytes(1 << 20)),
    ],
)
def test_any_buffer_of_up_to_1_mib_goes_as_its_bytes(payload: object, expected: bytes) -> None:
    frame = _opened(_sealed(payload))
    assert frame is not None and bytes(frame.payload) == expected


@pytest.mark.parametrize(
    ("payload", "body", "said"),
    [
        (bytes((1 << 20) + 1), {}, "split it"),
        (b"", {"text": "x" * 65536}, "expected a body"),
        (b"", {"number": float("nan")}, "expected a body"),
        (b"", {"text": "\ud800"}, "expected a body"),
    ],
)
def test_what_does_not_fit_is_the_senders_mistake(payload: bytes, body: dict[str, object], said: str) -> None:
    with pytest.raises(TrainerUsageError, match=said):
        _sealed(payload, body=body)


def _resized(raw: bytes, header_bytes: int, payload_bytes: int) -> bytes:
    return raw[:8] + struct.pack("<II", header_bytes, payload_bytes) + raw[16:]


def test_each_kind_of_damage_has_its_reason() -> None:
    raw = _sealed(b"payload")
    header_bytes, payload_bytes = struct.unpack_from("<II", raw, 8)
    damaged = {
        "a heartbeat": (HEARTBEAT, ""),
        "a heartbeat and more": (HEARTBEAT + b"x", "size"),
        "a shorter one": (HEARTBEAT[:-1], "size"),
        "one of another version": (HEARTBEAT[:4] + _NEXT_VERSION + HEARTBEAT[8:], "protocol"),
        "short": (raw[:15], "size"),
        "empty": (b"", "size"),
        "long": (bytes(MAX_FRAME_BYTES + 1), "size"),
        "truncated": (raw[:-1], "size"),
        "extended": (raw + b"x", "size"),
        "sizes of 4 GiB": (_resized(raw, 2**32 - 1, 2**32 - 1), "size"),
        "header over its bound": (_resized(raw, 65537, payload_bytes), "size"),
        "payload over its bound": (_resized(raw, header_bytes, (1 << 20) + 1), "size"),
        "border moved": (_resized(raw, header_bytes - 1, payload_bytes + 1), "head"),
        "other magic": (b"\x16\x03\x01\x00" + raw[4:], "magic"),
        "other version": (raw[:4] + _NEXT_VERSION + raw[8:], "protocol"),
        "unsigned": (raw[:16] + bytes(64) + raw[80:], "signature"),
        "signature changed": (raw[:20] + bytes([raw[20] ^ 1]) + raw[21:], "signature"),
        "header changed": (raw.replace(b'"sequence":0', b'"sequence":1'), "signature"),
        "sender changed": (raw.replace(_IDENTITY.peer_id.encode(), Identity.create().peer_id.encode()), "signature"),
        "payload changed": (raw[:-1] + b"D", "digest"),
    }
    assert {name: _reason(frame) for name, (frame, _) in damaged.items()} == {
        name: reason for name, (_, reason) in damaged.items()
    }
    assert _opened(HEARTBEAT) is None


@pytest.mark.parametrize(
    "changes",
    [
        *({"kind": "reset"}, {"origin": "nobody"}, {"method": "Echo"}, {"method": "a" * 65}, {"method": "echo\n"}),
        *({"run_id": ""}, {"run_id": "r" * 129}, {"recipient": "x"}, {"recipient": "A" * 64}),
        *({"nonce": "0" * 31}, {"nonce": None}, {"certificate_sha256": None}),
        *({"sequence": -1}, {"sequence": 2**53}, {"sequence": 1.5}, {"sequence": "0"}, {"sequence": True}),
        *({"index": 2**60}, {"sent_at": -1}, {"sent_at": 1e300}, {"sent_at": "now"}),
        *({"body": []}, {"body": "x"}, {"extra": 1}),
    ],
)
def test_a_signed_header_with_wrong_fields_is_refused(changes: dict[str, object]) -> None:
    assert _reason(_sealed(**changes)) == "head"


def test_a_header_without_a_field_is_refused_and_complaints_are_short_whatever_it_says() -> None:
    fields = header_fields(_IDENTITY.peer_id)
    for name in fields:
        rest = {key: value for key, value in fields.items() if key != name}
        assert _reason(seal(_IDENTITY, rest)) == ("" if name in ("index", "body") else "head")
    with pytest.raises(RefusedError) as caught:
        _opened(_sealed(**{"k" * 60000: 1}))
    assert len(str(caught.value)) < 400


@pytest.mark.slow
@settings(max_examples=300)
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7), payload=st.binary(max_size=100))
def test_no_bit_of_a_frame_can_be_flipped(position: int, bit: int, payload: bytes) -> None:
    raw = bytearray(_sealed(payload))
    raw[position % len(raw)] ^= 1 << bit
    assert _reason(bytes(raw)) in {"magic", "protocol", "size", "head", "signature", "digest"}


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(_CHARACTERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(_CHARACTERS), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(_CHARACTERS), _JSON), st.booleans())
@example({"a": '[{"' * 100}, True)  # Brackets inside strings do not count as depth.
def test_what_json_writes_is_read_as_it_was(value: dict[str, object], ascii_only: bool) -> None:
    assert parse_strict_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    "data",
    [
        *(b'{"a":1,"a":1}', b'{"a":{"b":1,"b":2}}'),
        *(b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":1e999}'),
        *(b'{"a":' + b"9" * 20 + b"}", b'{"a":' + b"9" * 5000 + b"}"),
        *(b'{"a":"\\ud800"}', b'{"a":["\\udc00"]}', b'{"\\ud800":1}'),
        *(b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", b'{"a":' + b"[" * 30000, b'{"a":' * 8000),
        *(b"[]", b"1", b'"text"', b"null", b"", b"{", b"{}x", b"{'a':1}", b'{"a":"\x00"}'),
        *(b"\xff\xfe{\x00}\x00", b'{"a":"\xff"}', b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16")),
    ],
)
def test_what_parsers_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_strict_json(data)
