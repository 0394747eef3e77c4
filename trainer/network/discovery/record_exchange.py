"""How records of one kind reach every node of a run: told at once, asked for again and again, and kept in the DHT.

    something new here          → told to the nodes that are known, 64 at most, which tell it on: two or three hops
    every 15 s, more or less    → one node is asked what it has that is missing here
    every 30 s, in a DHT        → looked up there; what the DHT has lost is stored again

One call does both: it carries how far its sender has got (the newest number of each signer), what that tells, and its
answer the same the other way round. A call about nothing new has 720 bytes each way and takes a millisecond of a core
at each end: while nothing changes, a node sends and receives 190 bytes a second in all.
Whom the records are signed by decides what is taken; who brings them does not matter, and
bringing them earns nobody a place among the nodes that were of use.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Final

from pydantic import Field

from trainer.errors import DiscoveryError, RefusedError, RpcError, TrainerUsageError
from trainer.network.discovery.announcement import PeerIdField
from trainer.network.discovery.base import Discovery
from trainer.network.discovery.exchange import RECORDS_METHOD
from trainer.network.discovery.records import MAX_NUMBER, RecordLog, RecordRefusedError, record_key
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Message, Peer, Reason, Reply, Request
from trainer.network.rpc.token_buckets import TokenBuckets

logger = logging.getLogger(__name__)

_MAX_SIGNERS: Final = 1024
_MAX_RECORDS: Final = 64
_MAX_PAYLOAD_BYTES: Final = 1 << 18
_MAX_TOLD: Final = 64
_AT_ONCE: Final = 16
_TIMEOUT_S: Final = 5.0
_PULL_INTERVAL_S: Final = 15.0
_LOOK_UP_INTERVAL_S: Final = 30.0
_MAX_CALLS: Final = 64  # Of one pull: enough for the longest log of one signer.
_MAX_IN_DHT: Final = 16
"""The newest of a log that are kept in the DHT; whoever lacks more asks a node, without which it could do nothing."""
_CALLS_BURST, _CALLS_PER_S = 128.0, 16.0
"""Calls answered of one address, whoever is behind it."""
_WARNINGS_PER_S: Final = 1 / 60


class Head(Message):
    """How far somebody has got with the records of one signer."""

    signer: PeerIdField
    number: Annotated[int, Field(ge=0, le=MAX_NUMBER)]


_Heads = Annotated[tuple[Head, ...], Field(max_length=_MAX_SIGNERS)]
_Sizes = Annotated[tuple[Annotated[int, Field(gt=0, le=_MAX_PAYLOAD_BYTES)], ...], Field(max_length=_MAX_RECORDS)]


class RecordsRequest(Message):
    """Tells records, the payload, and asks for those that are newer than what the sender has."""

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z-]{0,31}$")]
    has: _Heads
    sizes: _Sizes = ()


class RecordsReply(Message):
    """What the sender of the request lacks, the payload, and how far this node has got."""

    has: _Heads
    sizes: _Sizes = ()
    refused: Annotated[str, Field(max_length=200)] = ""
    """Why the first record that this node did not take was refused; empty: it refused none."""


class RecordExchange:
    """Keeps a log in step with the other nodes'; for the event loop of its endpoint.

    ``peers`` returns the nodes of the run that are known now. ``discovery`` is for its DHT, where it has one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        log: RecordLog,
        peers: Callable[[], Sequence[Peer]],
        discovery: Discovery | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._log = log
        self._peers = peers
        self._discovery = discovery
        self._rng = random.Random(endpoint.peer_id)
        self._calls = TokenBuckets(_CALLS_BURST, _CALLS_PER_S)
        self._warnings = TokenBuckets(3.0, _WARNINGS_PER_S)
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def register(self) -> None:
        """Answers others; before the endpoint starts."""
        self._endpoint.register(
            RECORDS_METHOD,
            RecordsRequest,
            self._answer,
            any_recipient=True,
            needs_credential=False,  # Whoever wants to join has to know what is in force; records prove themselves.
            max_payload_bytes=_MAX_PAYLOAD_BYTES,
        )

    def start(self) -> None:
        """Begins to tell and to ask."""
        loops = (self._tell_forever, self._pull_forever, self._look_up_forever)
        self._tasks = [asyncio.create_task(loop()) for loop in loops]

    async def close(self) -> None:
        """Ends what `start` began."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def announce_news(self) -> None:
        """Has others told soon of what was added to the log by something else than this exchange."""
        self._news.set()

    async def catch_up(self, most: int = 4) -> None:
        """Asks a few of the known nodes for what is missing here; none that does not answer is an error."""
        peers = list(self._peers())
        self._rng.shuffle(peers)
        await asyncio.gather(*map(self.pull, peers[:most]))

    async def pull(self, peer: Peer) -> bool:
        """Takes what a node has and this one lacks; returns whether the node answered. Others are told of news.

        The newest that is here is asked for as well: where another has its number, that is refused, which is logged.
        """
        try:
            for attempt in range(_MAX_CALLS):
                before = self._log.heads()
                await self.exchange(peer, asks_again=not attempt)
                if self._log.heads() == before:
                    break
        except (RpcError, TrainerUsageError) as error:  # The latter: an announced address that cannot be dialled.
            logger.debug("no records of %s: %s", peer.address, error)
            return False
        return True

    async def exchange(self, peer: Peer, records: Iterable[bytes] = (), *, asks_again: bool = False) -> str:
        """Tells a node these records, takes what it answers, and returns why it refused the first that it did not take.

        With ``asks_again`` it is asked for the newest of each signer's that are here, too.

        Raises:
            RpcError: no answer, or a refusal of the call.
        """
        told = _fitting(records)
        has = self._heads()
        if asks_again:
            has = tuple(Head(signer=head.signer, number=max(0, head.number - 1)) for head in has)
        body = RecordsRequest(kind=self._log.kind.name, has=has, sizes=tuple(map(len, told)))
        reply = await self._endpoint.call(
            peer, RECORDS_METHOD, body, RecordsReply, payload=b"".join(told), timeout_s=_TIMEOUT_S
        )
        await self._take(_split(reply.body.sizes, bytes(reply.payload)), peer.address)
        return reply.body.refused

    async def _answer(self, request: Request[RecordsRequest]) -> Reply[RecordsReply]:
        if not self._calls.take(request.remote_address):
            raise RefusedError(Reason.BUSY, "expected fewer calls about records of this address; ask again later")
        if request.body.kind != self._log.kind.name:
            raise RefusedError("kind", f"expected records of kind {self._log.kind.name}, found {request.body.kind}")
        told = _split(request.body.sizes, bytes(request.payload))
        refused = await self._take(told, request.remote_address)
        heads = {head.signer: head.number for head in request.body.has}
        missing = _fitting(self._log.newer_than(heads))
        reply = RecordsReply(has=self._heads(), sizes=tuple(map(len, missing)), refused=refused[:200])
        return Reply(reply, b"".join(missing))

    async def _take(self, records: Iterable[bytes], source: str) -> str:
        """Offers records to the log; returns why the first that it refused was refused."""
        refused = ""
        for wire in records:
            if self._log.has(wire):
                continue
            try:
                if self._log.offer(wire):
                    self._news.set()
            except RecordRefusedError as error:
                refused = refused or f"{error.reason}: {error}"
                # Not worth a line each: anybody can send as many as calls are answered.
                level = logging.WARNING if self._warnings.take("") else logging.DEBUG
                logger.log(level, "a record of kind %s from %s is refused: %s", self._log.kind.name, source, error)
            await asyncio.sleep(0)  # Each takes a signature check.
        return refused

    def _heads(self) -> tuple[Head, ...]:
        heads = itertools.islice(sorted(self._log.heads().items()), _MAX_SIGNERS)
        return tuple(Head(signer=signer, number=number) for signer, number in heads)

    # -- loops ---------------------------------------------------------------------------------------------------------

    async def _tell_forever(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            peers = list(self._peers())
            self._rng.shuffle(peers)
            slots = asyncio.Semaphore(_AT_ONCE)
            newest = self._log.newer_than({})[-_MAX_RECORDS:]

            async def tell(peer: Peer, slots: asyncio.Semaphore = slots, newest: list[bytes] = newest) -> None:
                async with slots:
                    with suppress(RpcError, TrainerUsageError):
                        await self.exchange(peer, newest)

            await asyncio.gather(*map(tell, peers[:_MAX_TOLD]))

    async def _pull_forever(self) -> None:
        while True:
            await asyncio.sleep(_PULL_INTERVAL_S * self._rng.uniform(0.5, 1.5))  # Not all nodes at the same moment.
            await self.catch_up(1)

    async def _look_up_forever(self) -> None:
        while self._discovery is not None:
            try:
                await self._look_up(self._discovery)
            except DiscoveryError as error:
                logger.debug("records of kind %s in the DHT: %s", self._log.kind.name, error)
            await asyncio.sleep(_LOOK_UP_INTERVAL_S * self._rng.uniform(0.5, 1.5))

    async def _look_up(self, discovery: Discovery) -> None:
        key = record_key(self._endpoint.run_id, self._log.kind)
        found = await discovery.stored_records(key)
        # By number, since a log may need each before the next; whoever signed too many of them is cut off.
        await self._take((wire for _, wire in sorted(found, key=_by_number)[-self._log.kind.max_count :]), "the DHT")
        there = {wire for _, wire in found}
        expires_at = time.time() + self._log.kind.max_stored_s
        for wire in self._log.newer_than({})[-_MAX_IN_DHT:]:
            if wire not in there:
                await discovery.store_record(key, self._log.subkey_of(wire), wire, expires_at)


def _by_number(found: tuple[str, bytes]) -> tuple[int, str]:
    number = found[0].rpartition(".")[2]
    return (int(number) if number.isascii() and number.isdecimal() and len(number) <= 10 else 0), found[0]


def _fitting(records: Iterable[bytes]) -> list[bytes]:
    """Returns the first records that fit one message."""
    chosen: list[bytes] = []
    size_bytes = 0
    for wire in itertools.islice(records, _MAX_RECORDS):
        size_bytes += len(wire)
        if size_bytes > _MAX_PAYLOAD_BYTES:
            break
        chosen.append(wire)
    return chosen


def _split(sizes: Sequence[int], payload: bytes) -> list[bytes]:
    """Returns the records of a payload; raises `RefusedError` where it does not fit its head."""
    if sum(sizes) != len(payload):
        raise RefusedError("payload", f"expected records of {sum(sizes)} bytes in all, found {len(payload)}")
    ends = itertools.accumulate(sizes)
    return [payload[end - size_bytes : end] for end, size_bytes in zip(ends, sizes, strict=True)]
