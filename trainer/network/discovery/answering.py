"""The answering side of peer exchange, which every node has, however it finds the others itself.

So the address of any node of a run is enough to begin with: also where the run meets through a DHT, whoever knows one
node and no seed is told of those that one knows, and is known to it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

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
from trainer.network.rpc.messages import Reply, Request

__all__ = ["ExchangeAnswers"]

logger = logging.getLogger(__name__)


class ExchangeAnswers:
    """Takes the records of those that ask, and tells them the others'.

    Args:
        endpoint: this node's.
        table: whom it knows.
        own: what it says of itself.
        verifier: reaches whoever is new.
        told: is given each newer record that its own node has brought to an exchange.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        table: PeerTable,
        own: OwnRecord,
        verifier: Verifier,
        told: Callable[[KnownPeer], None] = lambda _: None,
    ) -> None:
        self._endpoint = endpoint
        self._table = table
        self._own = own
        self._verifier = verifier
        self._told = told
        self._chance = random.Random(endpoint.peer_id)

    def register(self) -> None:
        """Answers from now on; before the endpoint starts, or after."""
        self._endpoint.register(EXCHANGE_METHOD, ExchangeRequest, self._answer, any_recipient=True)
        self._endpoint.register(PRESENT_METHOD, ExchangeRequest, self._answer_present, max_payload_bytes=MAX_WIRE_BYTES)

    async def _answer(self, request: Request[ExchangeRequest]) -> Reply[ExchangeReply]:
        own, has = unpack_request(request.body, bytes(request.payload))
        news = self._hear(request, own)
        if news is not None:
            self._told(KnownPeer(news, own))
        body, payload = records_for(request.sender, has, self._all_known(), self._chance)
        return Reply(body, payload)

    async def _answer_present(self, request: Request[ExchangeRequest]) -> Reply[PresentReply]:
        self._hear(request, unpack_request(request.body, bytes(request.payload))[0])
        return Reply(PresentReply())

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
