"""The asking side: opens calls and streams at peers, and believes nothing that comes back before it is verified.

A peer whose answer fails a check is as good as one that did not answer: the caller gets PeerUnavailableError, and the
reason is counted with the refusals. An answer that the peer has signed, and that is none to the question, is a
MalformedAnswerError. RefusedError is what the *peer* refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel
from typing_extensions import Buffer

from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError
from trainer.network.rpc.bodies import dump_body, parse_body
from trainer.network.rpc.boundary import peer_boundary
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES, RpcConfig
from trainer.network.rpc.dialing import Dialing
from trainer.network.rpc.envelope import SealedFrame
from trainer.network.rpc.exchange import CALL_FRAMES, STREAM_FRAMES, Exchange, ExchangeTerms
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.limits import ByteBudget
from trainer.network.rpc.links import Link, Links
from trainer.network.rpc.messages import Counters, Peer, Reply, peer_name
from trainer.network.rpc.standing import Contacts, Share
from trainer.network.rpc.stream import Failure, FrameWriter, Incoming, Outgoing, ReadAhead, Stream
from trainer.network.rpc.wire import ClientWire, read_within

__all__ = ["Calling"]

_LAST_WRITE_S = 1.0
"""A write ends with its call, which was cancelled before."""

ReplyT = TypeVar("ReplyT", bound=BaseModel)


@dataclass(slots=True)
class _Conversation:
    """The parts of one exchange in progress."""

    peer: Peer
    link: Link
    wire: ClientWire
    exchange: Exchange
    failure: Failure
    writer: FrameWriter
    outgoing: Outgoing
    counters: Counters
    links: Links
    contacts: Contacts

    def open(self, raw: bytes) -> SealedFrame | None:
        """Checks what came back; the first frame that passes also vouches for the peer's certificate."""
        try:
            frame = self.exchange.open(raw)
        except RefusedError as error:
            raise self.unbelievable(error) from None
        if frame is not None and frame.head.sequence == 0:
            self.links.confirm(self.peer, self.link, frame.head.sender)
            self.contacts.answered(frame.head.sender, self.peer.address, frame.head.method)
        return frame

    def unbelievable(self, error: RefusedError) -> PeerUnavailableError:
        """Counts an answer that failed a check."""
        self.counters.count_refusal(error.reason)
        return PeerUnavailableError(self._complaint(error))

    def malformed(self, error: RefusedError) -> MalformedAnswerError:
        """Counts an answer that its peer has signed, and that is none."""
        self.counters.count_refusal(error.reason)
        return MalformedAnswerError(self._complaint(error))

    def _complaint(self, error: RefusedError) -> str:
        return f"{self.wire.who} gave an answer that fails a check ({error.reason}): {error}"


class Calling:
    """Everything an endpoint does as a caller."""

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        config: RpcConfig,
        counters: Counters,
        budget: ByteBudget,
        dialing: Dialing,
        contacts: Contacts,
    ) -> None:
        self._identity = identity
        self._run_id = run_id
        self._config = config
        self._counters = counters
        self._budget = budget
        self._contacts = contacts
        self._links = Links(config, dialing)

    async def close(self) -> None:
        """Ends all exchanges and connections."""
        await self._links.close()

    async def call(
        self,
        peer: Peer,
        method: str,
        body: BaseModel,
        reply_model: type[ReplyT],
        *,
        payload: Buffer,
        timeout_s: float,
        stall_timeout_s: float | None,
    ) -> Reply[ReplyT]:
        """See `Endpoint.call`."""
        silence_s = self._config.stall_timeout_s if stall_timeout_s is None else stall_timeout_s
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline, self._begun(peer, method, timeout_s, CALL_FRAMES) as conversation:
                await conversation.outgoing.send("request", body=dump_body(body), payload=payload)
                reply = await self._reply(conversation, silence_s)
                with peer_boundary(conversation.wire.who):
                    try:
                        parsed = parse_body(reply, reply_model)
                    except RefusedError as error:
                        raise conversation.malformed(error) from None
                return Reply(parsed, reply.payload, reply.head.sender)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise PeerUnavailableError(
                f"{peer_name(peer.peer_id, peer.address)}: expected an answer to {method!r} within {timeout_s:g} s, "
                "found none"
            ) from None

    @asynccontextmanager
    async def open_stream(
        self, peer: Peer, method: str, body: BaseModel, *, timeout_s: float, stall_timeout_s: float | None
    ) -> AsyncIterator[Stream]:
        """See `Endpoint.open_stream`."""
        silence_s = self._config.stall_timeout_s if stall_timeout_s is None else stall_timeout_s
        async with self._begun(peer, method, timeout_s, STREAM_FRAMES) as conversation:
            writer, outgoing = conversation.writer, conversation.outgoing
            await outgoing.send("open", body=dump_body(body))
            ahead = ReadAhead(Share(peer.peer_id or peer.address, True), self._config.max_queued_frames, self._budget)
            incoming = Incoming(conversation.wire, conversation.open, silence_s, ahead, conversation.failure)
            writer.start_heartbeats(self._config.heartbeat_s)
            incoming.start()
            try:
                yield Stream(incoming, outgoing)
                if outgoing.ended and incoming.ended:
                    await incoming.finished()
            finally:
                await incoming.close()

    @asynccontextmanager
    async def _begun(
        self, peer: Peer, method: str, timeout_s: float, expected: frozenset[str]
    ) -> AsyncIterator[_Conversation]:
        """An exchange over a connection to ``peer``; nothing of it is left after the block."""
        who = peer_name(peer.peer_id, peer.address)
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._links.get(peer)
        except TimeoutError:
            raise PeerUnavailableError(f"{who}: expected a connection within {timeout_s:g} s, found none") from None
        grpc_call = link.begin(timeout_s)
        wire = ClientWire(grpc_call, who, self._counters)
        failure = Failure()
        writer = FrameWriter(wire, failure)
        terms = ExchangeTerms(
            method=method,
            run_id=self._run_id,
            nonce=secrets.token_hex(16),
            caller=self._identity.peer_id,
            callee=peer.peer_id,
            certificate_sha256=link.certificate_sha256,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
        )
        exchange = Exchange(terms, "caller", self._identity, expected=expected)
        outgoing = Outgoing(exchange, writer, failure)
        try:
            yield _Conversation(
                peer, link, wire, exchange, failure, writer, outgoing, self._counters, self._links, self._contacts
            )
        except PeerUnavailableError:
            self._links.failed(peer, link)
            raise
        finally:
            try:
                await self._links.finish(link, grpc_call)
            finally:
                await writer.close(_LAST_WRITE_S)

    async def _reply(self, conversation: _Conversation, silence_s: float) -> SealedFrame:
        """Reads until the answer, and until the peer has finished after it."""
        wire = conversation.wire
        reply: SealedFrame | None = None
        while (raw := await read_within(wire, silence_s)) is not None:
            with peer_boundary(wire.who):
                frame = conversation.open(raw)
            reply = frame or reply
        if reply is None:
            raise PeerUnavailableError(f"{wire.who}: expected a reply, found the end of the exchange")
        return reply
