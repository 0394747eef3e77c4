"""The answering side: takes calls and streams in, checks them from cheap to expensive, and runs their handlers.

The order is: free slot of the caller's IP address, a first frame in time, its sizes and header, addressing and clock,
where the run names an authority a credential, signature, replay, the credential's signature if it is new, free slot of
the sender, digest of the payload, body, handler. A call that fails is refused with its reason and counted; nothing a
caller sends ends in more than one log line.

A call whose caller takes nothing for ``stall_timeout_s`` is ended, a stream (whose reader may take its time) when its
slot is needed. As gRPC cannot break off a write, its connection goes with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from grpc import aio
from pydantic import BaseModel

from trainer.errors import PeerUnavailableError, RefusedError, RpcError, TrainerUsageError
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES, RpcConfig
from trainer.network.rpc.connections import Connection, Connections
from trainer.network.rpc.credential import Role
from trainer.network.rpc.envelope import (
    SealedFrame,
    parse_body,
    parse_header,
    peer_boundary,
    verify_header,
    verify_payload,
)
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.limits import ByteBudget, Contacts, ReplayGuard, Share, Slot, Slots, Standing
from trainer.network.rpc.messages import Counters, PeerId, Reason, Reply, Request, peer_name
from trainer.network.rpc.stream import Stream
from trainer.network.rpc.wire import STREAM_FRAMES, CalleeEnd, CallTerms, ServerContext, check_bound, status_for

logger = logging.getLogger(__name__)

_KEEP_STALLED_S = 0.25
"""How long a write may take before a newcomer may get its call's place; most take some milliseconds. Not more, because
a caller that takes up slots in quick succession would always have younger ones."""

_GREYLISTED_PATIENCE = 5.0
"""How many times the usual time a stalled call of a greylisted address is borne, and those behind it wait: each
connection that is cut is opened anew, with all its calls, which costs more than the slot that is held."""

_MAX_GREYLISTED = 1024  # Calls of one greylisted address that wait; of all such addresses together, twice as many.


@dataclass(frozen=True, slots=True)
class Method:
    """A registered method, with exactly one of the two handlers."""

    name: str
    body_model: type[BaseModel]
    max_payload_bytes: int
    any_recipient: bool
    roles: frozenset[Role] | None = None
    """With admission, who may call it by their credentials; None: any member."""
    needs_credential: bool = True
    call_handler: Callable[[Request[Any]], Awaitable[Reply[Any]]] | None = None
    stream_handler: Callable[[Request[Any], Stream], Awaitable[None]] | None = None


class Serving:
    """Everything behind the one gRPC method; the calling side shares its counters, budget and contacts."""

    def __init__(self, identity: Identity, run_id: str, config: RpcConfig, admission: Admission | None = None) -> None:
        self.identity = identity
        self.config = config
        self.admission = admission  # None: anyone may take part.
        self.open_calls: set[_ServedCall] = set()
        """Those whose caller is verified, where it could be revoked."""
        self.counters = Counters()
        self.budget = ByteBudget(config.max_queued_bytes, config.max_queued_bytes_per_peer)
        """For frames of all streams, received ahead of their readers."""
        self.contacts = Contacts()
        self.standing = Standing()
        self.contacts.when_answered.append(self.standing.answered)
        self.connections = Connections(config.max_connections, self.standing)
        waiting = config.max_waiting_per_host
        everything = config.max_calls + config.max_streams + waiting
        self.waiting = Slots("unidentified calls", everything, waiting, waiting)
        self.greylisted = Slots("calls of greylisted addresses", 2 * _MAX_GREYLISTED, waiting, _MAX_GREYLISTED)
        """Calls that wait for the one before them; they stand still by this node's will, so none gives way."""
        self.calls = _slots("calls", config.max_calls, config.max_calls_per_peer)
        self.streams = _slots("streams", config.max_streams, config.max_streams_per_peer)
        self.certificate_sha256 = ""
        self.stopping = False
        self._run_id = run_id
        self._methods: dict[str, Method] = {}
        self._allowed = frozenset(config.allowed_peers)
        self._replay_guard = ReplayGuard(
            window_s=config.max_clock_skew_s,
            max_entries=config.max_remembered,
            max_entries_per_peer=config.max_remembered_per_peer,
        )

    def add(self, method: Method) -> None:
        """Makes a method callable; raises TrainerUsageError if its name is taken."""
        if method.name in self._methods:
            raise TrainerUsageError(f"expected each method registered once, found {method.name!r} again")
        self._methods[method.name] = method

    async def serve(self, _requests: object, context: ServerContext) -> None:
        """Serves one call or stream, and turns its error into a status."""
        try:
            if self.stopping:
                raise RefusedError(Reason.STOPPING, "this node is going down")
            with self.connections.in_use(context.peer()) as connection:
                await _ServedCall(self, connection, context).run()
        except PeerUnavailableError as error:
            logger.debug("a caller went away: %s", error)
            await _abort(context, grpc.StatusCode.UNAVAILABLE, "the caller fell silent", ())
        except RpcError as error:
            internal = RefusedError(Reason.INTERNAL, "the request cannot be handled")
            refusal = error if isinstance(error, RefusedError) else internal
            self.counters.count_refusal(refusal.reason)
            logger.debug("refused a call from %s: %s", context.peer(), error)
            await _abort(context, *status_for(refusal))

    def end_stalled_calls(self) -> None:
        """Ends the calls whose callers have taken nothing for too long."""
        for slot in self.calls.stalled(asyncio.get_running_loop().time() - self.config.stall_timeout_s):
            self.calls.shed(slot)

    def end_calls_of_revoked(self) -> None:
        """Ends the calls and streams of peers that the authority has revoked since they began."""
        if self.admission is not None and self.admission.any_revoked:
            for call in [each for each in self.open_calls if self.admission.is_revoked(each.sender)]:
                call.dismiss()

    def admit(
        self, frame: SealedFrame, connection: Connection, call: CalleeEnd, shown: bytes | None
    ) -> tuple[Method, Share]:
        """Checks a first frame as far as that needs no payload: addressing, clock, credential, signature, replay.

        ``shown`` is the credential that came with the call, if one did.
        """
        header = frame.header
        if header.kind not in ("request", "open") or header.origin != "caller" or header.sequence != 0:
            raise RefusedError(Reason.KIND, f"expected a request first, found {header.kind} {header.sequence}")
        method = self._methods.get(header.method)
        terms = CallTerms(
            method=header.method,
            run_id=self._run_id,
            nonce=header.nonce,
            caller=header.sender,
            callee=self.identity.peer_id,
            certificate_sha256=self.certificate_sha256,
            max_payload_bytes=MAX_PAYLOAD_BYTES if method is None else method.max_payload_bytes,
        )
        anyone = method is not None and method.any_recipient and not header.recipient
        check_bound(frame, terms, header.sender, "" if anyone else self.identity.peer_id)
        if self._allowed and header.sender not in self._allowed:
            raise RefusedError(Reason.SENDER, f"expected a node of the allow-list, found {header.sender}")
        if method is None or (method.stream_handler is None) != (header.kind == "request"):
            raise RefusedError(Reason.METHOD, f"expected a method of this node, found {header.kind} {header.method!r}")
        self._replay_guard.check_clock(header.sent_at)
        admission = self.admission
        if admission is not None and shown is None and not method.needs_credential:
            admission.check_revoked(header.sender)
            admission = None  # What joiners have to read before they can join.
        credential = None if admission is None else admission.screen(header.sender, shown)
        verify_header(frame)
        share = self.standing.share(header.sender, connection.address)
        self._replay_guard.remember(header.sender, bytes.fromhex(header.nonce), header.sent_at, share)
        if admission is not None:
            admission.admit(credential)
            admission.check_role(header.sender, method.roles)
        self.connections.identified(connection, header.sender)
        call.bind(terms, self.identity, STREAM_FRAMES)
        return method, share


class _ServedCall:
    """One call or stream in progress."""

    def __init__(self, serving: Serving, connection: Connection, context: ServerContext) -> None:
        self._serving = serving
        self._connection = connection
        self._call = CalleeEnd(context, serving.counters)
        self._patience = asyncio.timeout(None)
        self.sender: PeerId = ""  # Empty: not verified yet.
        self._is_dismissed = False

    async def run(self) -> None:
        """Serves it; raises RpcError: why it is refused, or the caller went away."""
        try:
            async with self._patience:
                await self._in_turn()
        except TimeoutError:
            if not self._patience.expired():
                raise
            if self._is_dismissed:
                raise RefusedError(Reason.REVOKED, "the run's authority has revoked the caller") from None
            raise RefusedError(
                Reason.STALLED, "expected each frame taken, found this call standing still while others wait"
            ) from None

    def shed(self) -> None:
        """Ends it, and its connection if the other side takes nothing; returns at once."""
        if self.sender:
            self._serving.standing.disprove(self.sender)
        if self._call.stalled_since is not None:
            self._serving.connections.cut_stalled(self._connection)
        with suppress(RuntimeError):  # It has ended meanwhile, and is on its way out.
            self._patience.reschedule(asyncio.get_running_loop().time())

    def dismiss(self) -> None:
        """Ends it because its caller is out of the run; returns at once."""
        self._is_dismissed = True
        self.shed()

    async def _in_turn(self) -> None:
        """Serves it, after those before it where only one at a time is served; waiting costs memory alone."""
        serving, connection = self._serving, self._connection
        if not serving.connections.takes_turns(connection):
            await self._in_slots(patience=1.0)
            return
        share = serving.connections.share(connection)
        waiting = serving.greylisted.take(Slot(share, self._call.who, lambda: None, self.shed))
        try:
            async with asyncio.timeout(_GREYLISTED_PATIENCE * serving.config.stall_timeout_s):
                await connection.turn.acquire()
        except TimeoutError:
            raise RefusedError(Reason.BUSY, "others at this address take no answers; try again later") from None
        finally:
            serving.greylisted.give(waiting)
        try:
            still_greylisted = serving.connections.takes_turns(connection)
            await self._in_slots(patience=_GREYLISTED_PATIENCE if still_greylisted else 1.0)
        finally:
            connection.turn.release()

    async def _in_slots(self, patience: float) -> None:
        """Takes the slots one after the other; gives none back before what was begun for it has ended.

        ``patience`` multiplies the time that a stalled call is borne.
        """
        serving, connection, call = self._serving, self._connection, self._call
        stall_timeout_s = serving.config.stall_timeout_s
        begun_at_s = asyncio.get_running_loop().time()
        share = serving.connections.share(connection)
        slots, slot = serving.waiting, serving.waiting.take(Slot(share, call.who, lambda: begun_at_s, self.shed))
        try:
            shown = await self._exchange_credentials()
            # From the start: a request of 1 MiB may take longer over a slow link than its caller bears silence.
            call.start_heartbeats(serving.config.heartbeat_s)
            frame = await self._first_frame()
            method, share = serving.admit(frame, connection, call, shown)
            sender = self.sender = frame.header.sender
            if serving.admission is not None:
                serving.open_calls.add(self)
            borne_s = (patience - 1.0) * stall_timeout_s
            own = Slot(share, sender, lambda: call.stalled_since, self.shed, _KEEP_STALLED_S, borne_s)
            own_slots = serving.calls if method.stream_handler is None else serving.streams
            own_slots.take(own)
            slots.give(slot)
            slots, slot = own_slots, own
            call.who = peer_name(sender, connection.grpc_peer)
            await self._handle(method, frame, share)
            serving.connections.ended_well(connection, sender)
            for listener in serving.contacts.when_served:
                listener(sender, connection.address, method.name)
        finally:
            serving.open_calls.discard(self)
            try:
                await call.close(patience * stall_timeout_s, partial(serving.connections.cut_stalled, connection))
            finally:
                slots.give(slot)

    async def _first_frame(self) -> SealedFrame:
        """Returns the request, sizes and header checked; lets heartbeats before it pass."""
        timeout_s = self._serving.config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                frame = None
                while frame is None:
                    raw = await self._call.read()
                    if raw is None:
                        raise RefusedError(Reason.NO_REQUEST, "expected a request, found none")
                    with peer_boundary(self._call.who):
                        frame = parse_header(raw)
                return frame
        except TimeoutError:
            raise RefusedError(Reason.NO_REQUEST, f"expected a request within {timeout_s:g} s, found none") from None

    async def _exchange_credentials(self) -> bytes | None:
        """Returns the credential that the caller shows, if it shows one; it is then shown this node's."""
        admission = self._serving.admission
        shown = None if admission is None else self._call.shown_credential()
        if admission is not None and shown is not None and admission.own_wire:
            await self._call.show_credential(admission.own_wire, self._serving.config.request_timeout_s)
        return shown

    async def _handle(self, method: Method, frame: SealedFrame, share: Share) -> None:
        serving, call = self._serving, self._call
        with peer_boundary(frame.header.sender):
            verify_payload(frame)
            body = parse_body(frame, method.body_model)
        request = Request(frame.header.sender, body, frame.payload, self._connection.address)
        if method.call_handler is not None:
            async with self._bounded(method):
                reply = await method.call_handler(request)
                await call.send("reply", body=reply.body, payload=reply.payload)
        elif method.stream_handler is not None:
            stream = Stream(call, serving.config, share, serving.budget)
            try:
                async with stream.reading(), self._bounded(method):
                    await method.stream_handler(request, stream)
                    await call.end()
            finally:
                if isinstance(stream.error, RefusedError):
                    # The caller is told, and it is counted, even where the handler ignored it.
                    raise stream.error

    @asynccontextmanager
    async def _bounded(self, method: Method) -> AsyncIterator[None]:
        """Ends a handler in time, and makes its failure a refusal that says nothing of its inside."""
        max_call_s = self._serving.config.max_call_s
        limit = asyncio.timeout(max_call_s)
        try:
            async with limit:
                yield
        except RefusedError:
            raise
        except Exception as error:
            if error is self._call.error:
                raise
            if limit.expired():
                text = f"expected {method.name!r} to take at most {max_call_s:g} s"
                raise RefusedError(Reason.TIMEOUT, text) from error
            logger.exception("the handler of %r failed", method.name)
            raise RefusedError(
                Reason.INTERNAL,
                f"the handler of {method.name!r} failed; the log of {self._serving.identity.peer_id} says how",
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


def _slots(what: str, max_total: int, max_per_peer: int) -> Slots:
    return Slots(what, max_total, max_per_peer, max(max_per_peer, max_total // 2))
