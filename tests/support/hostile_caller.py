"""A caller that sends exactly the bytes it is told to, and reports why they were refused."""

from __future__ import annotations

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
