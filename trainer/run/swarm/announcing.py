"""Being among the others of a swarm without a model of one's own: a driver's announcements, and what it hears."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from trainer.errors import TrainerError
from trainer.model.config import stage_names
from trainer.network.discovery import Announcement, PeerWatchdog, open_discovery
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.network.rpc import Endpoint, Peer
from trainer.pipeline.driver.workers import LastWord, StageWorker, workers_in
from trainer.run.config import RunConfig
from trainer.run.node.compatibility import register_terms
from trainer.run.node.identity import NodeStats, announcement_of
from trainer.run.swarm.compatibility import SwarmTerms, check_fit
from trainer.run.swarm.keeper import KeeperSearch, keeps_account
from trainer.run.swarm.shape import DRIVER, SwarmShape

__all__ = ["Presence"]

logger = logging.getLogger(__name__)

_REFRESH_S = 0.5
_UNHEARD_S = 30.0
"""How long nobody may be heard of before that is said: a worker on a busy machine takes half of it to start."""
_SILENT_INTERVALS = 2
"""Whoever is there announces itself twice in each, so four times in a row nothing has come."""


class Presence:
    """Announces a driver and knows the workers; for one event loop.

    Args:
        config: of the run.
        endpoint: its own, started before `start`.
        shape: what all of the swarm agree on.
        progress: what to say of it, asked before each announcement.
        heard: told of all others, now and then.
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
        self._unheard = PeerWatchdog(self._discovery, "worker of any stage", _UNHEARD_S)
        self._refreshing: asyncio.Task[None] | None = None
        self._words: dict[str, tuple[float, LastWord]] = {}
        """By key: when the newest announcement says that it was said, and what matters of it."""
        self.announcements: tuple[Announcement, ...] = ()
        """All others there are now; see `hear`."""

    def register(self) -> None:
        """Tells whoever asks what this driver drives; before the endpoint starts."""
        register_terms(self._endpoint, self._own_terms)

    async def start(self) -> None:
        """Begins to look and to announce."""
        await self._discovery.start()
        await self._announce()
        self._refreshing = asyncio.create_task(self._refresh_forever(), name="driver-presence")

    async def stop(self) -> None:
        """Announces nothing more."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await self._discovery.close()

    async def check_fit(self, wait_s: float, stop: Callable[[], bool]) -> None:
        """Compares this driver with those it hears of within a while; returns at once where there is nobody to hear of.

        Raises:
            IncompatiblePeerError: those that answer have another run file.
        """
        wait_s = wait_s if self._config.discovery.initial_peers else 0.0
        await check_fit(self._fit, lambda: self.announcements, wait_s=wait_s, stop=stop)

    async def misfits(self) -> None:
        """Goes on with that comparison until somebody has answered, and then waits for ever.

        Raises:
            IncompatiblePeerError: those that answer have another run file.
        """
        await self._fit.go_on()
        await asyncio.Event().wait()

    def hear(self, announcements: tuple[Announcement, ...], words: tuple[Announcement, ...] = ()) -> None:
        """These are all others there are now.

        Args:
            announcements: of those that can be reached.
            words: of all that are heard of.
        """
        now_s = time.monotonic()
        self._words = {said.peer_id: self._word(said, now_s) for said in (*words, *announcements)}
        self._misfits &= self._words.keys()  # Keys cost nothing, so what is known of them must not pile up.
        self.announcements = announcements

    @property
    def silence_s(self) -> float:
        """See `trainer.pipeline.driver.workers.StageDirectory`."""
        return _SILENT_INTERVALS * self._config.discovery.announce_interval_s

    def last_word(self, key: str) -> LastWord | None:
        """See `trainer.pipeline.driver.workers.StageDirectory`."""
        found = self._words.get(key)
        return None if found is None else found[1]

    def workers(self) -> tuple[StageWorker, ...]:
        """See `trainer.pipeline.driver.workers.StageDirectory`."""
        return workers_in(self.fitting())

    def fitting(self) -> tuple[Announcement, ...]:
        """Announcements of all workers of this run file, joining and leaving ones too."""
        return tuple(said for said in self.announcements if self._fits(said))

    def stage_workers(self) -> list[tuple[StageReport, Peer]]:
        """What each of them says, and where it is."""
        return [(said.stage, said.peer()) for said in self.fitting() if said.stage is not None]

    def stage_peers(self) -> list[tuple[str, Peer]]:
        """Their stages and addresses."""
        return [(StageUid.parse(report.uid).stage, peer) for report, peer in self.stage_workers()]

    def other_drivers(self) -> list[str]:
        """Keys of the other drivers of this run file."""
        return [said.peer_id for said in self.announcements if said.stage is None and self._terms.fits(said)]

    def keeper(self) -> Peer | None:
        """Who keeps the account, if it is there; see `KeeperSearch`."""
        if keeps_account(self._config, self._endpoint.peer_id):
            return self._endpoint.peer
        found = self._keeper_search.find(
            said for said in self.announcements if said.stage is None and self._terms.fits(said)
        )
        return None if found is None else found.peer()

    def _word(self, said: Announcement, now_s: float) -> tuple[float, LastWord]:
        """What is remembered of an announcement; as before where it is the same one still."""
        known = self._words.get(said.peer_id)
        if known is not None and known[0] == said.sent_at:
            return known
        incarnation = "" if said.stage is None else said.stage.incarnation
        return said.sent_at, LastWord(incarnation, said.address, now_s)

    def _fits(self, said: Announcement) -> bool:
        """Whether a worker trains what this driver drives; told once of each that does not."""
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
                self._unheard.look(len(self.announcements))
                if time.monotonic() >= next_announcement_s:
                    next_announcement_s = time.monotonic() + interval_s
                    await self._announce()
            except TrainerError as error:
                logger.warning("discovery: %s", error)
            except Exception:  # Unheard and unseen, a driver would work on with workers of yesterday.
                logger.exception("discovery: going on with those known before")
            await asyncio.sleep(_REFRESH_S)
