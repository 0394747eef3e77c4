"""Discovery from a list of addresses, with peer exchange: for clusters, and for whoever knows one node of the run.

Every `poll_interval_s` the node exchanges records with a few of the nodes it knows and with those addresses of its list
at which it knows nobody. One reachable address is enough to learn of all; a node that comes back with another port or
certificate tells whom it reaches, and the rest hear of it within log(n) exchanges. What does not answer is tried again
after pauses that grow to `max_retry_interval_s`. Records are signed: whoever passes one on cannot alter it.

Whoever is heard of is reached before it counts, and before others are told of it (`verifying`).

The trade-off: no node is special, so each spends about 40 bytes a peer and exchange to say what it knows; 64 nodes at
the default 2 s: 4 kB/s each way.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence

from trainer.errors import RpcError, TrainerUsageError
from trainer.network.discovery.address_book import AddressBook
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.answering import ExchangeAnswers
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.exchange import EXCHANGE_METHOD, ExchangeReply, pack_request, split_records
from trainer.network.discovery.own_record import OwnRecord
from trainer.network.discovery.peer_table import TOLD
from trainer.network.discovery.protocol import is_asked_for
from trainer.network.discovery.verifying import Verifier, open_table
from trainer.network.rpc.config import split_address
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Peer
from trainer.network.rpc.remote_address import address_group
from trainer.network.rpc.token_buckets import TokenBuckets

__all__ = ["StaticDiscovery"]

logger = logging.getLogger(__name__)

_FANOUT = 3
"""Known nodes asked per poll interval."""
_MAX_UNDER_WAY = 16
_MAX_NEWS = 512
"""Most records of one answer that are verified."""
_STRANGERS_NEWS, _STRANGERS_NEWS_PER_S = 64.0, 8.0
"""Of all peers together that have never been of use: so many at once, and so many a second."""
_STRANGERS_ASKED, _STRANGERS_ASKED_PER_S = 8.0, 0.5
"""So many at once, and so many a second, where enough peers are known that have been of use: an answer may be 1 MiB."""
_REPORT_AFTER_S = 60.0
"""So long an address that was given may be silent: a worker on a busy machine takes half of it to start."""


class StaticDiscovery:
    """Finds the nodes of a run from some of their addresses; implements `Discovery`.

    Args:
        endpoint: this node's; the exchange method is registered on it by `start`.
        addresses: ``host:port`` of some nodes; this node's own may be among them.
        config: intervals and bounds.
        keeps_callers: whether nodes that nobody can reach are of use to the run, such as drivers that call workers.
    """

    def __init__(
        self, endpoint: Endpoint, addresses: Sequence[str], config: DiscoveryConfig, *, keeps_callers: bool = False
    ) -> None:
        self._endpoint = endpoint
        self._addresses = list(dict.fromkeys(addresses))
        self._config = config
        self._table = open_table(endpoint, config, named=self._addresses, keeps_callers=keeps_callers)
        self._own = OwnRecord(
            endpoint.identity, repeat_after_s=config.announce_interval_s, lifetime_s=config.announcement_lifetime_s
        )
        self._verifier = Verifier(endpoint, self._table, self._own, config.poll_interval_s)
        self._answers = ExchangeAnswers(endpoint, self._table, self._own, self._verifier, config.poll_interval_s)
        self._book = AddressBook(first_pause_s=config.poll_interval_s, max_pause_s=config.max_retry_interval_s)
        self._strangers_news = TokenBuckets(_STRANGERS_NEWS, _STRANGERS_NEWS_PER_S)
        self._strangers_asked = TokenBuckets(_STRANGERS_ASKED, _STRANGERS_ASKED_PER_S)
        self._chance = random.Random(endpoint.identity.peer_id)
        self._reported: set[str] = set()
        """Addresses that have been silent for so long that it was said."""
        self._stages: frozenset[str] | None = None
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._polling: asyncio.Task[None] | None = None

    @property
    def refused(self) -> Counter[str]:
        """How many records of others were refused, by reason."""
        return self._table.refused

    async def start(self) -> None:
        """Begins to answer and to ask; before the endpoint starts, or after."""
        if self._polling is None:
            self._answers.register()
            self._verifier.start()
            self._polling = asyncio.create_task(self._poll_forever())

    async def announce(self, announcement: Announcement) -> None:
        """See `Discovery.announce`."""
        self._own.set(announcement)

    def look_for(self, stages: Collection[str] | None) -> None:
        """See `Discovery.look_for`; all are exchanged whatever is asked for, so that others learn of them."""
        self._stages = None if stages is None else frozenset(stages)

    async def peers(self) -> tuple[Announcement, ...]:
        """See `Discovery.peers`."""
        return tuple(found for found in self._table.announcements() if is_asked_for(found, self._stages))

    def heard(self) -> tuple[Announcement, ...]:
        """See `Discovery.heard`."""
        return tuple(known.announcement for known in self._table.heard_of())

    def silence(self) -> str:
        """See `Discovery.silence`."""
        silent = [address for address in self._addresses if self._book.has_failed(address)]
        return f"nobody answers at {', '.join(silent)}" if silent else ""

    async def close(self) -> None:
        """Stops asking."""
        tasks = [*self._under_way.values(), *([self._polling] if self._polling is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._verifier.close()
        await self._answers.close()
        self._polling = None

    async def _poll_forever(self) -> None:
        while True:
            for name, peer in self._targets(time.monotonic()):
                if len(self._under_way) < _MAX_UNDER_WAY and name not in self._under_way:
                    task = asyncio.create_task(self._ask(name, peer))
                    self._under_way[name] = task
                    task.add_done_callback(lambda _, name=name: self._under_way.pop(name, None))  # type: ignore[misc]
            # Not all at the same moment.
            await asyncio.sleep(self._config.poll_interval_s * self._chance.uniform(0.8, 1.2))

    def _targets(self, now: float) -> list[tuple[str, Peer]]:
        """Whom to ask now: listed addresses at which nobody known answers, and a few known nodes."""
        self._addresses = [it for it in self._addresses if not self._endpoint.dialing.is_own(it)]
        known = {peer.announcement.peer_id: peer.announcement.peer() for peer in self._table.known()}
        answering = {peer.address for peer_id, peer in known.items() if not self._book.has_failed(peer_id)}
        for address in answering:  # Of the list, not asked under that name: what it was before is over.
            self._book.answered(address)
            self._reported.discard(address)
        listed = [
            (address, Peer(None, address))
            for address in self._addresses
            if address not in answering and self._book.is_due(address, now)
        ]
        return listed + self._some([it for it in known.items() if self._book.is_due(it[0], now)])

    def _some(self, due: list[tuple[str, Peer]]) -> list[tuple[str, Peer]]:
        """`_FANOUT` of these by chance; strangers, whom anybody can make, are rationed if there are enough others."""
        self._chance.shuffle(due)
        proven = [it for it in due if self._table.is_of_use(it[0])]
        strangers = [it for it in due if not self._table.is_of_use(it[0])]
        if len(proven) < _FANOUT:
            return proven + strangers[: _FANOUT - len(proven)]
        if strangers and self._strangers_asked.take(""):
            return proven[: _FANOUT - 1] + strangers[:1]
        return proven[:_FANOUT]

    async def _ask(self, name: str, peer: Peer) -> None:
        current = self._own.current()
        body, payload = pack_request(current[1] if current is not None else b"", self._table.heard_of())
        try:
            reply = await self._endpoint.call(
                peer, EXCHANGE_METHOD, body, ExchangeReply, payload=payload, timeout_s=self._config.request_timeout_s
            )
            records = split_records(reply.body, bytes(reply.payload))
        except (RpcError, TrainerUsageError) as error:  # The latter: an announced address that cannot be dialled.
            self._note_silence(name, peer, error)
            return
        self._book.answered(name)
        self._reported.discard(name)
        if reply.sender == self._endpoint.identity.peer_id:
            # This node's own address by another name, in a list given to all.
            self._addresses = [it for it in self._addresses if it != peer.address]
            return
        await self._take(records, peer, reply.sender)

    async def _take(self, records: list[bytes], peer: Peer, sender: str) -> None:
        """Takes what an answer brought; of nodes that have never been of use, only so much that is new in all."""
        is_trusted = peer.peer_id is None or self._table.is_of_use(sender)
        left = _MAX_NEWS
        source = f"{TOLD}{address_group(split_address(peer.address)[0])}"
        for record in records:
            if not self._table.is_new(record):
                continue
            if left == 0 or not (is_trusted or self._strangers_news.take("")):
                break
            left -= 1
            news = self._table.offer(record, source=source)
            if news is not None:
                logger.debug("heard of %s at %s from %s", news.node_id, news.address, peer.address)
                self._verifier.wake()
            await asyncio.sleep(0)  # Each is a signature to verify.

    def _note_silence(self, name: str, peer: Peer, error: Exception) -> None:
        """Remembers when to try again, and says what there is to say of it.

        Those that begin together are not all there at once, nor do they end at once: only an address of the list that
        stays silent is somebody's to mend.
        """
        now = time.monotonic()
        is_first = not self._book.has_failed(name)
        pause_s = self._book.failed(name, now)
        silent_s = self._book.silent_s(name, now)
        if peer.peer_id is not None:
            logger.debug("no exchange with %s: %s", peer.address, error)
        elif silent_s >= _REPORT_AFTER_S and name not in self._reported:
            self._reported.add(name)
            logger.warning("%s, given to begin with, has not answered for %.0f s: %s", peer.address, silent_s, error)
        else:
            was_there = any(known.announcement.address == peer.address for known in self._table.known())
            level = logging.INFO if is_first and not was_there else logging.DEBUG
            logger.log(level, "%s does not answer yet, asked again in %.1f s and on: %s", peer.address, pause_s, error)
