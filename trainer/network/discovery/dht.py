"""Discovery through hivemind's DHT, where no node's address is known to all.

Each node stores its signed announcement under the run's key and its own peer id, and looks the key up every few
seconds; workers may be stored by stage (`StagePartitions`). One seed that answers is enough, and any may come and go.
The announcement of a node that knows no seed and exchanges with this one is stored for it. A DHT node on the way may
withhold records from a look-up; it cannot forge, alter or age them, and the next look-up takes another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection

from trainer.errors import DiscoveryError
from trainer.network.discovery.announcement import Announcement, KnownPeer
from trainer.network.discovery.base import MAX_NEWS, Discovery
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht_client import DhtProcess, DhtSettings
from trainer.network.discovery.node_report import DhtTraffic
from trainer.network.discovery.stage_report import StagePartitions, StageUid, dht_key
from trainer.network.rpc.endpoint import Endpoint

logger = logging.getLogger(__name__)

_FIRST_READY_S = 30.0
"""Time for the process to start before a warning: 3 s to import hivemind, more where other processes start too."""
_MAX_TO_STORE = 64


class DhtDiscovery(Discovery):
    """Finds the nodes of a run through a DHT, with the stages dealt over ``partitions``; see `Discovery`."""

    stores_reports = True

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
                map_port=not ipaddress.ip_address(config.dht_host).is_loopback,
            )
        )
        hosts = [address.split("/")[2] for address in config.initial_peers]
        super().__init__(endpoint, config, named=hosts, keeps_callers=keeps_callers)
        self._partitions = partitions
        self._to_store: dict[str, KnownPeer] = {}
        """By peer id: the newest records that nodes have sent of themselves, not stored yet."""
        self._stored = b""

    def _start_tasks(self) -> list[asyncio.Task[None]]:
        self.process.start()
        actions = (self._store_own, self._look_up, self._store_for_others)
        return [asyncio.create_task(self._repeat(action)) for action in actions]

    async def announce(self, announcement: Announcement) -> None:
        """See `Discovery.announce`."""
        if announcement.stage is not None:
            label = self._partitions.label(StageUid.parse(announcement.stage.uid).stage)
            announcement = announcement.model_copy(update={"filed_under": label})
        await super().announce(announcement)

    def look_for(self, stages: Collection[str] | None) -> None:
        """See `Discovery.look_for`; the partitions of other stages are not looked up any more."""
        self._partitions.labels(stages)
        super().look_for(stages)

    def no_peers_reason(self) -> str:
        """See `Discovery.no_peers_reason`."""
        seeds = ", ".join(self._config.initial_peers)
        if self.process.num_neighbours:
            return f"the DHT of {seeds} knows nobody of run {self._endpoint.run_id}"
        return f"nobody answers at {seeds}"

    async def store_record(self, key: str, subkey: str, wire: bytes, expires_at: float) -> None:
        """See `Discovery.store_record`."""
        await self.process.store(key, subkey, wire.decode(), expires_at, self._config.request_timeout_s)

    async def stored_records(self, key: str) -> list[tuple[str, bytes]]:
        """See `Discovery.stored_records`."""
        records, skipped = await self.process.get(key, self._config.request_timeout_s)
        if skipped:
            self._table.refused["oversized"] += skipped
        return [(it.subkey, it.value.encode()) for it in records]

    @property
    def dht_traffic(self) -> DhtTraffic | None:
        """See `Discovery.dht_traffic`."""
        return self.process.traffic

    async def close(self) -> None:
        """See `Discovery.close`."""
        await super().close()
        await self.process.close()

    async def _repeat(self, action: Callable[[], Awaitable[None]]) -> None:
        """Runs an action every poll interval; logs once when it has failed for a while, and once when it works."""
        failing_since_s: float | None = None
        is_reported = False
        with contextlib.suppress(DiscoveryError):
            await self.process.wait_ready(_FIRST_READY_S, first_start_only=True)
        while True:
            try:
                await action()
                if is_reported:
                    logger.info("the DHT works again")
                failing_since_s, is_reported = None, False
            except DiscoveryError as error:
                now_s = time.monotonic()
                failing_since_s = now_s if failing_since_s is None else failing_since_s
                is_due = not is_reported and now_s - failing_since_s >= self._config.announcement_lifetime_s / 2
                is_reported = is_reported or is_due
                logger.log(logging.WARNING if is_due else logging.DEBUG, "%s; retrying", error)
            await asyncio.sleep(self._config.poll_interval_s)

    async def _store_own(self) -> None:
        current = self._own.current()
        if current is not None and current.wire != self._stored:
            await self._store(current)
            self._stored = current.wire

    def _on_own_record(self, record: KnownPeer) -> None:
        """Queues a record to store for its node; there are few, for nodes that know seeds do not exchange."""
        peer_id = record.announcement.peer_id
        if peer_id in self._to_store or len(self._to_store) < _MAX_TO_STORE:
            self._to_store[peer_id] = record

    async def _store_for_others(self) -> None:
        records, self._to_store = self._to_store, {}
        errors = await asyncio.gather(*map(self._store, records.values()), return_exceptions=True)
        for record, error in zip(records.values(), errors, strict=True):
            if isinstance(error, DiscoveryError):
                logger.debug("%s is not stored: %s", record.announcement.node_id, error)
            elif error is not None:
                raise error

    async def _store(self, record: KnownPeer) -> None:
        said, timeout_s = record.announcement, self._config.request_timeout_s
        key = dht_key(self._endpoint.run_id, said.filed_under)
        await self.process.store(key, said.peer_id, record.wire.decode(), said.expires_at, timeout_s)

    async def _look_up(self) -> None:
        """Looks all wanted keys up at once; the records of some count though others fail."""
        keys = [dht_key(self._endpoint.run_id, label) for label in self._partitions.labels(self._stages)]
        found = await asyncio.gather(*map(self._look_under, keys), return_exceptions=True)
        for error in found:
            if error is not None:
                raise error

    async def _look_under(self, key: str) -> None:
        records, skipped = await self.process.get(key, self._config.request_timeout_s)
        if skipped:
            self._table.refused["oversized"] += skipped
        # At random, so that in time all get through, however many there are.
        new = [it for it in records if self._table.is_new(it.value.encode())]
        for record in self._rng.sample(new, min(MAX_NEWS, len(new))):
            await self._hear(record.value.encode(), subkey=record.subkey)


def listen_address(host: str, port: int) -> str:
    """Returns the multiaddress of an IP address and a TCP port; raises `DiscoveryError` where it is none."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise DiscoveryError(f"dht_host: expected an IP address to listen on, found {host!r}") from None
    return f"/ip{version}/{host}/tcp/{port}"
