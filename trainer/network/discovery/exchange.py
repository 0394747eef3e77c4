"""The messages of peer exchange, and the queue in which strangers' requests wait.

A node sends its own record and, for each node it knows, 40 bytes: the peer id and the time (float64, big endian) of its
record. The reply holds the records the sender lacks or has an older one of, so each reaches each node about once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field

from trainer.errors import RefusedError
from trainer.network.discovery.announcement import MAX_WIRE_BYTES, KnownPeer
from trainer.network.rpc.messages import Message, Reason
from trainer.network.rpc.token_buckets import TokenBuckets

EXCHANGE_METHOD = "announce/exchange"
PRESENT_METHOD = "announce/present"
"""Asks for a signed answer only; the request is that of an exchange with an empty list."""
RECORDS_METHOD = "records/exchange"
"""Tells and asks for signed records (`record_exchange`)."""
RUN_METHOD = "run/file"
"""Asks for the signed file of the run (`trainer.run.signed`)."""
HOUSEKEEPING = frozenset({EXCHANGE_METHOD, PRESENT_METHOD, RECORDS_METHOD, RUN_METHOD})
"""Calls that anybody answers, and that are therefore no sign that a peer is of use."""
_ENTRY = struct.Struct(">32sd")
_MAX_KNOWN = 16384
_MAX_RECORDS = 512
_MAX_PAYLOAD_BYTES = 1 << 20

_STRANGERS_BURST, _STRANGERS_PER_INTERVAL, _STRANGERS_MIN_PER_S = 64.0, 6.0, 2.0
"""Answers to peers of one address that were never of use: at once, in each poll interval, and at least each second.
However many honest nodes are behind an address, each node gets three requests an interval from all of them together."""
_STRANGERS_WAIT_S = 4.0
"""Longest time a stranger's request waits; less than the sender waits for the answer (`Discovery`: 5 s)."""
_MAX_WAITING_AT_ADDRESS, _MAX_WAITING = 16, 48
"""Each holds a call's slot while it waits: an eighth of those of an address, and a quarter of all strangers'."""


class PeerExchangeRequest(Message):
    """Head of a request."""

    own_bytes: Annotated[int, Field(ge=0, le=MAX_WIRE_BYTES)]
    """Length of the sender's own record, the beginning of the payload; 0 if it has none yet."""


class PeerExchangeReply(Message):
    """Head of a reply."""

    sizes: Annotated[tuple[Annotated[int, Field(gt=0, le=MAX_WIRE_BYTES)], ...], Field(max_length=_MAX_RECORDS)]
    """Length of each record of the payload."""


class PresentReply(Message):
    """Shows that this node is here."""


def pack_request(own: bytes, known: Iterable[KnownPeer]) -> tuple[PeerExchangeRequest, bytes]:
    """Returns head and payload of a request."""
    entries = [_ENTRY.pack(bytes.fromhex(peer.announcement.peer_id), peer.announcement.sent_at) for peer in known]
    return PeerExchangeRequest(own_bytes=len(own)), b"".join([own, *entries[:_MAX_KNOWN]])


def unpack_request(body: PeerExchangeRequest, payload: bytes) -> tuple[bytes, dict[str, float]]:
    """Returns the sender's own record, and the time of each record it has by peer id; raises `RefusedError`."""
    rest = memoryview(payload)[body.own_bytes :]
    if body.own_bytes > len(payload) or len(rest) % _ENTRY.size or len(rest) > _MAX_KNOWN * _ENTRY.size:
        raise RefusedError(
            "payload",
            f"expected a record of {body.own_bytes} bytes and at most {_MAX_KNOWN} entries of {_ENTRY.size}, "
            f"found {len(payload)} bytes",
        )
    return payload[: body.own_bytes], {peer_id.hex(): sent_at for peer_id, sent_at in _ENTRY.iter_unpack(rest)}


def records_for(
    recipient: str, has: Mapping[str, float], known: Iterable[KnownPeer], rng: random.Random
) -> tuple[PeerExchangeReply, bytes]:
    """Returns the known records that a node lacks, by the times of those it ``has``; a random choice if not all fit."""
    # "not <=": a NaN in the recipient's list is no reason to leave a record out.
    news = [
        peer.wire
        for peer in known
        if peer.announcement.peer_id != recipient
        and not peer.announcement.sent_at <= has.get(peer.announcement.peer_id, -1)
    ]
    rng.shuffle(news)
    chosen: list[bytes] = []
    size_bytes = 0
    for wire in news[:_MAX_RECORDS]:
        size_bytes += len(wire)
        if size_bytes > _MAX_PAYLOAD_BYTES:
            break
        chosen.append(wire)
    return PeerExchangeReply(sizes=tuple(map(len, chosen))), b"".join(chosen)


def split_records(body: PeerExchangeReply, payload: bytes) -> list[bytes]:
    """Returns the records of a reply; raises `RefusedError` where the payload does not fit its head."""
    if sum(body.sizes) != len(payload):
        raise RefusedError("payload", f"expected records of {sum(body.sizes)} bytes in all, found {len(payload)}")
    ends = itertools.accumulate(body.sizes)
    return [payload[end - size_bytes : end] for end, size_bytes in zip(ends, body.sizes, strict=True)]


class StrangerQueue:
    """Lets requests of strangers pass at a limited rate for each address; of those that wait, a random one is next."""

    def __init__(self, interval_s: float, rng: random.Random) -> None:
        per_s = max(_STRANGERS_MIN_PER_S, _STRANGERS_PER_INTERVAL / interval_s)
        self._tokens = TokenBuckets(_STRANGERS_BURST, per_s)
        self._rng = rng
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """By address: the turns of waiting requests, `_MAX_WAITING` in all."""
        self.admitting: dict[str, asyncio.Task[None]] = {}  # By address: what admits the waiting requests.

    async def wait(self, address: str) -> None:
        """Waits for the turn of a request; raises `RefusedError` if too many wait, or it does not come in time."""
        if not self._waiting.get(address) and self._tokens.take(address):
            return
        self._make_room(address)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(address, [])
        waiting.append(turn)
        if address not in self.admitting:
            self.admitting[address] = asyncio.create_task(self._admit(address))
        try:
            async with asyncio.timeout(_STRANGERS_WAIT_S):
                await turn
        except TimeoutError:
            raise _too_many() from None
        finally:
            if turn in waiting:
                waiting.remove(turn)

    def _make_room(self, address: str) -> None:
        """Refuses a random waiting request where too many wait: of this address, or of the one with the most."""
        if len(self._waiting.get(address, ())) < _MAX_WAITING_AT_ADDRESS:
            if sum(map(len, self._waiting.values())) < _MAX_WAITING:
                return
            address = max(self._waiting, key=lambda each: len(self._waiting[each]))
        turn = self._pop_turn(address)
        if not turn.done():
            turn.set_exception(_too_many())

    def _pop_turn(self, address: str) -> asyncio.Future[None]:
        waiting = self._waiting[address]
        return waiting.pop(self._rng.randrange(len(waiting)))

    async def _admit(self, address: str) -> None:
        """Admits the waiting requests of an address, one for each token; ends when none waits."""
        try:
            while self._waiting.get(address):
                if (wait_s := self._tokens.wait_s(address)) > 0:
                    await asyncio.sleep(wait_s)
                elif self._tokens.take(address):
                    turn = self._pop_turn(address)
                    if not turn.done():
                        turn.set_result(None)
        finally:
            del self.admitting[address]
            if not self._waiting.get(address):
                self._waiting.pop(address, None)


def _too_many() -> RefusedError:
    return RefusedError(Reason.BUSY, "expected fewer requests of strangers at this address; ask again later")
