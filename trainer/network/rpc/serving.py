"""The answering side: takes calls and streams in, checks them from cheap to dear, and runs their handlers.

The order is: free slot of the caller's IP address, a first frame in time, its sizes and head, addressing and clock,
signature, replay, free slot of the sender, digest of the payload, body, handler. Whatever fails is refused with its
reason and counted; nothing a caller sends ends in more than one log line.

A call whose caller takes nothing for ``stall_timeout_s`` is ended, a stream (whose reader may take its time) when its
slot is needed. As gRPC cannot break off a write, its connection goes with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc import aio
from pydantic import BaseModel

from trainer.errors import PeerUnavailableError, RefusedError, RpcError, TrainerUsageError
from trainer.network.rpc.bodies import dump_body, parse_body
from trainer.network.rpc.boundary import peer_boundary
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES, RpcConfig
from trainer.network.rpc.connections import Connection, Connections
from trainer.network.rpc.envelope import SealedFrame, parse_head, verify_head, verify_payload
from trainer.network.rpc.exchange import STREAM_FRAMES, Exchange, ExchangeTerms, check_bound
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.limits import ByteBudget, Claim, ServingLimits
from trainer.network.rpc.messages import Counters, Reply, Request, peer_name
from trainer.network.rpc.reasons import Reason, status_for
from trainer.network.rpc.replay import ReplayGuard
from trainer.network.rpc.standing import Contacts, Share, Standing
from trainer.network.rpc.stream import Failure, FrameWriter, Incoming, Outgoing, ReadAhead, Stream
from trainer.network.rpc.wire import ServerContext, ServerWire

__all__ = ["CallHandler", "Method", "Serving", "StreamHandler"]

logger = logging.getLogger(__name__)

_KEEP_STALLED_S = 0.25
"""How long a write may take before a newcomer may get its call's place; most take some milliseconds. Not more, because
one who takes up slots in quick succession would always have younger ones."""

_GREYLISTED_PATIENCE = 5.0
"""So many times the usual time a stalled call of a greylisted address is borne, and those behind it wait: each
connection that is cut is opened anew, with all its calls, which costs more than the slot that is held."""

CallHandler: TypeAlias = Callable[[Request[Any]], Awaitable[Reply[Any]]]
StreamHandler: TypeAlias = Callable[[Request[Any], Stream], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Method:
    """What is registered under a name: exactly one of the two handlers."""

    name: str
    body_model: type[BaseModel]
    max_payload_bytes: int
    any_recipient: bool
    call_handler: CallHandler | None = None
    stream_handler: StreamHandler | None = None


class Serving:
    """Everything behind the one gRPC method.

    Args:
        identity: this node.
        run_id: the run it takes part in.
        config: limits and times.
        counters: of the endpoint.
        budget: bytes of streams read ahead, shared with the calling side.
        standing: which peers are proven, shared with the calling side.
        contacts: are told of what was served.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        config: RpcConfig,
        counters: Counters,
        budget: ByteBudget,
        standing: Standing,
        contacts: Contacts,
    ) -> None:
        self._contacts = contacts
        self._identity = identity
        self._run_id = run_id
        self._config = config
        self._counters = counters
        self._budget = budget
        self._standing = standing
        self._connections = Connections(config.max_connections, standing)
        self._methods: dict[str, Method] = {}
        self._allowed = frozenset(config.allowed_peers)
        self._limits = ServingLimits(config)
        self._guard = ReplayGuard(
            window_s=config.max_clock_skew_s,
            max_entries=config.max_remembered,
            max_entries_per_peer=config.max_remembered_per_peer,
        )
        self.certificate_sha256 = ""
        self.stopping = False

    def add(self, method: Method) -> None:
        """Makes a method callable.

        Raises:
            TrainerUsageError: its name is taken.
        """
        if method.name in self._methods:
            raise TrainerUsageError(f"expected each method registered once, found {method.name!r} again")
        self._methods[method.name] = method

    async def exchange(self, _requests: object, context: ServerContext) -> None:
        """Serves one call or stream, and turns what goes wrong into its status."""
        try:
            await self._serve(context)
        except RefusedError as error:
            self._counters.count_refusal(error.reason)
            logger.debug("refused a call from %s: %s", context.peer(), error)
            code, text, metadata = status_for(error)
            await _abort(context, code, text, metadata)
        except PeerUnavailableError as error:
            logger.debug("a caller went away: %s", error)
            await _abort(context, grpc.StatusCode.UNAVAILABLE, "the caller fell silent", ())
        except RpcError as error:
            logger.debug("refused a call from %s: %s", context.peer(), error)
            self._counters.count_refusal(Reason.INTERNAL)
            code, text, metadata = status_for(RefusedError(Reason.INTERNAL, "the request cannot be handled"))
            await _abort(context, code, text, metadata)

    async def guard(self, port: int) -> None:
        """Ends connections and calls that take up what others need, for as long as the server listens at ``port``."""
        await self._connections.guard(port, self._end_stalled_calls)

    def _end_stalled_calls(self) -> None:
        for slot in self._limits.calls.stalled(asyncio.get_running_loop().time() - self._config.stall_timeout_s):
            slot.shed()

    async def _serve(self, context: ServerContext) -> None:
        if self.stopping:
            raise RefusedError(Reason.STOPPING, "this node is going down")
        with self._connections.in_use(context.peer()) as connection:
            wire = ServerWire(context, context.peer(), self._counters)
            writer = FrameWriter(wire, failure := Failure())
            served = _Served(connection, wire, writer, failure)
            patience = asyncio.timeout(None)
            try:
                async with patience:
                    await self._in_turn(served, _Shedding(patience, served, self._connections, self._standing))
            except TimeoutError:
                if not patience.expired():
                    raise
                raise RefusedError(
                    Reason.STALLED, "expected each frame taken, found this call standing still while others wait"
                ) from None

    async def _in_turn(self, served: _Served, shedding: _Shedding) -> None:
        """Serves the call, after those before it where only one at a time is served; what waits costs memory alone."""
        connection = served.connection
        if not self._connections.takes_turns(connection):
            await self._in_slots(served, shedding)
            return
        share = self._connections.share(connection)
        waiting = self._limits.greylisted.take(Claim(share, served.wire.who, lambda: None, shedding.shed))
        try:
            async with asyncio.timeout(_GREYLISTED_PATIENCE * self._config.stall_timeout_s):
                await connection.turn.acquire()
        except TimeoutError:
            raise RefusedError(Reason.BUSY, "others at this address take no answers; try again later") from None
        finally:
            waiting.give()
        try:
            await self._in_slots(served, shedding)
        finally:
            connection.turn.release()

    async def _in_slots(self, served: _Served, shedding: _Shedding) -> None:
        """Takes the slots one after the other; none is given back before what was begun for it has ended."""
        connection, wire, writer = served.connection, served.wire, served.writer
        patience = _GREYLISTED_PATIENCE if self._connections.takes_turns(connection) else 1.0
        begun_at = asyncio.get_running_loop().time()
        share = self._connections.share(connection)
        slot = self._limits.waiting.take(Claim(share, wire.who, lambda: begun_at, shedding.shed))
        try:
            # From the start: a request of 1 MiB may take longer over a slow link than its caller bears silence.
            writer.start_heartbeats(self._config.heartbeat_s)
            frame = await self._first_frame(wire)
            method, terms, share = self._admit(frame, connection)
            sender = shedding.peer_id = frame.head.sender
            slots = self._limits.calls if method.stream_handler is None else self._limits.streams
            borne_s = (patience - 1.0) * self._config.stall_timeout_s
            claim = Claim(share, sender, lambda: writer.stalled_since, shedding.shed, _KEEP_STALLED_S, borne_s)
            waited, slot = slot, slots.take(claim)
            waited.give()
            wire.who = peer_name(sender, connection.grpc_peer)
            await self._handle(served, method, terms, frame, share)
            self._connections.ended_well(connection, sender)
            self._contacts.served(sender, connection.address, method.name)
        finally:
            try:
                cut = partial(self._connections.cut_stalled, connection)
                await writer.close(patience * self._config.stall_timeout_s, cut)
            finally:
                slot.give()

    async def _handle(
        self, served: _Served, method: Method, terms: ExchangeTerms, frame: SealedFrame, share: Share
    ) -> None:
        with peer_boundary(frame.head.sender):
            verify_payload(frame)
            body = parse_body(frame, method.body_model)
        request = Request(frame.head.sender, body, frame.payload, served.connection.address)
        exchange = Exchange(terms, "callee", self._identity, expected=STREAM_FRAMES, num_received=1)
        failure = served.failure
        outgoing = Outgoing(exchange, served.writer, failure)
        if method.call_handler is not None:
            await self._answer(method, method.call_handler(request), outgoing, failure)
        elif method.stream_handler is not None:
            ahead = ReadAhead(share, self._config.max_queued_frames, self._budget)
            incoming = Incoming(served.wire, exchange.open, self._config.stall_timeout_s, ahead, failure)
            handler = method.stream_handler(request, Stream(incoming, outgoing))
            await self._converse(method, handler, incoming, outgoing, failure)

    async def _first_frame(self, wire: ServerWire) -> SealedFrame:
        """The request, sizes and head checked; heartbeats before it are let pass."""
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                frame = None
                while frame is None:
                    raw = await wire.read()
                    if raw is None:
                        raise RefusedError(Reason.NO_REQUEST, "expected a request, found none")
                    with peer_boundary(wire.who):
                        frame = parse_head(raw)
                return frame
        except TimeoutError:
            raise RefusedError(
                Reason.NO_REQUEST, f"expected a request within {self._config.request_timeout_s:g} s, found none"
            ) from None

    def _admit(self, frame: SealedFrame, connection: Connection) -> tuple[Method, ExchangeTerms, Share]:
        """Everything that can be checked without the payload: addressing, clock, signature, replay."""
        head = frame.head
        if head.kind not in ("request", "open") or head.origin != "caller" or head.sequence != 0:
            raise RefusedError(Reason.KIND, f"expected a request first, found {head.kind} {head.sequence}")
        method = self._methods.get(head.method)
        terms = ExchangeTerms(
            method=head.method,
            run_id=self._run_id,
            nonce=head.nonce,
            caller=head.sender,
            callee=self._identity.peer_id,
            certificate_sha256=self.certificate_sha256,
            max_payload_bytes=MAX_PAYLOAD_BYTES if method is None else method.max_payload_bytes,
        )
        anyone = method is not None and method.any_recipient and not head.recipient
        check_bound(frame, terms, head.sender, "" if anyone else self._identity.peer_id)
        if self._allowed and head.sender not in self._allowed:
            raise RefusedError(Reason.SENDER, f"expected a node of the allow-list, found {head.sender}")
        if method is None or (method.stream_handler is None) != (head.kind == "request"):
            raise RefusedError(Reason.METHOD, f"expected a method of this node, found {head.kind} {head.method!r}")
        self._guard.check_clock(head.sent_at)
        verify_head(frame)
        share = self._standing.share(head.sender, connection.address)
        self._guard.remember(head.sender, bytes.fromhex(head.nonce), head.sent_at, share)
        self._connections.identified(connection, head.sender)
        return method, terms, share

    async def _answer(
        self, method: Method, handler: Awaitable[Reply[Any]], outgoing: Outgoing, failure: Failure
    ) -> None:
        async def answer() -> None:
            reply = await handler
            await outgoing.send("reply", body=dump_body(reply.body), payload=reply.payload)

        await self._run_handler(method, answer(), failure)

    async def _converse(
        self, method: Method, handler: Awaitable[None], incoming: Incoming, outgoing: Outgoing, failure: Failure
    ) -> None:
        async def converse() -> None:
            await handler
            await outgoing.end()

        incoming.start()
        try:
            await self._run_handler(method, converse(), failure)
        finally:
            await incoming.close()
            if isinstance(incoming.error, RefusedError):
                # Said to the caller and counted even where the handler made nothing of it.
                raise incoming.error

    async def _run_handler(self, method: Method, work: Awaitable[None], failure: Failure) -> None:
        limit = asyncio.timeout(self._config.max_call_s)
        try:
            async with limit:
                await work
        except RefusedError:
            raise
        except Exception as error:
            if failure.error is not None and error is failure.error:
                raise
            if limit.expired():
                raise RefusedError(
                    Reason.TIMEOUT, f"expected {method.name!r} to take at most {self._config.max_call_s:g} s"
                ) from error
            logger.exception("the handler of %r failed", method.name)
            raise RefusedError(
                Reason.INTERNAL, f"the handler of {method.name!r} failed; the log of {self._identity.peer_id} says how"
            ) from error


async def _abort(
    context: ServerContext, code: grpc.StatusCode, text: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    """Ends a call by a status, if its caller is still there."""
    try:
        await context.abort(code, text, metadata)
    except aio.AbortError:
        raise
    except aio.BaseError:
        # Its connection ended, and gRPC is about to cancel it. It logs a traceback for whatever else is raised here.
        raise asyncio.CancelledError from None


@dataclass(frozen=True, slots=True)
class _Served:
    """The parts of one exchange in progress."""

    connection: Connection
    wire: ServerWire
    writer: FrameWriter
    failure: Failure


class _Shedding:
    """How one exchange is ended when its slot is needed, or when it has stalled for too long."""

    def __init__(
        self, patience: asyncio.Timeout, served: _Served, connections: Connections, standing: Standing
    ) -> None:
        self._patience = patience
        self._served = served
        self._connections = connections
        self._standing = standing
        self.peer_id = ""
        """Whose it is; empty: not known yet."""

    def shed(self) -> None:
        """Ends the exchange, and its connection if the other side takes nothing; returns at once."""
        if self.peer_id:
            self._standing.disprove(self.peer_id)
        if self._served.writer.stalled_since is not None:
            self._connections.cut_stalled(self._served.connection)
        with suppress(RuntimeError):  # It has ended meanwhile, and is on its way out.
            self._patience.reschedule(asyncio.get_running_loop().time())
