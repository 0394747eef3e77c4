"""The base of both kinds of discovery: peers that are verified before they count, this node's record, peer exchange.

Each announced node is called at its announced address, and must answer with a message signed by its key. The call
carries this node's own record, so that a newcomer is known at once to all nodes it verifies. Calls are bounded, 40 a
second among other things. Every node answers peer exchange: the address of any node of a run is enough to join.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from trainer.errors import RefusedError, RpcError, TrainerUsageError
from trainer.network.discovery.announcement import MAX_WIRE_BYTES, Announcement, KnownPeer, OwnRecord
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.exchange import (
    EXCHANGE_METHOD,
    HOUSEKEEPING,
    PRESENT_METHOD,
    PeerExchangeReply,
    PeerExchangeRequest,
    PresentReply,
    StrangerQueue,
    pack_request,
    records_for,
    unpack_request,
)
from trainer.network.discovery.node_report import DhtTraffic
from trainer.network.discovery.peer_table import DIRECT, PeerTable
from trainer.network.discovery.stage_report import StagePartitions, StageUid
from trainer.network.rpc.dialing import DialRefusedError
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Reason, Reply, Request

logger = logging.getLogger(__name__)

MAX_NEWS = 512  # Most records of one look-up or one exchange that are verified.
_MAX_UNDER_WAY = 32
_LOOK_INTERVAL_S = 0.1
_CALLS_PER_LOOK = 4
_TIMEOUT_S = 5.0
_RETRY_S = 3.0
"""After a refusal that says nothing about the node: it is busy, or its host was dialled too often of late."""
_REPEAT_WARNING_S = 60.0
_OBJECTIONS = {
    "private": "private addresses are called in runs that have some only (discovery.allow_private)",
    "own": "that is this node's own address",
    "port": "ports below 1024 are not called",
    "name": "that is no address of a host",
}


class Discovery(ABC):
    """Finds the nodes of a run; every kind answers peer exchange. All methods belong to the node's one event loop.

    From now on the endpoint guards itself against addresses that strangers announce; ``named`` are those, or the hosts,
    that the operator named. With ``keeps_callers`` nodes that cannot be reached are of use to the run, such as drivers.
    """

    stores_reports = False
    """Whether reports are stored where all can look them up; else nodes tell each other (`report_exchange`)."""

    def __init__(
        self, endpoint: Endpoint, config: DiscoveryConfig, *, named: Iterable[str], keeps_callers: bool
    ) -> None:
        endpoint.dialing.guard(named, allow_private=config.allow_private)
        self._endpoint = endpoint
        self._config = config
        self._table = PeerTable(
            endpoint.run_id,
            endpoint.peer_id,
            max_peers=config.max_peers,
            max_clock_skew_s=config.max_clock_skew_s,
            lifetime_s=config.announcement_lifetime_s,
            objection=endpoint.dialing.objection,
            allowed_peers=endpoint.allowed_peers,
            keeps_callers=keeps_callers,
        )
        self.refused = self._table.refused  # Number of refused records of others, by reason.
        self._own = OwnRecord(
            endpoint.identity, repeat_after_s=config.announce_interval_s, lifetime_s=config.announcement_lifetime_s
        )
        self._rng = random.Random(endpoint.peer_id)
        self._is_pipeline = keeps_callers
        self._strangers = StrangerQueue(config.poll_interval_s, self._rng)
        self._stages: frozenset[str] | None = None
        self._has_candidates = asyncio.Event()
        self._verifying: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._tells_at_s = -math.inf
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts looking and answering, before the endpoint starts or after; returns at once."""
        if self._tasks:
            return
        endpoint = self._endpoint
        endpoint.register(EXCHANGE_METHOD, PeerExchangeRequest, self._exchange, any_recipient=True)
        endpoint.register(PRESENT_METHOD, PeerExchangeRequest, self._present, max_payload_bytes=MAX_WIRE_BYTES)
        endpoint.contacts.when_answered.append(self._answered)
        endpoint.contacts.when_served.append(self._served)
        self._tasks = [asyncio.create_task(self._verify_forever()), *self._start_tasks()]

    @abstractmethod
    def _start_tasks(self) -> list[asyncio.Task[None]]:
        """Starts looking for others."""

    async def announce(self, announcement: Announcement) -> None:
        """Announces this node from now on, repeatedly before expiry; raises what `sign_announcement` does."""
        self._own.set(announcement)

    def look_for(self, stages: Collection[str] | None) -> None:
        """Looks only for workers of these stages (None: all) and nodes without one; DiscoveryError: no such stage."""
        self._stages = None if stages is None else frozenset(stages)

    async def peers(self) -> tuple[Announcement, ...]:
        """Returns the other nodes that are looked for, sorted by peer id: reached, verified, unexpired; never waits."""
        return tuple(
            found
            for found in self._table.announcements()
            if self._stages is None or found.stage is None or StageUid.parse(found.stage.uid).stage in self._stages
            if self._is_admitted(found)
        )

    def heard(self) -> tuple[Announcement, ...]:
        """Returns what all other nodes announce, sorted by peer id, also of those that are not reached (any more)."""
        return tuple(known.announcement for known in self._table.heard_of() if self._is_admitted(known.announcement))

    def _is_admitted(self, found: Announcement) -> bool:
        """Returns whether nothing speaks against a node where the run has an authority: revoked, another role or stage.

        Whoever was reached has shown a credential; who is only heard of may have none. Monitors announce nothing.
        """
        admission = self._endpoint.admission
        if admission is None:
            return True
        if found.stage is not None:
            return not admission.contradicts(found.peer_id, "worker", StageUid.parse(found.stage.uid).stage)
        is_driver = self._is_pipeline and not found.parts  # Whoever has parts of all stages holds a whole model.
        return not admission.contradicts(found.peer_id, "driver" if is_driver else "node")

    @property
    def dht_traffic(self) -> DhtTraffic | None:
        """What others have asked this node's part of the DHT, as last heard; None: it has none."""
        return None

    @abstractmethod
    def no_peers_reason(self) -> str:
        """Returns why no peer may have been found, the initial peers that do not answer; empty: none is expected."""

    async def store_record(self, key: str, subkey: str, wire: bytes, expires_at: float) -> None:  # noqa: B027
        """Keeps a signed record where all nodes look it up, if there is such a place; raises `DiscoveryError`."""

    async def stored_records(self, key: str) -> list[tuple[str, bytes]]:
        """Returns subkeys and records kept there under a key, not verified yet; raises `DiscoveryError`."""
        del key
        return []

    async def close(self) -> None:
        """Stops announcing and looking; ends what was started."""
        tasks = [*self._tasks, *self._verifying.values(), *self._strangers.admitting.values()]
        self._tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self, wire: bytes, *, source: str = "", subkey: str | None = None) -> None:
        news = self._table.offer(wire, source=source, subkey=subkey)
        if news is not None:
            logger.debug("heard of %s at %s from %s", news.node_id, news.address, source or "the DHT")
            self._has_candidates.set()
        await asyncio.sleep(0)  # Each takes a signature check.

    async def _exchange(self, request: Request[PeerExchangeRequest]) -> Reply[PeerExchangeReply]:
        news, has = await self._take_request(request)
        if news is not None:
            self._on_own_record(news)
        own = self._own.current()
        known = [*([own] if own is not None else []), *self._table.known()]
        return Reply(*records_for(request.sender, has, known, self._rng))

    async def _present(self, request: Request[PeerExchangeRequest]) -> Reply[PresentReply]:
        await self._take_request(request)
        return Reply(PresentReply())

    async def _take_request(self, request: Request[PeerExchangeRequest]) -> tuple[KnownPeer | None, dict[str, float]]:
        """Returns the sender's own record if it is news, and the time of each record that the sender has."""
        if not self._table.is_of_use(request.sender):
            await self._strangers.wait(request.remote_address)
        wire, has = unpack_request(request.body, bytes(request.payload))
        self._table.called(request.sender)
        if not wire:
            return None, has
        news = self._table.offer(wire, source=f"{DIRECT}{request.remote_address}", subkey=request.sender)
        if news is None:
            return None, has
        logger.debug("%s… announced itself", request.sender[:16])
        self._has_candidates.set()
        return KnownPeer(news, wire), has

    def _on_own_record(self, record: KnownPeer) -> None:  # noqa: B027 - a hook for those that need it
        """Handles a newer record that its own node has sent in an exchange."""

    def _answered(self, peer_id: str, address: str, method: str) -> None:
        self._table.answered(peer_id, address)
        if method not in HOUSEKEEPING:
            self._table.used(peer_id)

    def _served(self, peer_id: str, _host: str, method: str) -> None:
        self._table.called(peer_id)
        if method not in HOUSEKEEPING:
            self._table.used(peer_id)

    async def _verify_forever(self) -> None:
        while True:
            self._has_candidates.clear()
            self._verify_some()
            await asyncio.sleep(_LOOK_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.poll_interval_s):
                    await self._has_candidates.wait()

    def _verify_some(self) -> None:
        """Starts calls to the next candidates; none to a host whose budget is used up."""
        left = min(_CALLS_PER_LOOK, _MAX_UNDER_WAY - len(self._verifying))
        dialing = self._endpoint.dialing
        num_dials: dict[str, float] = {}
        for node, host in self._table.to_reach():
            if left <= 0:
                self._has_candidates.set()
                return
            key = (node.peer_id, node.address)
            if key in self._verifying:
                continue
            is_counted = dialing.counts(node.address)
            if is_counted and num_dials.setdefault(host, dialing.num_dials(host)) < 1.0:
                continue
            if reason := dialing.objection(node.address):
                self._tell_uncalled(node, _OBJECTIONS.get(reason, reason))
            else:
                num_dials[host] = num_dials.get(host, 0.0) - is_counted
                self._verifying[key] = asyncio.create_task(self._verify(node))
                self._verifying[key].add_done_callback(functools.partial(self._verified, key))
                left -= 1

    def _verified(self, key: tuple[str, str], _: object) -> None:
        self._verifying.pop(key, None)
        self._has_candidates.set()

    async def _verify(self, node: Announcement) -> None:
        body, own = pack_request(self._own.wire, ())
        try:
            await self._endpoint.call(
                node.peer(), PRESENT_METHOD, body, PresentReply, payload=own, timeout_s=_TIMEOUT_S
            )
        except (RpcError, TrainerUsageError) as error:  # The latter: an announced address that cannot be dialled.
            if _is_temporary(error):
                self._table.retry_later(node.peer_id, _RETRY_S)
                return
            logger.debug("%s (%s…) at %s is not reached: %s", node.node_id, node.peer_id[:12], node.address, error)
            self._tell_uncalled(node, "nothing of this run answers there")
            self._table.unreachable(node.peer_id, node.address)

    def _tell_uncalled(self, node: Announcement, why: str) -> None:
        """Says that a node is out of the run as seen from here; once a minute at most, whoever announces what."""
        now_s = time.monotonic()
        if now_s >= self._tells_at_s:
            self._tells_at_s = now_s + _REPEAT_WARNING_S
            where = ascii(node.address[:80])
            logger.info("peer %s announces %s and is in no round with this node: %s", node.peer_id[:12], where, why)


def _is_temporary(error: Exception) -> bool:
    """Returns whether a failed call says nothing about the node, which may well be there."""
    if isinstance(error, DialRefusedError):
        return error.reason == "budget"
    return isinstance(error, RefusedError) and error.reason == Reason.BUSY


def open_discovery(endpoint: Endpoint, config: DiscoveryConfig, stages: tuple[str, ...] = ()) -> Discovery:
    """Opens a DHT if the initial peers are multiaddresses, else peer exchange; ``stages`` are all of the run's."""
    from trainer.network.discovery.dht import DhtDiscovery  # Both import this module.
    from trainer.network.discovery.static import StaticDiscovery

    if config.uses_dht:
        partitions = StagePartitions(stages, config.num_partitions) if config.partition_by_stage else StagePartitions()
        return DhtDiscovery(endpoint, config, partitions, keeps_callers=bool(stages))
    return StaticDiscovery(endpoint, config.initial_peers, config, keeps_callers=bool(stages))


@dataclass(slots=True)
class PeerWatchdog:
    """Logs a warning every minute while no expected peer has been discovered."""

    discovery: Discovery
    whom: str
    after_s: float  # Seconds without a peer before the first warning: nodes that start together are not there at once.
    clock: Callable[[], float] = time.monotonic
    _due_s: float | None = field(default=None, init=False)

    def look(self, num_others: int) -> None:
        """Takes the number of peers known now; to be called every few seconds or more often."""
        now_s = self.clock()
        if num_others or self._due_s is None:
            self._due_s = now_s + self.after_s
        elif now_s >= self._due_s and (reason := self.discovery.no_peers_reason()):
            logger.warning("%s: no %s has been heard of", reason, self.whom)
            self._due_s = now_s + _REPEAT_WARNING_S
