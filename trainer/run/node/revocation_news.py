"""Lists of revoked peers among nodes: news is told to four peers at once, and two are asked every 15 s.

In a DHT lists of up to 64 KiB are kept as well, and looked up every 15 s: who knows seeds but none of the other nodes
hears of them there.

So a list reaches nodes that have no way to the authority through those that do: told on and on, it is with nearly all
within some round trips, and the others ask for it. A list is believed by its signature and number, whoever passes it
on. At rest this takes a quarter of a kB/s, measured by `bench_swarm.py credentials`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Annotated, Final, TypeAlias

from pydantic import Field

from trainer.errors import DiscoveryError, RefusedError, RpcError
from trainer.network.discovery import Announcement
from trainer.network.discovery.base import Discovery
from trainer.network.discovery.record_kinds import MAX_STORED_LIST_BYTES, REVOKED_STORED_S, revoked_key
from trainer.network.rpc import Endpoint, Message, Peer, Reply, Request
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.credential import MAX_LIST_BYTES, PeerKey, RevokedPeers
from trainer.network.rpc.messages import Reason
from trainer.network.rpc.token_buckets import TokenBuckets

logger = logging.getLogger(__name__)

REVOKED_METHOD: Final = "admission/revoked"
INTERVAL_S: Final = 15.0
_LOOK_UP_INTERVAL_S: Final = 15.0
NUM_ASKED, NUM_TOLD = 2, 4  # Peers that are asked for news every interval; that are told of it at once.
_QUESTIONS, _QUESTIONS_PER_S = 8.0, 0.5  # Of one peer that are answered.
_TIMEOUT_S: Final = 10.0

Peers: TypeAlias = Callable[[], Awaitable[Sequence[Announcement]]]


class RevokedNumbers(Message):
    """The number of the newest list of revoked peers that a node has of each authority; a list may be the payload."""

    numbers: Annotated[dict[PeerKey, Annotated[int, Field(ge=0, lt=2**53)]], Field(max_length=16)]


class RevocationNews:
    """Hears and spreads lists for one node; ``on_news`` is called for each that is newer. For one event loop."""

    def __init__(self, admission: Admission, rng: random.Random, on_news: Callable[[], None]) -> None:
        self._admission = admission
        self._rng = rng
        self._on_news = on_news
        self._answers = TokenBuckets(_QUESTIONS, _QUESTIONS_PER_S)
        self._has_news = asyncio.Event()

    def register(self, endpoint: Endpoint) -> None:
        """Lets an endpoint answer peers that ask for a newer list, or bring one."""
        endpoint.register(REVOKED_METHOD, RevokedNumbers, self._answer, max_payload_bytes=MAX_LIST_BYTES)

    def hear(self, news: RevokedPeers | None) -> None:
        """Takes a list up, and has it told to others, where it is news."""
        if news is None:
            return
        try:
            is_news = self._admission.revoke(news)
        except RefusedError as error:
            logger.warning("a list of revoked peers is not believed: %s", error)
            return
        if is_news:
            self._has_news.set()
            self._on_news()

    async def _answer(self, request: Request[RevokedNumbers]) -> Reply[RevokedNumbers]:
        if not self._answers.take(request.sender):
            raise RefusedError(Reason.BUSY, "expected fewer questions for revocations; ask again later")
        self._hear_wire(bytes(request.payload))
        newer = self._admission.newer_than(request.body.numbers)
        return Reply(RevokedNumbers(numbers=self._admission.numbers()), b"" if newer is None else newer.wire())

    def _hear_wire(self, wire: bytes) -> None:
        if wire:
            news = RevokedPeers.parse(wire)
            # Older ones cost no signature.
            if news.number > self._admission.numbers().get(news.issuer, 0):
                self.hear(news)

    async def spread_forever(self, peers: Peers, endpoint: Endpoint) -> None:
        """Tells news to others, and asks for it; ``peers`` are those that discovery has reached."""
        while True:
            try:
                async with asyncio.timeout(INTERVAL_S * self._rng.uniform(0.8, 1.0)):
                    await self._has_news.wait()
            except TimeoutError:
                pass
            count = NUM_TOLD if self._has_news.is_set() else NUM_ASKED
            self._has_news.clear()
            known = [said.peer() for said in await peers()]
            chosen = self._rng.sample(known, min(count, len(known)))
            await asyncio.gather(*(self.exchange(endpoint, peer) for peer in chosen))

    async def look_up_forever(self, discovery: Discovery) -> None:
        """Takes lists from the run's DHT, and stores there what it lacks; does nothing where there is no DHT."""
        while True:
            try:
                await self.look_up(discovery)
            except DiscoveryError as error:
                logger.debug("lists of revoked peers in the DHT: %s", error)
            await asyncio.sleep(_LOOK_UP_INTERVAL_S * self._rng.uniform(0.8, 1.0))

    async def look_up(self, discovery: Discovery) -> None:
        """Looks once."""
        key = revoked_key(self._admission.run_name)
        there: dict[str, int] = {}
        for issuer, wire in await discovery.stored_records(key):
            if issuer not in self._admission.authorities:  # Anybody may store one that he has signed himself.
                continue
            with suppress(RefusedError):
                found = RevokedPeers.parse(wire)
                if found.issuer == issuer:
                    self._hear_wire(wire)
                    # One that is not believed, whatever number it names, is as none.
                    if found.number <= self._admission.numbers().get(issuer, 0):
                        there[issuer] = found.number
        for found in self._admission.lists():
            wire = found.wire()
            if there.get(found.issuer, 0) < found.number and len(wire) <= MAX_STORED_LIST_BYTES:
                await discovery.store_record(key, found.issuer, wire, found.issued_at + REVOKED_STORED_S)

    async def exchange(self, endpoint: Endpoint, peer: Peer) -> None:
        """Asks a peer for a newer list, and tells it of this node's if that is newer."""
        try:
            numbers = RevokedNumbers(numbers=self._admission.numbers())
            reply = await endpoint.call(peer, REVOKED_METHOD, numbers, RevokedNumbers, timeout_s=_TIMEOUT_S)
            self._hear_wire(bytes(reply.payload))
            newer = self._admission.newer_than(reply.body.numbers)
            if newer is not None:
                numbers = RevokedNumbers(numbers=self._admission.numbers())
                await endpoint.call(
                    peer, REVOKED_METHOD, numbers, RevokedNumbers, payload=newer.wire(), timeout_s=_TIMEOUT_S
                )
        except RpcError as error:
            logger.debug("no news of revocations exchanged with %s: %s", peer.address, error)
