"""Who else is in the run: what a driver and a worker know of their peers from announcements."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any

from trainer.errors import TrainerError
from trainer.model.config import stage_names
from trainer.network.discovery import Announcement, PeerWatchdog, open_discovery
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint, Peer, PeerId
from trainer.outer.sparta import frontier_of
from trainer.pipeline.driver.workers import LastWord, StageWorker, workers_in
from trainer.run.config import RunConfig
from trainer.run.node.compatibility import register_terms
from trainer.run.node.identity import NodeStats, announcement_of
from trainer.run.swarm.compatibility import SwarmTerms, check_fit
from trainer.run.swarm.keeper import KeeperSearch, keeps_account
from trainer.run.swarm.shape import DRIVER, SwarmShape, stage_of

if TYPE_CHECKING:
    from trainer.run.node.network import Network

__all__ = ["DriverPeerView", "RunPeerView", "StagePeerView", "holds_stage"]

logger = logging.getLogger(__name__)

_REFRESH_S = 0.5
_UNHEARD_S = 30.0
"""Without any peer before that is logged: on a busy machine a worker takes half of it to start."""
_SILENT_INTERVALS = 2
"""A process that lives announces itself twice in each interval, so four announcements in a row have not come."""


class DriverPeerView:
    """Announces a driver and knows the workers (a `StageDirectory`); for one event loop.

    Args:
        config: of the run.
        endpoint: the driver's, started before `start`.
        shape: what all of the swarm agree on.
        progress: what to announce of the driver, asked before each announcement.
        heard: told of all others, every half second.
    """

    def __init__(
        self,
        config: RunConfig,
        endpoint: Endpoint,
        shape: SwarmShape,
        progress: Callable[[], NodeStats],
        heard: Callable[[tuple[Announcement, ...]], None],
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._own_terms = shape.terms(DRIVER)
        self._terms = SwarmTerms(shape)
        self._fit = self._terms.fit_check(endpoint, lambda: self.announcements, config.run_id)
        self._misfits: set[str] = set()
        self._keeper_search = KeeperSearch(config)
        self._progress = progress
        self._heard = heard
        self._discovery = open_discovery(endpoint, config.discovery, stage_names(config.swarm.num_stages))
        self._watchdog = PeerWatchdog(self._discovery, "worker of any stage", _UNHEARD_S)
        self._refresh_task: asyncio.Task[None] | None = None
        self._last_words: dict[str, tuple[float, LastWord]] = {}
        """By key: when the newest announcement was sent, by its own account, and what matters of it."""
        self.announcements: tuple[Announcement, ...] = ()
        """All others there are now; see `hear`."""

    def register(self) -> None:
        """Answers what this driver drives; before the endpoint starts."""
        register_terms(self._endpoint, self._own_terms)

    async def start(self) -> None:
        """Starts discovery and announces the driver."""
        await self._discovery.start()
        await self._announce()
        self._refresh_task = asyncio.create_task(self._refresh_forever(), name="driver-peer-view")

    async def stop(self) -> None:
        """Ends discovery."""
        if self._refresh_task is not None:
            self._refresh_task.cancel()
            await asyncio.gather(self._refresh_task, return_exceptions=True)
        await self._discovery.close()

    async def check_fit(self, wait_s: float, stop: Callable[[], bool]) -> None:
        """Compares this driver with the peers it discovers within a while; does not wait if it was given no addresses.

        Raises:
            IncompatiblePeerError: those that answer have another run file.
        """
        wait_s = wait_s if self._config.discovery.initial_peers else 0.0
        await check_fit(self._fit, lambda: self.announcements, wait_s=wait_s, stop=stop)

    async def watch_fit(self) -> None:
        """Repeats that comparison until somebody has answered, and then waits for ever.

        Raises:
            IncompatiblePeerError: those that answer have another run file.
        """
        await self._fit.go_on()
        await asyncio.Event().wait()

    def hear(self, announcements: tuple[Announcement, ...], words: tuple[Announcement, ...] = ()) -> None:
        """Takes up what discovery knows now.

        Args:
            announcements: of the peers that can be reached.
            words: of all peers that are heard of.
        """
        now_s = time.monotonic()
        self._last_words = {said.peer_id: self._word(said, now_s) for said in (*words, *announcements)}
        self._misfits &= self._last_words.keys()  # Keys cost nothing, so what is known of them must not pile up.
        self.announcements = announcements

    @property
    def silence_s(self) -> float:
        """See `StageDirectory`."""
        return _SILENT_INTERVALS * self._config.discovery.announce_interval_s

    def last_word(self, key: str) -> LastWord | None:
        """See `StageDirectory`."""
        found = self._last_words.get(key)
        return None if found is None else found[1]

    def workers(self) -> tuple[StageWorker, ...]:
        """See `StageDirectory`."""
        return workers_in(self.fitting())

    def fitting(self) -> tuple[Announcement, ...]:
        """Announcements of all workers of this run file, joining and leaving ones too."""
        return tuple(said for said in self.announcements if self._fits(said))

    def stage_workers(self) -> list[tuple[StageReport, Peer]]:
        """Their reports and addresses."""
        return [(said.stage, said.peer()) for said in self.fitting() if said.stage is not None]

    def other_drivers(self) -> list[str]:
        """Keys of the other drivers of this run file."""
        return [said.peer_id for said in _drivers(self.announcements, self._terms)]

    def keeper(self) -> Peer | None:
        """The keeper of the account; None: it is not there."""
        if keeps_account(self._config, self._endpoint.peer_id):
            return self._endpoint.peer
        found = self._keeper_search.find(_drivers(self.announcements, self._terms))
        return None if found is None else found.peer()

    def _word(self, said: Announcement, now_s: float) -> tuple[float, LastWord]:
        """What is remembered of an announcement; as before if it is still the same one."""
        known = self._last_words.get(said.peer_id)
        if known is not None and known[0] == said.sent_at:
            return known
        incarnation = "" if said.stage is None else said.stage.incarnation
        return said.sent_at, LastWord(incarnation, said.address, now_s)

    def _fits(self, said: Announcement) -> bool:
        """Whether a worker trains what this driver drives; logs each that does not, once."""
        if said.stage is None or self._terms.fits(said):
            return said.stage is not None
        if said.peer_id not in self._misfits:
            self._misfits.add(said.peer_id)
            logger.warning(
                "%s (%s) has another run file or vocabulary than this driver, and gets no work; give both the same",
                said.node_id,
                said.stage.uid,
            )
        return False

    async def _announce(self) -> None:
        said = announcement_of(self._config, self._endpoint, self._own_terms, self._progress())
        await self._discovery.announce(said)

    async def _refresh_forever(self) -> None:
        interval_s = self._config.discovery.announce_interval_s / 2
        next_announcement_s = time.monotonic() + interval_s
        while True:
            try:
                self.hear(await self._discovery.peers(), self._discovery.heard())
                self._heard(self.announcements)
                self._watchdog.look(len(self.announcements))
                if time.monotonic() >= next_announcement_s:
                    next_announcement_s = time.monotonic() + interval_s
                    await self._announce()
            except TrainerError as error:
                logger.warning("discovery: %s", error)
            except Exception:  # Without this task a driver would work on with the workers known before.
                logger.exception("discovery: going on with those known before")
            await asyncio.sleep(_REFRESH_S)


class StagePeerView:
    """The other workers of a worker's stage, and their rounds (`trainer.outer.sparta.OtherRounds`); for any thread."""

    def __init__(self, network: Network[Any]) -> None:
        self._network = network

    def reports(self) -> list[StageReport]:
        """What each reports of itself."""
        return [said.stage for said in self._network.alike() if said.stage is not None]

    def serving(self) -> list[StageReport]:
        """Reports of those that serve."""
        return [report for report in self.reports() if report.status == "serving"]

    def peers(self) -> tuple[Peer, ...]:
        """Where they are."""
        return tuple(said.peer() for said in self._network.alike() if said.stage is not None)

    def frontier(self) -> int:
        """The round of those that serve."""
        return frontier_of([report.round_index for report in self.serving()])

    def move_to(self, round_index: int) -> None:
        """See `trainer.outer.sparta.OtherRounds`."""
        self._network.collective.move_to(round_index)


class RunPeerView:
    """The peers of a worker that announce the same run file; it works for these only. For any thread."""

    def __init__(self, network: Network[Any], terms: SwarmTerms, keeper_search: KeeperSearch) -> None:
        self._network = network
        self._terms = terms
        self._keeper_search = keeper_search

    def drivers(self) -> Set[PeerId]:
        """Keys of the drivers."""
        return {said.peer_id for said in _drivers(self._network.announcements, self._terms)}

    def keeper(self) -> PeerId | None:
        """Key of the keeper of the account; None: it is not announced."""
        found = self._keeper_search.find(_drivers(self._network.announcements, self._terms))
        return None if found is None else found.peer_id

    def reports(self) -> list[StageReport]:
        """What the workers of all stages report."""
        heard = self._network.announcements
        return [said.stage for said in heard if said.stage is not None and self._terms.fits(said)]

    def workers(self, stage: str) -> Mapping[PeerId, Peer]:
        """A stage's workers, by key."""
        heard = self._network.announcements
        return {said.peer_id: said.peer() for said in heard if holds_stage(stage, said) and self._terms.fits(said)}


def holds_stage(stage: str, said: Announcement) -> bool:
    """Whether an announcement is of a worker of this stage."""
    return said.stage is not None and stage_of(said.stage) == stage


def _drivers(announcements: tuple[Announcement, ...], terms: SwarmTerms) -> list[Announcement]:
    """The drivers that announce this run file."""
    return [said for said in announcements if said.stage is None and terms.fits(said)]
