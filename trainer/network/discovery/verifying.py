"""Verifies announced nodes by calling them, so that only nodes that answer are shown and passed on.

Each announced node is called once at its announced address, and must answer with a message signed by its key. The call
carries this node's own record, so that a newcomer is known at once to all nodes it verifies. A node that does not
answer is forgotten.

Calls are bounded: `_MAX_UNDER_WAY` at a time, 40 a second (`_CALLS_PER_LOOK` each `_LOOK_INTERVAL_S`), and by
`trainer.network.rpc.dialing` for each address and each host.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from trainer.errors import RefusedError, RpcError, TrainerUsageError
from trainer.network.discovery.announcement import Announcement, OwnRecord
from trainer.network.discovery.exchange import EXCHANGE_METHOD, PRESENT_METHOD, PeerExchangeRequest, PresentReply
from trainer.network.discovery.peer_table import PeerTable
from trainer.network.rpc.dialing import DialRefusedError
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Reason

__all__ = ["Verifier"]

logger = logging.getLogger(__name__)

_MAX_UNDER_WAY = 32
_LOOK_INTERVAL_S = 0.1
_CALLS_PER_LOOK = 4
_TIMEOUT_S = 5.0
_RETRY_S = 3.0
"""After a refusal that says nothing about the node: it is busy, or its host was dialled too often of late."""


class Verifier:
    """Calls a table's candidates, at least every ``interval_s``, and notes in it each node that answers or calls."""

    def __init__(self, endpoint: Endpoint, table: PeerTable, own: OwnRecord, interval_s: float) -> None:
        self._endpoint = endpoint
        self._table = table
        self._own = own
        self._interval_s = interval_s
        self._news = asyncio.Event()
        self._under_way: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts calling; on the event loop."""
        if self._running is None:
            self._endpoint.contacts.when_answered.append(self._answered)
            self._endpoint.contacts.when_served.append(self._served)
            self._running = asyncio.create_task(self._run_forever())

    def wake(self) -> None:
        """Looks at the table soon: there may be new candidates."""
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
            self._call_some()
            await asyncio.sleep(_LOOK_INTERVAL_S)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _call_some(self) -> None:
        """Starts calls to the next candidates; none to a host whose budget is used up."""
        left = min(_CALLS_PER_LOOK, _MAX_UNDER_WAY - len(self._under_way))
        dialing = self._endpoint.dialing
        num_dials: dict[str, float] = {}
        for node, host in self._table.to_reach():
            if left <= 0:
                self._news.set()
                return
            key = (node.peer_id, node.address)
            if key in self._under_way:
                continue
            is_counted = dialing.counts(node.address)
            if is_counted and num_dials.setdefault(host, dialing.num_dials(host)) < 1.0:
                continue
            if not dialing.objection(node.address):
                num_dials[host] = num_dials.get(host, 0.0) - is_counted
                self._under_way[key] = asyncio.create_task(self._call(node))
                self._under_way[key].add_done_callback(functools.partial(self._ended, key))
                left -= 1

    def _ended(self, key: tuple[str, str], _: object) -> None:
        self._under_way.pop(key, None)
        self._news.set()

    async def _call(self, node: Announcement) -> None:
        current = self._own.current()
        own = current[1] if current is not None else b""
        body = PeerExchangeRequest(own_bytes=len(own))
        try:
            await self._endpoint.call(
                node.peer(), PRESENT_METHOD, body, PresentReply, payload=own, timeout_s=_TIMEOUT_S
            )
        except (RpcError, TrainerUsageError) as error:  # The latter: an announced address that cannot be dialled.
            if _is_temporary(error):
                self._table.retry_later(node.peer_id, _RETRY_S)
                return
            logger.debug("%s (%s…) at %s is not reached: %s", node.node_id, node.peer_id[:12], node.address, error)
            self._table.unreachable(node.peer_id, node.address)


def _is_temporary(error: Exception) -> bool:
    """Returns whether a failed call says nothing about the node, which may well be there."""
    if isinstance(error, DialRefusedError):
        return error.reason == "budget"
    return isinstance(error, RefusedError) and error.reason == Reason.BUSY
