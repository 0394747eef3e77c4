"""The base of both kinds of discovery: a table of verified peers, this node's own record, and peer exchange."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable

from trainer.network.discovery.announcement import Announcement, OwnRecord
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.exchange import PeerExchangeService
from trainer.network.discovery.peer_table import KnownPeer, PeerTable
from trainer.network.discovery.stage_report import StageUid
from trainer.network.discovery.verifying import Verifier
from trainer.network.rpc.endpoint import Endpoint

__all__ = ["MAX_NEWS", "Discovery"]

MAX_NEWS = 512
"""Most records of one look-up or one exchange that are verified."""


class Discovery(ABC):
    """Finds the nodes of a run; every kind answers peer exchange. All methods belong to the node's one event loop.

    Args:
        endpoint: this node's; `start` registers the exchange methods on it, and from now on it guards itself against
            addresses that strangers announce.
        config: intervals and bounds.
        named: addresses, or hosts, that the operator named as initial peers.
        keeps_callers: whether nodes that cannot be reached are of use to the run, such as drivers that call workers.
    """

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
        self._own = OwnRecord(
            endpoint.identity, repeat_after_s=config.announce_interval_s, lifetime_s=config.announcement_lifetime_s
        )
        self._verifier = Verifier(endpoint, self._table, self._own, config.poll_interval_s)
        self._service = PeerExchangeService(
            endpoint, self._table, self._own, config.poll_interval_s, self._verifier.wake, self._on_own_record
        )
        self._stages: frozenset[str] | None = None
        self._rng = random.Random(endpoint.peer_id)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def refused(self) -> Counter[str]:
        """Number of refused records of others, by reason."""
        return self._table.refused

    async def start(self) -> None:
        """Starts looking and answering, before the endpoint starts or after; returns at once."""
        if not self._tasks:
            self._service.register()
            self._verifier.start()
            self._tasks = self._start_tasks()

    @abstractmethod
    def _start_tasks(self) -> list[asyncio.Task[None]]:
        """Starts looking for others."""

    async def announce(self, announcement: Announcement) -> None:
        """Announces this node from now on, repeatedly before expiry, until the next call.

        Args:
            announcement: this node's; `sent_at` and `expires_at` are set on each repetition.

        Raises:
            DiscoveryError: it is not this node's, or too long.
        """
        self._own.set(announcement)

    def look_for(self, stages: Collection[str] | None) -> None:
        """Looks only for the workers of these stages from now on; None, as at first: of all.

        Nodes without a stage, such as drivers, are always looked for. Peer exchange passes all on, whatever the stages.

        Args:
            stages: their names.

        Raises:
            DiscoveryError: the run has no such stage, as far as this is known here.
        """
        self._stages = None if stages is None else frozenset(stages)

    async def peers(self) -> tuple[Announcement, ...]:
        """Returns the other nodes that are looked for, sorted by peer id: reached, verified, unexpired.

        Never waits long.
        """
        return tuple(found for found in self._table.announcements() if self._is_wanted(found))

    def heard(self) -> tuple[Announcement, ...]:
        """Returns what all other nodes announce, sorted by peer id, also of those that are not reached (any more).

        These are signed statements, not nodes to connect to: whether an unreachable node lives, and as which process.
        """
        return tuple(known.announcement for known in self._table.heard_of())

    @abstractmethod
    def no_peers_reason(self) -> str:
        """Returns why no peer may have been found: the initial peers that do not answer.

        Empty where none is expected: none was named, or they are this node itself.
        """

    async def close(self) -> None:
        """Stops announcing and looking; ends what was started."""
        tasks = self._tasks
        self._tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._verifier.close()
        await self._service.close()

    def _on_own_record(self, record: KnownPeer) -> None:  # noqa: B027 - a hook for those that need it
        """Handles a newer record that its own node has sent in an exchange."""

    def _is_wanted(self, announcement: Announcement) -> bool:
        if self._stages is None or announcement.stage is None:
            return True
        return StageUid.parse(announcement.stage.uid).stage in self._stages
