"""A node's one door: it answers what is registered, and calls others.

    async def answer(request: Request[Ask]) -> Reply[Answer]:
        return Reply(Answer(text=request.body.text))

    endpoint.register("demo/ask", Ask, answer)
    await endpoint.start()
    reply = await endpoint.call(peer, "demo/ask", Ask(text="?"), Answer, timeout_s=10)

Everything happens on the event loop in which `start` was awaited.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, cast

import grpc
from grpc import aio
from pydantic import BaseModel
from typing_extensions import Buffer

from genesis.open_files import raise_open_files
from trainer.errors import TrainerUsageError
from trainer.network.rpc.accepted_sockets import AcceptedSockets
from trainer.network.rpc.calling import Calling
from trainer.network.rpc.certificates import certificate_digest, make_certificate
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES, RpcConfig, has_port
from trainer.network.rpc.dialing import Dialing
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.limits import ByteBudget
from trainer.network.rpc.links import METHOD_PATH, channel_options
from trainer.network.rpc.messages import Counters, Peer, PeerId, Reply, Request
from trainer.network.rpc.serving import CallHandler, Method, Serving, StreamHandler
from trainer.network.rpc.standing import Contacts, Standing
from trainer.network.rpc.stream import Stream, end_task

__all__ = ["Endpoint"]

logger = logging.getLogger(__name__)

_IDLE_MS = 600_000
"""Connections without calls are closed after this; their owners reconnect when they call."""
_UNGUARDED_IDLE_MS = 60_000
"""The same where the platform does not let the guard see connections (`trainer.network.rpc.connections`)."""
_SPARE_DESCRIPTORS = 768
"""For everything in this process but connections from others: connections to others, to the API (336), files, pipes."""
_STOP_S = 5.0
"""How long cancelled handlers may take to clean up."""

BodyT = TypeVar("BodyT", bound=BaseModel)
ReplyT = TypeVar("ReplyT", bound=BaseModel)


class Endpoint:
    """Serves and calls.

    Args:
        identity: signs everything this node says.
        run_id: messages of other runs are refused; 1 to 128 characters.
        config: addresses, times and limits.
    """

    def __init__(self, identity: Identity, run_id: str, config: RpcConfig) -> None:
        if not 1 <= len(run_id) <= 128:
            raise TrainerUsageError(f"expected a run_id of 1 to 128 characters, found {len(run_id)}")
        self._identity = identity
        self._run_id = run_id
        self._config = config
        self.counters = Counters()
        budget = ByteBudget(config.max_queued_bytes, config.max_queued_bytes_per_peer)
        self.contacts = Contacts()
        """Tells who has answered, and who was served."""
        self.dialing = Dialing(config, identity.peer_id)
        """Judges where to connect."""
        self.contacts.when_served.append(lambda _peer_id, host, _method: self.dialing.in_contact(host))
        standing = Standing()
        self.contacts.when_answered.append(standing.answered)
        self._serving = Serving(identity, run_id, config, self.counters, budget, standing, self.contacts)
        self._calling = Calling(identity, run_id, config, self.counters, budget, self.dialing, self.contacts)
        self._server: aio.Server | None = None
        self._guard: asyncio.Task[None] | None = None
        self._port = 0
        self._certificate: bytes | None = None

    @property
    def peer_id(self) -> PeerId:
        """This node's name."""
        return self._identity.peer_id

    @property
    def identity(self) -> Identity:
        """This node's key."""
        return self._identity

    @property
    def run_id(self) -> str:
        """The run it takes part in."""
        return self._run_id

    @property
    def allowed_peers(self) -> frozenset[PeerId]:
        """Who may call; empty: anyone."""
        return frozenset(self._config.allowed_peers)

    @property
    def certificate(self) -> bytes | None:
        """PEM of this node's TLS certificate, for its announcement; None in plain mode and before `start`."""
        return self._certificate

    @property
    def address(self) -> str:
        """``host:port`` under which others reach this node; known after `start`."""
        public = self._config.public_address
        if has_port(public):
            return public
        host = public or _reachable_host(self._config.host)
        return f"[{host}]:{self._port}" if ":" in host and not host.startswith("[") else f"{host}:{self._port}"

    @property
    def peer(self) -> Peer:
        """How to call this node."""
        return Peer(self.peer_id, self.address, self._certificate)

    def register(
        self,
        method: str,
        body_model: type[BodyT],
        handler: Callable[[Request[BodyT]], Awaitable[Reply[Any]]],
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        any_recipient: bool = False,
    ) -> None:
        """Makes a call answerable.

        Args:
            method: lower-case letters, digits and ``_./-``, at most 64.
            body_model: what its body must be.
            handler: called once for each call that passed every check; cancelled when its caller gives up. What it
                raises as RefusedError the caller gets; anything else becomes the refusal ``internal``.
            max_payload_bytes: more is refused.
            any_recipient: also answer callers who know this node's address only.

        Raises:
            TrainerUsageError: the name is taken.
        """
        call_handler = cast(CallHandler, handler)
        self._serving.add(
            Method(method, body_model, max_payload_bytes, any_recipient=any_recipient, call_handler=call_handler)
        )

    def register_stream(
        self,
        method: str,
        body_model: type[BodyT],
        handler: Callable[[Request[BodyT], Stream], Awaitable[None]],
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        any_recipient: bool = False,
    ) -> None:
        """Makes a stream answerable; it ends when the handler returns. Otherwise as `register`."""
        stream_handler = cast(StreamHandler, handler)
        self._serving.add(
            Method(method, body_model, max_payload_bytes, any_recipient=any_recipient, stream_handler=stream_handler)
        )

    async def start(self) -> None:
        """Listens.

        Raises:
            TrainerUsageError: the address cannot be listened on.
        """
        max_connections = self._fitting_connections()
        options = [
            *channel_options(self._config),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", self._config.max_calls_per_peer + self._config.max_streams_per_peer + 16),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.server_handshake_timeout_ms", int(self._config.request_timeout_s * 1000)),
            ("grpc.max_connection_idle_ms", _IDLE_MS if AcceptedSockets.are_visible() else _UNGUARDED_IDLE_MS),
            ("grpc.max_allowed_incoming_connections", max_connections),
        ]
        server = aio.server(options=options)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serving.exchange)
        service, _, name = METHOD_PATH.lstrip("/").partition("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        self._port = self._listen(server)
        self.dialing.listening_at(self.address, self._port)
        await server.start()
        self._server = server
        self._guard = asyncio.create_task(self._serving.guard(self._port), name="genesis-rpc-guard")
        logger.info("node %s answers at %s", self.peer_id, self.address)

    async def stop(self) -> None:
        """Refuses what is new, gives what runs `stop_grace_s`, then ends everything. May be called again."""
        self._serving.stopping = True
        guard, self._guard = self._guard, None
        await end_task(guard)
        server, self._server = self._server, None
        if server is not None:
            try:
                async with asyncio.timeout(self._config.stop_grace_s + _STOP_S):
                    await server.stop(self._config.stop_grace_s)
            except TimeoutError:
                logger.warning("a handler goes on although it was cancelled; stopping without it")
        await self._calling.close()

    async def call(
        self,
        peer: Peer,
        method: str,
        body: BaseModel,
        reply_model: type[ReplyT],
        *,
        payload: Buffer = b"",
        timeout_s: float,
        stall_timeout_s: float | None = None,
    ) -> Reply[ReplyT]:
        """Asks ``peer``; at most once: nothing is tried again.

        Args:
            peer: whom; the answer must be signed by it.
            method: as registered there.
            body: its JSON form takes at most 64 KiB with the head.
            reply_model: what the answer's body must be.
            payload: at most 1 MiB.
            timeout_s: until the answer must be here, connection included.
            stall_timeout_s: silence to bear; None: the configured one.

        Raises:
            PeerUnavailableError: no connection, no answer in time, silence, or an answer that fails a check.
            MalformedAnswerError: an answer of the peer's own that is none.
            RefusedError: the peer refused; ``reason`` says why.
            TrainerUsageError: the request cannot be sent.
        """
        return await self._calling.call(
            peer,
            method,
            body,
            reply_model,
            payload=payload,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
        )

    def open_stream(
        self, peer: Peer, method: str, body: BaseModel, *, timeout_s: float, stall_timeout_s: float | None = None
    ) -> AbstractAsyncContextManager[Stream]:
        """Opens a stream at ``peer``, for use with ``async with``.

        A block left after both sides have ended waits for the peer's handler to finish; left earlier, it cancels the
        handler. Arguments and errors as `call`; errors come from the stream's methods or the end of the block.
        """
        return self._calling.open_stream(peer, method, body, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s)

    def _fitting_connections(self) -> int:
        """As many as configured, or as the process may hold open."""
        wanted = self._config.max_connections
        granted = raise_open_files(wanted + _SPARE_DESCRIPTORS)
        fitting = max(1, min(wanted, max(granted - _SPARE_DESCRIPTORS, granted // 2)))
        if fitting < wanted:
            logger.warning(
                "expected to hold %d files open, found a limit of %d: at most %d connections; raise it by 'ulimit -n'",
                wanted + _SPARE_DESCRIPTORS,
                granted,
                fitting,
            )
        return fitting

    def _listen(self, server: aio.Server) -> int:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.port}"
        try:
            if not self._config.tls:
                return server.add_insecure_port(address)
            own = make_certificate()
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(own.key_pem, own.certificate_pem)]))
        except RuntimeError as error:
            raise TrainerUsageError(
                f"expected to listen on {address}, found it taken or not of this machine ({error}); choose another port"
            ) from None
        self._certificate = own.certificate_pem
        self._serving.certificate_sha256 = certificate_digest(own.certificate_pem)
        return port


def _reachable_host(listen_host: str) -> str:
    """The address others see when this node listens on every interface: that of the default route."""
    if listen_host not in ("0.0.0.0", "::", ""):
        return listen_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation addresses (RFC 5737); a datagram socket sends nothing here
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
