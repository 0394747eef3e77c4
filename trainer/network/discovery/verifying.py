"""Reaches those that were only heard of, so that only nodes that answer are believed and passed on.

Whoever is announced is called once at the address that the announcement names, and has to answer with a message signed
by the key that the announcement speaks for. The call brings this node's own record: a newcomer that verifies those it
hears of is known to all of them at once. Whoever does not answer is forgotten.

Calls are bounded: `_MAX_UNDER_WAY` at a time, 40 a second (`_BEGUN_PER_LOOK` each `_LOOK_INTERVAL_S`), and by
`trainer.network.rpc.dialing` for each address and each host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from trainer.errors import RefusedError, RpcError, TrainerUsageError
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.exchange import EXCHANGE_METHOD, PRESENT_METHOD, ExchangeRequest, PresentReply
from trainer.network.discovery.own_record import OwnRecord
from trainer.network.discovery.peer_table import PeerTable
from trainer.network.rpc.dialing import DialRefusedError
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Reason

__all__ = ["Verifier", "open_table"]

logger = logging.getLogger(__name__)

_MAX_UNDER_WAY = 32
_LOOK_INTERVAL_S = 0.1
_BEGUN_PER_LOOK = 4
_TIMEOUT_S = 5.0
_RETRY_S = 3.0
"""After a refusal that says nothing of the node: it is busy, or this one has dialled its host too often of late."""


def open_table(endpoint: Endpoint, config: DiscoveryConfig, *, named: Iterable[str], keeps_callers: bool) -> PeerTable:
    """The table of an endpoint that from now on guards itself against addresses that strangers announce.

    Args:
        endpoint: this node's.
        config: bounds, and whether the run is private.
        named: addresses, or hosts, that the operator named to begin with.
        keeps_callers: see `PeerTable`.
    """
    endpoint.dialing.guard(named, allow_private=config.allow_private)
    return PeerTable(
        endpoint.run_id,
        endpoint.peer_id,
        max_peers=config.max_peers,
        max_clock_skew_s=config.max_clock_skew_s,
        lifetime_s=config.announcement_lifetime_s,
        objection=endpoint.dialing.objection,
        allowed_peers=endpoint.allowed_peers,
        keeps_callers=keeps_callers,
    )


class Verifier:
    """Calls the candidates of a table, and tells the table of everybody who answers or calls.

    Args:
        endpoint: this node's.
        table: whom to reach.
        own: what to say of this node.
        interval_s: longest time between two looks at the table.
    """

    def __init__(self, endpoint: Endpoint, table: PeerTable, own: OwnRecord, interval_s: float) -> None:
        self._endpoint = endpoint
        self._table = table
        self._own = own
        self._interval_s = interval_s
        self._news = asyncio.Event()
        self._under_way: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins; in the loop."""
        if self._running is None:
            self._endpoint.contacts.when_answered.append(self._answered)
            self._endpoint.contacts.when_served.append(self._served)
            self._running = asyncio.create_task(self._run_forever())

    def wake(self) -> None:
        """There may be new candidates."""
        self._news.set()

    async def close(self) -> None:
        """Ends all calls."""
        tasks = [*self._under_way.values(), *([self._running] if self._running is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running = None

    def _answered(self, peer_id: str, address: str, method: str) -> None:
        self._table.answered(peer_id, address)
        if method not in (EXCHANGE_METHOD, PRESENT_METHOD):
            self._table.used(peer_id)

    def _served(self, peer_id: str, _host: str, method: str) -> None:
        self._table.called(peer_id)
        if method not in (EXCHANGE_METHOD, PRESENT_METHOD):
            self._table.used(peer_id)

    async def _run_forever(self) -> None:
        while True:
            self._news.clear()
            self._begin_some()
            await asyncio.sleep(_LOOK_INTERVAL_S)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _begin_some(self) -> None:
        """Calls those of the candidates whose turn it is; of a host whose budget is used up, none."""
        left = min(_BEGUN_PER_LOOK, _MAX_UNDER_WAY - len(self._under_way))
        dialing = self._endpoint.dialing
        num_dials: dict[str, float] = {}
        for said, host in self._table.to_reach():
            if left <= 0:
                self._news.set()
                return
            key = (said.peer_id, said.address)
            if key in self._under_way:
                continue
            is_counted = dialing.counts(said.address)
            if is_counted and num_dials.setdefault(host, dialing.num_dials(host)) < 1.0:
                continue
            if not dialing.objection(said.address):
                num_dials[host] = num_dials.get(host, 0.0) - is_counted
                self._begin(key, said)
                left -= 1

    def _begin(self, key: tuple[str, str], said: Announcement) -> None:
        task = asyncio.create_task(self._reach(said))
        self._under_way[key] = task
        task.add_done_callback(lambda _: self._ended(key))

    def _ended(self, key: tuple[str, str]) -> None:
        self._under_way.pop(key, None)
        self._news.set()

    async def _reach(self, said: Announcement) -> None:
        current = self._own.current()
        own = current[1] if current is not None else b""
        try:
            await self._endpoint.call(
                said.peer(),
                PRESENT_METHOD,
                ExchangeRequest(own_bytes=len(own)),
                PresentReply,
                payload=own,
                timeout_s=_TIMEOUT_S,
            )
        except (RpcError, TrainerUsageError) as error:  # The latter: an announced address that cannot be dialled.
            if _is_passing(error):
                self._table.retry_later(said.peer_id, _RETRY_S)
                return
            logger.debug("%s (%s…) at %s is not reached: %s", said.node_id, said.peer_id[:12], said.address, error)
            self._table.unreachable(said.peer_id, said.address)


def _is_passing(error: Exception) -> bool:
    """Whether a call failed for now only, of a node that may well be there."""
    if isinstance(error, DialRefusedError):
        return error.reason == "budget"
    return isinstance(error, RefusedError) and error.reason == Reason.BUSY
