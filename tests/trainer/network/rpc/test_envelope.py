"""The form of a frame and JSON with one reading only; keys, signatures, and the certificates they vouch for."""

from __future__ import annotations

import json
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.hostile_caller import header_fields
from tests.support.rpc_node import ask, endpoint_pair, refused, running_endpoint
from trainer.errors import PeerUnavailableError, RefusedError, TrainerUsageError
from trainer.network.rpc import Identity, Peer, load_or_create_identity, parse_strict_json, verify_signature
from trainer.network.rpc.channels import METHOD_PATH, fetch_certificate, generic_handler
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
from trainer.network.rpc.identity import CERTIFICATE_NAME, certificate_digest, make_certificate

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


@pytest.mark.parametrize("payload", [bytearray(b"abc"), memoryview(bytes(range(8))).cast("i"), bytes(1 << 20)])
def test_any_buffer_of_up_to_1_mib_goes_as_its_bytes(payload: bytes | memoryview) -> None:
    frame = _opened(_sealed(payload))
    assert frame is not None and bytes(frame.payload) == bytes(payload)


@pytest.mark.parametrize("body", [{"text": "x" * 65536}, {"number": float("nan")}, {"text": "\ud800"}])
def test_a_body_that_does_not_fit_is_the_senders_mistake(body: dict[str, object]) -> None:
    with pytest.raises(TrainerUsageError, match="expected a body"):
        _sealed(body=body)


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


_MAKE = """
import sys
from trainer.network.rpc import load_or_create_identity
sys.stdout.write(load_or_create_identity(sys.argv[1]).peer_id)
"""


def test_an_identity_is_made_once_and_kept_to_its_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys" / "node.pem"
    first = load_or_create_identity(path)
    assert load_or_create_identity(path).peer_id == first.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["node.pem"]
    assert not caplog.records
    path.chmod(0o644)
    load_or_create_identity(path)
    assert "chmod 600" in caplog.text


@pytest.mark.slow
def test_processes_that_start_together_share_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "node.pem"
    makers = [
        subprocess.Popen([sys.executable, "-c", _MAKE, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    ids = {maker.communicate(timeout=30)[0] for maker in makers}
    assert ids == {load_or_create_identity(path).peer_id}


@pytest.mark.parametrize("content", [b"", b"not a key", b"\x00" * 32])
def test_a_file_that_is_no_key_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.pem"
    path.write_bytes(content)
    with pytest.raises(TrainerUsageError, match=r"node\.pem.*move it away"):
        load_or_create_identity(path)
    assert path.read_bytes() == content
    with pytest.raises(TrainerUsageError, match="cannot be used"):
        load_or_create_identity(path / "node.pem")


def test_signatures_are_of_one_key_under_one_name_over_one_message() -> None:
    signer, other = Identity.create(), Identity.create()
    name, signature = signer.peer_id, signer.sign(b"message")
    assert verify_signature(name, b"message", signature)
    assert not verify_signature(name, b"massage", signature)
    assert not verify_signature(name, b"message", signature[:-1])
    for wrong in {other.peer_id, name.upper(), f" {name}", name[:32] + " " + name[32:], "", "zz"} - {name}:
        assert not verify_signature(wrong, b"message", signature)


@asynccontextmanager
async def _man_in_the_middle(victim: Peer) -> AsyncIterator[str]:
    """Ends TLS with a certificate of its own and passes every byte on; gives its address."""
    assert victim.certificate is not None
    credentials = grpc.ssl_channel_credentials(victim.certificate)
    override = [("grpc.ssl_target_name_override", CERTIFICATE_NAME)]
    async with aio.secure_channel(victim.address, credentials, options=override) as channel:

        async def relay(requests: AsyncIterator[bytes], context: aio.ServicerContext) -> AsyncIterator[bytes]:
            try:
                async for raw in channel.stream_stream(METHOD_PATH)(requests):
                    yield raw
            except aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))

        server = aio.server()
        server.add_generic_rpc_handlers((generic_handler(relay),))
        certificate_pem, key_pem = make_certificate()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key_pem, certificate_pem)]))
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


@pytest.mark.slow
async def test_nothing_passes_through_a_man_in_the_middle() -> None:
    async with endpoint_pair(tls=True) as (caller, callee):
        async with _man_in_the_middle(callee.peer) as address:
            for _ in range(2):
                # Nothing is known of the certificate: what the relay shows is taken, and named in the signed request.
                with refused("certificate"):
                    await ask(caller, Peer(callee.peer_id, address))
            with refused("certificate"):
                await ask(caller, Peer(None, address))
            # The certificate is known from an announcement: there is not even a connection.
            with pytest.raises(PeerUnavailableError):
                await ask(caller, Peer(callee.peer_id, address, callee.certificate))
        assert callee.counters.refused == {"certificate": 3}
        assert (await ask(caller, Peer(callee.peer_id, callee.address))).sender == callee.peer_id


@pytest.mark.slow
async def test_where_no_certificate_is_to_be_had_it_is_said_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = silent.getsockname()
        with pytest.raises(PeerUnavailableError, match=r"shows no TLS certificate \(no answer in 1 s\)"):
            await fetch_certificate(*where, 1.0)
    with pytest.raises(PeerUnavailableError, match="refuses connections"):
        await fetch_certificate(*where, 20.0)


async def test_each_start_makes_another_certificate_and_none_and_others_do_not_mix() -> None:
    async with endpoint_pair(tls=True) as (one, other), running_endpoint(tls=False) as plain:
        assert one.certificate != other.certificate and plain.certificate is None
        host, _, port = one.address.rpartition(":")
        shown = await fetch_certificate(host, int(port), 5.0)
        assert certificate_digest(shown) == certificate_digest(one.certificate or b"")
        header, footer = b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n"
        for certificate in (b"", b"\xff\xfe", header, header + b"QUJD\n" + footer, header + b"?\n" + footer):
            with pytest.raises(PeerUnavailableError):
                await ask(one, Peer(other.peer_id, other.address, certificate))
        for caller, callee in ((one, plain), (plain, one)):
            with pytest.raises(PeerUnavailableError):
                await ask(caller, Peer(callee.peer_id, callee.address))
        assert (await ask(one, other.peer)).sender == other.peer_id


async def test_a_request_to_a_nodes_former_life_is_refused_by_its_next() -> None:
    """The replay guard forgets with the process; the certificate, which requests name, is a new one each time."""
    identity = Identity.create()
    async with running_endpoint(tls=True) as caller, running_endpoint(identity, tls=True) as second:
        former, _ = make_certificate()
        channel = await caller._channels.get(second.peer)
        channel.certificate_sha256 = certificate_digest(former)
        with refused("certificate"):
            await ask(caller, second.peer)
