"""A server that answers exactly what it is told to, signed with a key of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from grpc import aio

from trainer.network.rpc import Identity, Peer
from trainer.network.rpc.channels import METHOD_PATH
from trainer.network.rpc.envelope import EnvelopeHeader, parse_header, seal

Script = Callable[["HostileCallee", EnvelopeHeader, "aio.ServicerContext[bytes, bytes]"], Awaitable[None]]


@dataclass
class HostileCallee:
    """Answers every exchange by ``script``."""

    script: Script
    identity: Identity = field(default_factory=Identity.create)
    address: str = ""

    @property
    def peer(self) -> Peer:
        """How it is called."""
        return Peer(self.identity.peer_id, self.address)

    def answer(
        self, request: EnvelopeHeader, *, payload: bytes = b"", identity: Identity | None = None, **changes: object
    ) -> bytes:
        """The reply an honest node would give, but for ``changes``."""
        fields = {
            **request.model_dump(exclude={"sender", "payload_blake3"}),
            "kind": "reply",
            "origin": "callee",
            "recipient": request.sender,
            "body": {},
            **changes,
        }
        return seal(identity or self.identity, fields, payload)

    async def _exchange(self, _requests: object, context: aio.ServicerContext[bytes, bytes]) -> None:
        frame = parse_header(await context.read())
        assert frame is not None
        await self.script(self, frame.header, context)


@asynccontextmanager
async def hostile_callee(script: Script) -> AsyncIterator[HostileCallee]:
    """Listens in plain on loopback."""
    callee = HostileCallee(script)
    service, _, name = METHOD_PATH.lstrip("/").partition("/")
    handlers = {name: grpc.stream_stream_rpc_method_handler(callee._exchange)}
    server = aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    callee.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield callee
    finally:
        await server.stop(None)
        await asyncio.sleep(0)
