"""A node's single entry point for calls: it answers what is registered, and calls others.

Everything happens on the event loop in which `start` was awaited. A peer whose answer fails a check is as good as one
that did not answer: the caller gets PeerUnavailableError, and the reason is counted with the refusals. A signed answer
that does not fit the question is a MalformedAnswerError. RefusedError is what the *peer* refused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import grpc
from grpc import aio
from pydantic import BaseModel
from typing_extensions import Buffer

from genesis.open_files import raise_open_files
from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError, TrainerUsageError
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.channels import ChannelPool, PeerChannel, channel_options, generic_handler
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES, RpcConfig, has_port
from trainer.network.rpc.connections import AcceptedSockets
from trainer.network.rpc.credential import Role
from trainer.network.rpc.dialing import Dialing
from trainer.network.rpc.envelope import EnvelopeHeader, SealedFrame, parse_body, peer_boundary
from trainer.network.rpc.identity import Identity, certificate_digest, make_certificate
from trainer.network.rpc.limits import Share
from trainer.network.rpc.messages import Peer, PeerId, Reason, Reply, Request, peer_name
from trainer.network.rpc.serving import Method, Serving
from trainer.network.rpc.stream import Stream
from trainer.network.rpc.wire import CALL_FRAMES, STREAM_FRAMES, CallerEnd, CallTerms, end_task

logger = logging.getLogger(__name__)

_IDLE_MS = 600_000  # Connections without calls are closed after this; their owners reconnect when they call.
_UNGUARDED_IDLE_MS = 60_000
"""The same where the platform does not let the guard see connections (`trainer.network.rpc.connections`)."""
SPARE_DESCRIPTORS = 768
"""For everything in this process but connections from others: connections to others, to the API (336), files, pipes."""
_STOP_TIMEOUT_S = 5.0  # How long cancelled handlers may take to clean up.
_LAST_WRITE_TIMEOUT_S = 1.0  # A write ends with its call, which was cancelled before.

BodyT = TypeVar("BodyT", bound=BaseModel)
ReplyT = TypeVar("ReplyT", bound=BaseModel)


class Reach(Protocol):
    """Another way by which others connect to an endpoint than its own address (`trainer.network.relay`)."""

    @property
    def address(self) -> str:
        """``host:port`` to give to others; empty: the endpoint's own."""

    @property
    def relayed_bytes(self) -> tuple[int, int]:
        """Bytes sent and received that way."""

    def may_be_caller(self, remote_host: str) -> bool:
        """Whether whoever comes from this address, as limits count hosts, may have come that way, from anywhere."""

    async def start(self, endpoint: Endpoint) -> None:
        """Begins, once ``endpoint`` listens."""

    async def stop(self) -> None:
        """Ends it."""


class Endpoint:
    """Serves and calls, signing everything as ``identity``; messages of other runs than ``run_id`` are refused.

    With ``admission`` so are peers without a credential, as callers and as callees.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        config: RpcConfig,
        admission: Admission | None = None,
        reach: Reach | None = None,
    ) -> None:
        if not 1 <= len(run_id) <= 128:
            raise TrainerUsageError(f"expected a run_id of 1 to 128 characters, found {len(run_id)}")
        self.identity = identity
        self.peer_id: PeerId = identity.peer_id
        self.run_id = run_id
        self.allowed_peers = frozenset(config.allowed_peers)  # Who may call; empty: anyone.
        self.certificate: bytes | None = None
        """PEM of this node's TLS certificate, for its announcement; None in plain mode and before `start`."""
        self._config = config
        self.admission = admission  # None: anyone may take part.
        self._serving = Serving(identity, run_id, config, admission)
        self.counters = self._serving.counters
        self.contacts = self._serving.contacts  # Tells who has answered, and who was served.
        self.dialing = Dialing(config, identity.peer_id)  # Judges where to connect.
        self.contacts.when_served.append(lambda _peer_id, host, _method: self.dialing.in_contact(host))
        self._channels = ChannelPool(config, self.dialing)
        self._server: aio.Server | None = None
        self._guard: asyncio.Task[None] | None = None
        self._parting: asyncio.Task[None] | None = None
        self._port = 0
        self._reach = reach

    @property
    def address(self) -> str:
        """``host:port`` under which others reach this node; known after `start`."""
        if self._reach is not None and (elsewhere := self._reach.address):
            return elsewhere
        public = self._config.public_address
        if has_port(public):
            return public
        host = public or reachable_host(self._config.host)
        return f"[{host}]:{self._port}" if ":" in host and not host.startswith("[") else f"{host}:{self._port}"

    @property
    def port(self) -> int:
        """The TCP port that it listens on; known after `start`."""
        return self._port

    @property
    def listen_host(self) -> str:
        """The interface that it listens on."""
        return self._config.host

    @property
    def relayed_bytes(self) -> tuple[int, int]:
        """Bytes sent and received by way of relays; the rest of `counters` came directly."""
        return self._reach.relayed_bytes if self._reach is not None else (0, 0)

    def may_be_relayed(self, remote_address: str) -> bool:
        """Returns whether the address of a request may be that of a relay's connections, and not the caller's own."""
        return self._reach is not None and self._reach.may_be_caller(remote_address)

    @property
    def peer(self) -> Peer:
        """How to call this node."""
        return Peer(self.peer_id, self.address, self.certificate)

    def register(
        self,
        method: str,
        body_model: type[BodyT],
        handler: Callable[[Request[BodyT]], Awaitable[Reply[Any]]],
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        any_recipient: bool = False,
        needs_credential: bool = True,
        roles: Collection[Role] | None = None,
    ) -> None:
        """Makes a call answerable; ``any_recipient``: also to callers who know this node's address only.

        In a run with an authority it is answered to members of these ``roles`` (None: any), and to anybody who shows
        no credential where it does not need one.

        The handler is called once for each call that passed every check, and cancelled when its caller gives up. What
        it raises as RefusedError the caller gets; anything else becomes the refusal ``internal``. A method's name is of
        lower-case letters, digits and ``_./-``, at most 64, and not taken yet.
        """
        allowed = None if roles is None else frozenset(roles)
        self._serving.add(
            Method(
                method, body_model, max_payload_bytes, any_recipient, allowed, needs_credential, call_handler=handler
            )
        )

    def register_stream(
        self,
        method: str,
        body_model: type[BodyT],
        handler: Callable[[Request[BodyT], Stream], Awaitable[None]],
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        any_recipient: bool = False,
        roles: Collection[Role] | None = None,
    ) -> None:
        """Makes a stream answerable; it ends when the handler returns. Otherwise as `register`."""
        allowed = None if roles is None else frozenset(roles)
        self._serving.add(Method(method, body_model, max_payload_bytes, any_recipient, allowed, stream_handler=handler))

    async def start(self) -> None:
        """Begins to listen; raises TrainerUsageError where the address cannot be listened on."""
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
        server.add_generic_rpc_handlers((generic_handler(self._serving.serve),))
        self._port = self._listen(server)
        self.dialing.listening_at(self.address, self._port, reachable_host("0.0.0.0"))
        await server.start()
        self._server = server
        guarding = self._serving.connections.guard(self._port, self._sweep)
        self._guard = asyncio.create_task(guarding, name="genesis-rpc-guard")
        if self._reach is not None:
            await self._reach.start(self)
        logger.info("node %s answers at %s", self.peer_id, self.address)

    async def stop(self) -> None:
        """Refuses what is new, gives what runs `stop_grace_s`, then ends everything. May be called again."""
        self._serving.stopping = True
        if self._reach is not None:
            await self._reach.stop()
        guard, self._guard = self._guard, None
        await end_task(guard)
        parting, self._parting = self._parting, None
        await end_task(parting)
        server, self._server = self._server, None
        if server is not None:
            try:
                async with asyncio.timeout(self._config.stop_grace_s + _STOP_TIMEOUT_S):
                    await server.stop(self._config.stop_grace_s)
            except TimeoutError:
                logger.warning("a handler still runs although it was cancelled; stopping without it")
        await self._channels.close()

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
        """Calls ``peer`` once: nothing is tried again.

        The peer must sign the answer, whose body must be a ``reply_model``. ``timeout_s`` includes the connection;
        ``stall_timeout_s`` is the silence to bear (None: the configured one). The body's JSON takes at most 64 KiB with
        the header, the payload 1 MiB.

        Raises:
            PeerUnavailableError: no connection, no answer in time, silence, or an answer that fails a check.
            MalformedAnswerError: the peer signed an answer that does not fit the question.
            RefusedError: the peer refused; ``reason`` says why.
            TrainerUsageError: the request cannot be sent.
        """
        silence_s = self._config.stall_timeout_s if stall_timeout_s is None else stall_timeout_s
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                found = await self._call(peer, method, body, payload, timeout_s, silence_s, shows=False)
                if found is None:  # The peer has forgotten this node's credential.
                    found = await self._call(peer, method, body, payload, timeout_s, silence_s, shows=True)
            call, reply = found or (None, None)
            if call is None or reply is None:
                raise PeerUnavailableError(f"{peer_name(peer.peer_id, peer.address)}: expected a reply, found none")
            with peer_boundary(call.who):
                try:
                    parsed = parse_body(reply, reply_model)
                except RefusedError as error:
                    raise MalformedAnswerError(call.complaint(error)) from None
            return Reply(parsed, reply.payload, reply.header.sender)
        except TimeoutError:
            if not deadline.expired():
                raise
            who, what = peer_name(peer.peer_id, peer.address), f"an answer to {method!r}"
            raise PeerUnavailableError(f"{who}: expected {what} within {timeout_s:g} s, found none") from None

    async def _call(
        self,
        peer: Peer,
        method: str,
        body: BaseModel,
        payload: Buffer,
        timeout_s: float,
        silence_s: float,
        *,
        shows: bool,
    ) -> tuple[CallerEnd, SealedFrame] | None:
        """Calls once; returns None where the peer wants to see a credential that was not shown with this call."""
        async with self._begun(peer, method, timeout_s, CALL_FRAMES, shows=shows) as call:
            reply = None
            try:
                await call.send("request", body=body, payload=payload)
                while (raw := await call.read_within(silence_s)) is not None:  # Until the peer has finished.
                    with peer_boundary(call.who):
                        reply = call.open(raw) or reply
            except RefusedError as error:
                is_forgotten = error.reason == Reason.CREDENTIAL and not call.shows_credential
                if self.admission is None or not self.admission.own_wire or not is_forgotten:
                    raise
                return None
            if reply is None:
                raise PeerUnavailableError(f"{call.who}: expected a reply, found the end of the call")
            return call, reply

    @asynccontextmanager
    async def open_stream(
        self, peer: Peer, method: str, body: BaseModel, *, timeout_s: float, stall_timeout_s: float | None = None
    ) -> AsyncIterator[Stream]:
        """Opens a stream at ``peer``, for use with ``async with``.

        A block left after both sides have ended waits for the peer's handler to finish; left earlier, it cancels the
        handler. Arguments and errors as `call`; errors come from the stream's methods or the end of the block.
        """
        async with self._begun(peer, method, timeout_s, STREAM_FRAMES, shows=True) as call:
            await call.send("open", body=body)
            share = Share(peer.peer_id or peer.address, True)
            stream = Stream(call, self._config, share, self._serving.budget, stall_timeout_s)
            call.start_heartbeats(self._config.heartbeat_s)
            async with stream.reading():
                yield stream
                await stream.finish()

    @asynccontextmanager
    async def _begun(
        self, peer: Peer, method: str, timeout_s: float, expected: frozenset[str], *, shows: bool
    ) -> AsyncIterator[CallerEnd]:
        """Begins a call over a channel to ``peer``, and ends it with the block.

        With ``shows`` it is shown this node's credential, whatever it has seen before: a stream is not tried again.
        """

        def answered(header: EnvelopeHeader) -> None:
            self._check_callee(header.sender, call, channel)
            self._channels.confirm(peer, channel, header.sender)
            for listener in self.contacts.when_answered:
                listener(header.sender, peer.address, header.method)

        who = peer_name(peer.peer_id, peer.address)
        if self.admission is not None and self.admission.any_revoked and peer.peer_id:
            try:
                self.admission.check_revoked(peer.peer_id)
            except RefusedError as error:
                raise PeerUnavailableError(f"{who} is not called: {error}") from None
        try:
            async with asyncio.timeout(timeout_s):
                channel = await self._channels.get(peer)
        except TimeoutError:
            raise PeerUnavailableError(f"{who}: expected a connection within {timeout_s:g} s, found none") from None
        credential = self._credential_for(peer, channel, shows)
        grpc_call = channel.begin(timeout_s, credential)
        call = CallerEnd(grpc_call, who, self.counters, answered, shows_credential=bool(credential))
        terms = CallTerms(
            method=method,
            run_id=self.run_id,
            nonce=secrets.token_hex(16),
            caller=self.peer_id,
            callee=peer.peer_id,
            certificate_sha256=channel.certificate_sha256,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
        )
        call.bind(terms, self.identity, expected)
        try:
            yield call
        except PeerUnavailableError:
            await self._channels.drop_if_dead(peer, channel)
            raise
        finally:
            try:
                await self._channels.finish(channel, grpc_call)
            finally:
                await call.close(_LAST_WRITE_TIMEOUT_S)

    def _credential_for(self, peer: Peer, channel: PeerChannel, shows: bool) -> bytes:
        """Returns what to show with a call: nothing where both sides know each other's already."""
        admission = self.admission
        if admission is None:
            return b""
        is_known = peer.peer_id is not None and admission.is_member(peer.peer_id)
        return b"" if is_known and channel.shown == admission.own_wire and not shows else admission.own_wire

    def _check_callee(self, sender: PeerId, call: CallerEnd, channel: PeerChannel) -> None:
        """Checks that who has answered may take part; raises PeerUnavailableError."""
        if self.admission is None:
            return
        try:
            self.admission.admit(self.admission.screen(sender, call.shown))
        except RefusedError as error:
            raise PeerUnavailableError(call.complaint(error)) from None
        if call.shows_credential:
            channel.shown = self.admission.own_wire

    def _sweep(self) -> None:
        """Ends what must not go on, once a second."""
        self._serving.end_stalled_calls()
        if self.admission is not None and self.admission.any_revoked:
            self._serving.end_calls_of_revoked()
            self._parting = asyncio.create_task(self._channels.part_with(self.admission.is_revoked))

    def _fitting_connections(self) -> int:
        """As many as configured, or as the process may hold open."""
        needed = self._config.max_connections + SPARE_DESCRIPTORS
        granted = raise_open_files(needed)
        fitting = max(1, min(self._config.max_connections, max(granted - SPARE_DESCRIPTORS, granted // 2)))
        if fitting < self._config.max_connections:
            text = (
                "expected to hold %d files open, found a limit of %d: at most %d connections; raise it by 'ulimit -n'"
            )
            logger.warning(text, needed, granted, fitting)
        return fitting

    def _listen(self, server: aio.Server) -> int:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.port}"
        try:
            if not self._config.tls:
                return server.add_insecure_port(address)
            certificate_pem, key_pem = make_certificate()
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key_pem, certificate_pem)]))
        except RuntimeError:  # gRPC's own text names an environment variable of its own, and no cause.
            raise TrainerUsageError(
                f"expected to listen on {address}, found it taken or not of this machine; see 'ss -ltnp', or choose "
                "another port"
            ) from None
        self.certificate = certificate_pem
        self._serving.certificate_sha256 = certificate_digest(certificate_pem)
        return port


def reachable_host(listen_host: str) -> str:
    """The address others see when this node listens on every interface: that of the default route."""
    if listen_host not in ("0.0.0.0", "::", ""):
        return listen_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation addresses (RFC 5737); a datagram socket sends nothing here
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
