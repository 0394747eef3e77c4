"""Discovery from a list of addresses, with peer exchange: for clusters, and for nodes that know one node of the run.

Every `poll_interval_s` the node exchanges records with a few known nodes and with those addresses of its list at which
it knows no node; the rest learn of news within log(n) exchanges. The trade-off: no node is special, so each spends
about 40 bytes a peer and exchange on the list of what it knows; 64 nodes at the default 2 s: 4 kB/s each way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from trainer.errors import RpcError, TrainerUsageError
from trainer.network.discovery.base import MAX_NEWS, Discovery
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.exchange import EXCHANGE_METHOD, PeerExchangeReply, pack_request, split_records
from trainer.network.discovery.peer_table import TOLD
from trainer.network.rpc.config import split_address
from trainer.network.rpc.dialing import address_group
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Peer
from trainer.network.rpc.token_buckets import TokenBuckets

logger = logging.getLogger(__name__)

_FANOUT = 3
_MAX_UNDER_WAY = 16
_STRANGERS_NEWS, _STRANGERS_NEWS_PER_S = 64.0, 8.0
"""New records accepted from all peers together that were never of use: at once, and per second."""
_STRANGERS_ASKED, _STRANGERS_ASKED_PER_S = 8.0, 0.5
"""Such peers asked at once, and per second, where enough others are known: an answer may have 1 MiB."""
_REPORT_AFTER_S = 60.0
"""How long an initial peer may be silent without a warning: a worker on a busy machine takes half of it to start."""


@dataclass(slots=True)
class Silence:
    """Of an address that did not answer when it was last tried; times are seconds of any clock."""

    since_s: float
    retry_s: float = 0.0
    pause_s: float = 0.0
    is_reported: bool = False


@dataclass(slots=True)
class AddressBackoff:
    """When to retry each address: after a doubling pause while it is silent; forgets the one due first if full."""

    _: KW_ONLY
    first_pause_s: float
    max_pause_s: float
    max_addresses: int = 4096
    silent: dict[str, Silence] = field(default_factory=dict, init=False)

    def is_due(self, address: str, now: float) -> bool:
        """Returns whether an address may be tried now."""
        return address not in self.silent or self.silent[address].retry_s <= now

    def failed(self, address: str, now: float) -> Silence:
        """Notes that an address did not answer."""
        silence = self.silent.get(address)
        if silence is None:
            if len(self.silent) >= self.max_addresses:
                del self.silent[min(self.silent, key=lambda known: self.silent[known].retry_s)]
            silence = self.silent[address] = Silence(now)
        silence.pause_s = min(max(2 * silence.pause_s, self.first_pause_s), self.max_pause_s)
        silence.retry_s = now + silence.pause_s
        return silence

    def answered(self, address: str) -> None:
        """Notes that an address answered."""
        self.silent.pop(address, None)


class StaticDiscovery(Discovery):
    """Finds the nodes of a run from the ``host:port`` of some; this node's own may be among them. See `Discovery`."""

    def __init__(
        self, endpoint: Endpoint, addresses: Sequence[str], config: DiscoveryConfig, *, keeps_callers: bool = False
    ) -> None:
        self._addresses = list(dict.fromkeys(addresses))
        super().__init__(endpoint, config, named=self._addresses, keeps_callers=keeps_callers)
        self._backoff = AddressBackoff(first_pause_s=config.poll_interval_s, max_pause_s=config.max_retry_interval_s)
        self._strangers_news = TokenBuckets(_STRANGERS_NEWS, _STRANGERS_NEWS_PER_S)
        self._strangers_asked = TokenBuckets(_STRANGERS_ASKED, _STRANGERS_ASKED_PER_S)
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def _start_tasks(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._poll_forever())]

    def no_peers_reason(self) -> str:
        """See `Discovery.no_peers_reason`."""
        silent = [address for address in self._addresses if address in self._backoff.silent]
        return f"nobody answers at {', '.join(silent)}" if silent else ""

    async def close(self) -> None:
        """See `Discovery.close`."""
        self._tasks += self._under_way.values()
        await super().close()

    async def _poll_forever(self) -> None:
        while True:
            for name, peer in self._targets(time.monotonic()):
                if len(self._under_way) < _MAX_UNDER_WAY and name not in self._under_way:
                    task = asyncio.create_task(self._ask(name, peer))
                    self._under_way[name] = task
                    task.add_done_callback(lambda _, name=name: self._under_way.pop(name, None))  # type: ignore[misc]
            # Not all nodes at the same moment.
            await asyncio.sleep(self._config.poll_interval_s * self._rng.uniform(0.8, 1.2))

    def _targets(self, now: float) -> list[tuple[str, Peer]]:
        """Returns the peers to ask now: listed addresses at which no known node answers, and a few known nodes."""
        self._addresses = [it for it in self._addresses if not self._endpoint.dialing.is_own(*split_address(it))]
        known = {peer.announcement.peer_id: peer.announcement.peer() for peer in self._table.known()}
        answering = {peer.address for peer_id, peer in known.items() if peer_id not in self._backoff.silent}
        for address in answering:  # Not asked by its address any more: its earlier failures are over.
            self._backoff.answered(address)
        listed = [
            (address, Peer(None, address))
            for address in self._addresses
            if address not in answering and self._backoff.is_due(address, now)
        ]
        return listed + self._choose([it for it in known.items() if self._backoff.is_due(it[0], now)])

    def _choose(self, due: list[tuple[str, Peer]]) -> list[tuple[str, Peer]]:
        """Returns a random `_FANOUT` of these; strangers, whom anybody can make, are rationed where others suffice."""
        self._rng.shuffle(due)
        proven = [it for it in due if self._table.is_of_use(it[0])]
        strangers = [it for it in due if not self._table.is_of_use(it[0])]
        if len(proven) < _FANOUT:
            return proven + strangers[: _FANOUT - len(proven)]
        if strangers and self._strangers_asked.take(""):
            return proven[: _FANOUT - 1] + strangers[:1]
        return proven[:_FANOUT]

    async def _ask(self, name: str, peer: Peer) -> None:
        body, payload = pack_request(self._own.wire, self._table.heard_of())
        timeout_s = self._config.request_timeout_s
        try:
            reply = await self._endpoint.call(
                peer, EXCHANGE_METHOD, body, PeerExchangeReply, payload=payload, timeout_s=timeout_s
            )
            records = split_records(reply.body, bytes(reply.payload))
        except (RpcError, TrainerUsageError) as error:  # The latter: an announced address that cannot be dialled.
            self._note_silence(name, peer, error)
            return
        self._backoff.answered(name)
        if reply.sender == self._endpoint.peer_id:
            # This node's own address under another name, in a list that all nodes share.
            self._addresses = [it for it in self._addresses if it != peer.address]
            return
        # New records from nodes that were never of use are rationed.
        is_trusted = peer.peer_id is None or self._table.is_of_use(reply.sender)
        source = f"{TOLD}{address_group(split_address(peer.address)[0])}"
        left = MAX_NEWS
        for record in filter(self._table.is_new, records):
            if left == 0 or not (is_trusted or self._strangers_news.take("")):
                break
            left -= 1
            await self._hear(record, source=source)

    def _note_silence(self, name: str, peer: Peer, error: Exception) -> None:
        """Notes when to retry; only a listed address that stays silent needs an operator's attention."""
        now = time.monotonic()
        silence = self._backoff.failed(name, now)
        silent_s = now - silence.since_s
        if peer.peer_id is not None:
            logger.debug("no exchange with %s: %s", peer.address, error)
        elif silent_s >= _REPORT_AFTER_S and not silence.is_reported:
            silence.is_reported = True
            logger.warning("the initial peer %s has not answered for %.0f s: %s", peer.address, silent_s, error)
        else:
            was_there = any(known.announcement.address == peer.address for known in self._table.known())
            level = logging.DEBUG if silent_s or was_there else logging.INFO
            logger.log(level, "%s does not answer yet, retried in %.1f s: %s", peer.address, silence.pause_s, error)
