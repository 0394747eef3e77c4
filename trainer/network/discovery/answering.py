"""The answering side of peer exchange, which every node has, however it finds the others itself.

So the address of any node of a run is enough to begin with: also where the run meets through a DHT, whoever knows one
node and no seed is told of those that one knows, and is known to it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from trainer.errors import RefusedError
from trainer.network.discovery.announcement import MAX_WIRE_BYTES, Announcement
from trainer.network.discovery.exchange import (
    EXCHANGE_METHOD,
    PRESENT_METHOD,
    ExchangeReply,
    ExchangeRequest,
    PresentReply,
    records_for,
    unpack_request,
)
from trainer.network.discovery.own_record import OwnRecord
from trainer.network.discovery.peer_table import DIRECT, KnownPeer, PeerTable
from trainer.network.discovery.verifying import Verifier
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Reason, Reply, Request
from trainer.network.rpc.token_buckets import TokenBuckets

__all__ = ["ExchangeAnswers"]

logger = logging.getLogger(__name__)

_STRANGERS_BURST, _STRANGERS_PER_INTERVAL, _STRANGERS_MIN_PER_S = 64.0, 6.0, 2.0
"""Answers to peers of one address that have never been of use: at once, in each poll interval, and a second at least.
However many honest nodes are behind an address, each node is asked three times an interval by all of them together."""
_STRANGERS_WAIT_S = 4.0
"""Longest time one is made to wait; less than any of them waits for an answer (`Verifier`: 5 s)."""
_MAX_WAITING_AT_ADDRESS, _MAX_WAITING = 16, 48
"""Each holds a call's slot while it waits: an eighth of those of an address, and a quarter of all strangers'."""


def _too_many() -> RefusedError:
    return RefusedError(Reason.BUSY, "expected fewer questions of strangers at this address; ask again later")


class ExchangeAnswers:
    """Takes the records of those that ask, and tells them the others'.

    Args:
        endpoint: this node's.
        table: whom it knows.
        own: what it says of itself.
        verifier: reaches whoever is new.
        interval_s: how often nodes of this run ask.
        told: is given each newer record that its own node has brought to an exchange.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        table: PeerTable,
        own: OwnRecord,
        verifier: Verifier,
        interval_s: float,
        told: Callable[[KnownPeer], None] = lambda _: None,
    ) -> None:
        self._endpoint = endpoint
        self._table = table
        self._own = own
        self._verifier = verifier
        self._told = told
        self._strangers = TokenBuckets(
            _STRANGERS_BURST, max(_STRANGERS_MIN_PER_S, _STRANGERS_PER_INTERVAL / interval_s)
        )
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """By address: the turns of those that wait, `_MAX_WAITING` in all."""
        self._letting_in: dict[str, asyncio.Task[None]] = {}
        self._chance = random.Random(endpoint.peer_id)

    def register(self) -> None:
        """Answers from now on; before the endpoint starts, or after."""
        self._endpoint.register(EXCHANGE_METHOD, ExchangeRequest, self._answer, any_recipient=True)
        self._endpoint.register(PRESENT_METHOD, ExchangeRequest, self._answer_present, max_payload_bytes=MAX_WIRE_BYTES)

    async def _answer(self, request: Request[ExchangeRequest]) -> Reply[ExchangeReply]:
        await self._pace(request)
        own, has = unpack_request(request.body, bytes(request.payload))
        news = self._hear(request, own)
        if news is not None:
            self._told(KnownPeer(news, own))
        body, payload = records_for(request.sender, has, self._all_known(), self._chance)
        return Reply(body, payload)

    async def _answer_present(self, request: Request[ExchangeRequest]) -> Reply[PresentReply]:
        await self._pace(request)
        self._hear(request, unpack_request(request.body, bytes(request.payload))[0])
        return Reply(PresentReply())

    async def close(self) -> None:
        """Lets nobody in any more."""
        tasks = list(self._letting_in.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pace(self, request: Request[ExchangeRequest]) -> None:
        """Lets strangers of one address through only so fast: who announces many names for it waits, and asks less.

        Which of those that wait comes next is left to chance, so that no crowd is always before a newcomer.

        Raises:
            RefusedError: too many wait, or it was never its turn.
        """
        if self._table.is_of_use(request.sender):
            return
        address = request.remote_address
        if not self._waiting.get(address) and self._strangers.take(address):
            return
        self._make_room(address)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(address, [])
        waiting.append(turn)
        if address not in self._letting_in:
            self._letting_in[address] = asyncio.create_task(self._let_in(address))
        try:
            async with asyncio.timeout(_STRANGERS_WAIT_S):
                await turn
        except TimeoutError:
            raise _too_many() from None
        finally:
            if turn in waiting:
                waiting.remove(turn)

    def _make_room(self, address: str) -> None:
        """Refuses one that waits, by chance, where too many do: of this address, or of that with the most."""
        if len(self._waiting.get(address, ())) < _MAX_WAITING_AT_ADDRESS:
            if sum(map(len, self._waiting.values())) < _MAX_WAITING:
                return
            address = max(self._waiting, key=lambda each: len(self._waiting[each]))
        waiting = self._waiting[address]
        turn = waiting.pop(self._chance.randrange(len(waiting)))
        if not turn.done():
            turn.set_exception(_too_many())

    async def _let_in(self, address: str) -> None:
        """Lets those of an address that wait in, one for each token; ends when none waits."""
        try:
            while waiting := self._waiting.get(address):
                if (wait_s := self._strangers.wait_s(address)) > 0:
                    await asyncio.sleep(wait_s)
                elif self._strangers.take(address):
                    turn = waiting.pop(self._chance.randrange(len(waiting)))
                    if not turn.done():
                        turn.set_result(None)
        finally:
            del self._letting_in[address]
            if not self._waiting.get(address):
                self._waiting.pop(address, None)

    def _hear(self, request: Request[ExchangeRequest], own: bytes) -> Announcement | None:
        """Takes what the asker says of itself, if it says anything; what is news of it."""
        self._table.called(request.sender)
        if not own:
            return None
        news = self._table.offer(own, source=f"{DIRECT}{request.remote_address}", subkey=request.sender)
        if news is not None:
            logger.debug("%s… announced itself", request.sender[:16])
            self._verifier.wake()
        return news

    def _all_known(self) -> list[KnownPeer]:
        """All that others are told of, this node first of all."""
        current = self._own.current()
        return [*([KnownPeer(*current)] if current is not None else []), *self._table.known()]
