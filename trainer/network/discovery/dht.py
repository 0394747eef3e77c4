"""Discovery through hivemind's DHT: for runs over the internet, where nobody's address is known to all.

Each node files its signed announcement under the run's key and its own peer id, and looks the key up every few
seconds. Several seeds may be named; one that answers is enough, and any may come and go. Announcements once seen are
kept until they expire, so a DHT that is down for less than their lifetime is not noticed.

In a run whose model is cut, workers may be filed by stage (`partition`), so that a worker's look-up brings its own
stage and the drivers, not all.

It also answers peer exchange: whoever knows the address of a node and no seed is told of all that node knows, and what
he says of himself is filed for him, again and again as long as he says it. That is no more than he could file himself.

What it does not protect from: a DHT node on the way may withhold records from a look-up. It cannot forge, alter or
age them, and what it withholds is found by the next look-up that goes another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

from trainer.errors import DiscoveryError
from trainer.network.discovery.addresses import seed_host
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.answering import ExchangeAnswers
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht_client import DhtProcess
from trainer.network.discovery.dht_messages import DhtSettings
from trainer.network.discovery.own_record import OwnRecord
from trainer.network.discovery.partition import StagePartitions, dht_key
from trainer.network.discovery.peer_table import KnownPeer
from trainer.network.discovery.protocol import is_asked_for
from trainer.network.discovery.stage_report import StageUid
from trainer.network.discovery.verifying import Verifier, open_table
from trainer.network.rpc.endpoint import Endpoint

__all__ = ["DhtDiscovery", "listen_address"]

logger = logging.getLogger(__name__)

_FIRST_READY_S = 30.0
"""How long the process may take to start before that is said: 3 s to import hivemind, more where others start too."""

_MAX_TO_FILE = 64
_MAX_NEWS = 512
"""Most records of one look-up that are verified."""


class DhtDiscovery:
    """Finds the nodes of a run through a DHT; implements `Discovery`.

    Args:
        endpoint: this node's; the exchange method is registered on it by `start`.
        config: seeds, intervals, where to listen.
        partitions: how the run's stages are dealt over keys; the default: all under one.
        keeps_callers: as for `StaticDiscovery`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: DiscoveryConfig,
        partitions: StagePartitions = StagePartitions(),
        *,
        keeps_callers: bool = False,
    ) -> None:
        self.process = DhtProcess(
            DhtSettings(
                parent_pid=os.getpid(),
                initial_peers=config.initial_peers,
                listen=(listen_address(config.dht_host, config.dht_port),),
                client_mode=config.dht_client_mode,
                map_port=not _is_loopback(config.dht_host),
            )
        )
        self._run_id = endpoint.run_id
        self._partitions = partitions
        self._stages: frozenset[str] | None = None
        self._config = config
        self._table = open_table(
            endpoint, config, named=map(seed_host, config.initial_peers), keeps_callers=keeps_callers
        )
        self._own = OwnRecord(
            endpoint.identity, repeat_after_s=config.announce_interval_s, lifetime_s=config.announcement_lifetime_s
        )
        self._verifier = Verifier(endpoint, self._table, self._own, config.poll_interval_s)
        self._answers = ExchangeAnswers(
            endpoint, self._table, self._own, self._verifier, config.poll_interval_s, self._file_later
        )
        self._to_file: dict[str, KnownPeer] = {}
        """By peer id: the newest records of those that told this node of themselves, not filed yet."""
        self._stored = b""
        self._chance = random.Random(endpoint.peer_id)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def refused(self) -> Counter[str]:
        """How many records of others were refused, by reason."""
        return self._table.refused

    async def start(self) -> None:
        """Starts the DHT process and the look-ups; does not wait for either."""
        if self._tasks:
            return
        self._answers.register()
        self._verifier.start()
        self.process.start()
        what = (self._store, self._look_up, self._store_for_others)
        self._tasks = [asyncio.create_task(self._repeat(each)) for each in what]

    async def announce(self, announcement: Announcement) -> None:
        """See `Discovery.announce`."""
        if announcement.stage is not None:
            label = self._partitions.label(StageUid.parse(announcement.stage.uid).stage)
            announcement = announcement.model_copy(update={"filed_under": label})
        self._own.set(announcement)

    def look_for(self, stages: Collection[str] | None) -> None:
        """See `Discovery.look_for`; what other stages' partitions hold is not asked for any more."""
        self._partitions.labels(stages)
        self._stages = None if stages is None else frozenset(stages)

    async def peers(self) -> tuple[Announcement, ...]:
        """See `Discovery.peers`."""
        return tuple(found for found in self._table.announcements() if is_asked_for(found, self._stages))

    def heard(self) -> tuple[Announcement, ...]:
        """See `Discovery.heard`."""
        return tuple(known.announcement for known in self._table.heard_of())

    def silence(self) -> str:
        """See `Discovery.silence`."""
        seeds = ", ".join(self._config.initial_peers)
        if self.process.num_neighbours:
            return f"the DHT of {seeds} knows nobody of run {self._run_id}"
        return f"nobody answers at {seeds}"

    async def close(self) -> None:
        """Ends look-ups and process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._verifier.close()
        await self._answers.close()
        await self.process.close()

    async def _repeat(self, what: Callable[[], Awaitable[None]]) -> None:
        """Does it every poll interval; tells once that it fails, when it has for a while, and once when it works again.

        A node of the DHT that goes takes some look-ups with it; nothing is lost until announcements expire.
        """
        failing_since_s: float | None = None
        told = False
        with contextlib.suppress(DiscoveryError):
            await self.process.wait_ready(_FIRST_READY_S, first_start_only=True)
        while True:
            try:
                await what()
                if told:
                    logger.info("the DHT works again")
                failing_since_s, told = None, False
            except DiscoveryError as error:
                now_s = time.monotonic()
                failing_since_s = now_s if failing_since_s is None else failing_since_s
                is_news = not told and now_s - failing_since_s >= self._config.announcement_lifetime_s / 2
                told = told or is_news
                logger.log(logging.WARNING if is_news else logging.DEBUG, "%s; trying on", error)
            await asyncio.sleep(self._config.poll_interval_s)

    async def _store(self) -> None:
        """Files the own record if it is another than the one filed last."""
        current = self._own.current()
        if current is None or current[1] == self._stored:
            return
        await self._file(KnownPeer(*current))
        self._stored = current[1]

    def _file_later(self, told: KnownPeer) -> None:
        """Somebody has told this node of himself; who knows seeds does not, so of these there are few."""
        if told.announcement.peer_id in self._to_file or len(self._to_file) < _MAX_TO_FILE:
            self._to_file[told.announcement.peer_id] = told

    async def _store_for_others(self) -> None:
        """Files what others have said of themselves; what nobody takes is old, or was filed by another node too."""
        told, self._to_file = self._to_file, {}
        filed = await asyncio.gather(*map(self._file, told.values()), return_exceptions=True)
        for record, error in zip(told.values(), filed, strict=True):
            if isinstance(error, DiscoveryError):
                logger.debug("%s is not filed: %s", record.announcement.node_id, error)
            elif error is not None:
                raise error

    async def _file(self, record: KnownPeer) -> None:
        announcement = record.announcement
        await self.process.store(
            dht_key(self._run_id, announcement.filed_under),
            announcement.peer_id,
            record.wire.decode(),
            announcement.expires_at,
            self._config.request_timeout_s,
        )

    async def _look_up(self) -> None:
        """Looks under all keys that are asked for, at once; what some bring is taken though others fail.

        Raises:
            DiscoveryError: of one of those that failed.
        """
        keys = [dht_key(self._run_id, label) for label in self._partitions.labels(self._stages)]
        found = await asyncio.gather(*map(self._look_under, keys), return_exceptions=True)
        for error in found:
            if error is not None:
                raise error

    async def _look_under(self, key: str) -> None:
        records, skipped = await self.process.get(key, self._config.request_timeout_s)
        if skipped:
            self._table.refused["oversized"] += skipped
        # By chance, so that in time all come through, however many there are.
        new = [it for it in records if self._table.is_new(it.value.encode())]
        for record in self._chance.sample(new, min(_MAX_NEWS, len(new))):
            news = self._table.offer(record.value.encode(), subkey=record.subkey)
            if news is not None:
                logger.debug("heard of %s at %s", news.node_id, news.address)
                self._verifier.wake()
            await asyncio.sleep(0)  # Each is a signature to verify.


def listen_address(host: str, port: int) -> str:
    """The multiaddress of ``host`` and ``port``.

    Raises:
        DiscoveryError: the host is no IP address.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise DiscoveryError(f"dht_host: expected an IP address to listen on, found {host!r}") from None
    return f"/ip{version}/{host}/tcp/{port}"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
