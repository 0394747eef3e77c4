"""A caller that sends exactly the bytes it is told to; and one of its own HTTP/2 frames, that grants no window."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from grpc import aio

from tests.support.rpc_node import RUN_ID
from trainer.network.rpc import Identity, Peer
from trainer.network.rpc.channels import METHOD_PATH
from trainer.network.rpc.envelope import HEARTBEAT, parse_header, seal
from trainer.network.rpc.identity import certificate_digest
from trainer.network.rpc.wire import REASON_KEY


def header_fields(recipient: str, **changes: object) -> dict[str, object]:
    """The fields of an honest request's header, but for ``changes``."""
    return {
        "kind": "request",
        "origin": "caller",
        "method": "test/echo",
        "run_id": RUN_ID,
        "recipient": recipient,
        "nonce": "e" * 32,
        "sequence": 0,
        "index": 0,
        "sent_at": time.time(),
        "certificate_sha256": "",
        "body": {},
        **changes,
    }


@dataclass
class HostileCaller:
    """Knows the protocol, and obeys it only as far as a test wants."""

    channel: aio.Channel
    victim: Peer
    identity: Identity = field(default_factory=Identity.create)
    _num_frames: int = 0

    def frame(self, *, payload: bytes = b"", identity: Identity | None = None, **changes: object) -> bytes:
        """A frame that would be accepted, but for ``changes``; every one has a nonce of its own."""
        self._num_frames += 1
        fields = header_fields(self.victim.peer_id or "") | {"nonce": f"{self._num_frames:032x}"} | changes
        return seal(identity or self.identity, fields, payload)

    async def send(self, *frames: bytes, path: str = METHOD_PATH, compression: grpc.Compression | None = None) -> str:
        """Sends frames as one exchange; the reason for the refusal, ``accepted`` if there is an answer, or the status
        gRPC itself gave."""
        method: aio.StreamStreamMultiCallable[bytes, bytes] = self.channel.stream_stream(path)
        call = method(_in_turn(frames), timeout=30, compression=compression)
        try:
            async for raw in call:
                if raw != HEARTBEAT and (answer := parse_header(raw)) is not None and answer.header.kind != "data":
                    return "accepted"
            return "silently ended"
        except aio.AioRpcError as error:
            reason = (error.trailing_metadata() or {}).get(REASON_KEY)
            return str(reason) if reason else f"status {error.code().name.lower()}"
        finally:
            call.cancel()


async def _in_turn(frames: Iterable[bytes]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame


@asynccontextmanager
async def hostile_caller(victim: Peer) -> AsyncIterator[HostileCaller]:
    """Connected in plain, without any bound on what it sends."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with aio.insecure_channel(victim.address, options=options) as channel:
        yield HostileCaller(channel, victim)


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4


class NoWindow:
    """One connection whose every stream has a window of 0, so that no byte of an answer can be sent."""

    def __init__(self, peer: Peer, run_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peer = peer
        self._run_id = run_id
        self._reader = reader
        self._writer = writer
        self._next_stream = 1
        certificate = writer.get_extra_info("ssl_object")
        self._scheme = b"\x86" if certificate is None else b"\x87"
        self._certificate_sha256 = ""
        if certificate is not None:
            pem = ssl.DER_cert_to_PEM_cert(certificate.getpeercert(binary_form=True))
            self._certificate_sha256 = certificate_digest(pem.encode())
        self.num_ended = 0
        """Streams that the other side has ended."""

    @property
    def is_closed(self) -> bool:
        return self._reader.at_eof()

    def greet(self) -> None:
        self._writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0)))

    def call(
        self, method: str, body: dict[str, object], *, identity: Identity, kind: str = "request", payload: bytes = b""
    ) -> None:
        """Opens a call as ``identity``; ``kind`` is ``open`` for a stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = header_fields(
            self.peer.peer_id or "",
            kind=kind,
            method=method,
            run_id=self._run_id,
            nonce=f"{stream:016x}{time.monotonic_ns():016x}",
            certificate_sha256=self._certificate_sha256,
            body=body,
        )
        message = seal(identity, fields, payload)
        data = b"\0" + struct.pack(">I", len(message)) + message
        end = _END_STREAM if kind == "request" else 0
        self._writer.write(_frame(_HEADERS, _END_HEADERS, stream, self._head()) + _frame(_DATA, end, stream, data))

    async def answer_pings(self) -> None:
        """Does what keeps a connection alive, and counts the streams that end; returns when the connection does."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await self._reader.readexactly(9)
                size_bytes, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                data = await self._reader.readexactly(size_bytes)
                if kind in (_SETTINGS, _PING) and not flags & _ACK:
                    self._writer.write(_frame(kind, _ACK, 0, data if kind == _PING else b""))
                self.num_ended += kind == 3 or (kind == _HEADERS and bool(flags & _END_STREAM))

    def _head(self) -> bytes:
        fields = [b"\x83", self._scheme, b"\x04" + _text(METHOD_PATH), b"\x01" + _text("node.genesis.invalid")]
        more = {"content-type": "application/grpc", "te": "trailers"}
        return b"".join(fields + [b"\0" + _text(name) + _text(value) for name, value in more.items()])


def any_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


@asynccontextmanager
async def no_window_connection(
    peer: Peer, run_id: str, *, tls: bool = False, source_host: str = "127.0.0.1"
) -> AsyncIterator[NoWindow]:
    """Connected and greeted; pings are answered until the block ends."""
    host, _, port = peer.address.rpartition(":")
    context = any_certificate() if tls else None
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, local_addr=(source_host, 0))
    connection = NoWindow(peer, run_id, reader, writer)
    connection.greet()
    answering = asyncio.create_task(connection.answer_pings())
    try:
        yield connection
    finally:
        answering.cancel()
        await asyncio.wait({answering})
        writer.transport.abort()


def _frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def _text(text: str) -> bytes:
    """A string literal of HPACK (RFC 7541), not compressed; at most 126 characters."""
    raw = text.encode("ascii")
    return bytes([len(raw)]) + raw
