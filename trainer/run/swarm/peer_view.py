"""Who else is in the run: what a driver and a worker know of their peers from announcements, and whether they fit.

Nodes that hold a whole model compare themselves with each other. Drivers and the first worker of a stage have no such
peers: so in a swarm each compares itself with everybody, by what that peer's stage would have to announce under this
run file (`trainer.run.node.identity`). The trade-off: several processes that begin at once with the same wrong
file train apart from the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from trainer.errors import TrainerError
from trainer.model.config import stage_names
from trainer.network.discovery import Announcement, Discovery, PeerWatchdog, open_discovery
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint, Peer, PeerId
from trainer.pipeline.driver.workers import LastWord, StageWorker, workers_in
from trainer.pipeline.ledger.config import is_key
from trainer.run.config import RunConfig
from trainer.run.node.identity import ComparedPeer, FitCheck, NodeStats, announcement_of, register_terms
from trainer.run.node.remembered_peers import RememberedPeers
from trainer.run.node.reporting import NodeReporter, OwnFigures
from trainer.run.swarm.keeper import keeps_account
from trainer.run.swarm.shape import DRIVER, WHOLE, SwarmShape, stage_of

logger = logging.getLogger(__name__)

_REFRESH_S = 0.5
_LOOK_S = 0.1
_UNHEARD_S = 30.0  # Without any peer before that is logged: on a busy machine a worker takes half of it to start.
_SILENT_INTERVALS = 2
"""A process that lives announces itself twice in each interval, so four announcements in a row have not come."""


class SwarmPeers:
    """Those that announce the same run file, among all that ``heard`` returns: a process works for these only."""

    def __init__(self, config: RunConfig, shape: SwarmShape, heard: Callable[[], tuple[Announcement, ...]]) -> None:
        self.heard = heard
        self._run_id = config.run_id
        self._ledger = config.swarm.ledger
        self._terms = {name: shape.terms(name) for name in (DRIVER, WHOLE, *shape.plan.names)}
        self._digests = {name: terms.digest() for name, terms in self._terms.items()}
        self._keeper_key = ""
        self._rejected: frozenset[str] = frozenset()  # Keys of others that call themselves by the keeper's name.

    def fits(self, said: Announcement) -> bool:
        """Whether a peer trains what this run file says."""
        return said.terms_digest == self._digests.get(_role_of(said))

    def fit_check(self, endpoint: Endpoint) -> FitCheck:
        """The comparison of this process, at its ``endpoint``, with all others."""

        def known() -> list[ComparedPeer]:
            expected = ((said, self._terms.get(_role_of(said))) for said in self.heard())
            return [
                ComparedPeer(said.peer(), said.node_id, said.terms_digest, terms, self.fits(said))
                for said, terms in expected
            ]

        return FitCheck(endpoint, self._terms[DRIVER], known, self._run_id)

    def workers_heard(self, stage: str = "") -> list[Announcement]:
        """The workers of a stage or of all, joining and leaving ones too."""
        return [said for said in self.heard() if holds_stage(stage, said) and self.fits(said)]

    def reports(self) -> list[StageReport]:
        """What the workers of all stages report."""
        return [said.stage for said in self.workers_heard() if said.stage is not None]

    def drivers(self) -> dict[PeerId, Announcement]:
        """The drivers, by key."""
        return {said.peer_id: said for said in self.heard() if _role_of(said) == DRIVER and self.fits(said)}

    def keepers(self) -> frozenset[PeerId]:
        """Keys of the drivers that keep the account, or may, as announced now."""
        if not self._ledger.is_shared:
            said = self.keeper()
            return frozenset() if said is None else frozenset((said.peer_id,))
        if not self._ledger.keepers:
            return frozenset(self.drivers())
        return frozenset(key for key in self.drivers() if self.keeper_named(key) is not None)

    def keeper_named(self, key: PeerId) -> str | None:
        """What the run file calls the driver with this key among `LedgerConfig.keepers`; None: it is none of them."""
        if key in self._ledger.keepers:
            return key
        said = self.drivers().get(key)
        is_named = said is not None and said.node_id in self._ledger.keepers and not is_key(said.node_id)
        return said.node_id if said is not None and is_named else None

    def driver_called(self, name: str) -> Announcement | None:
        """The driver of a key or node id; of a node id the one that announced itself last."""
        if is_key(name):
            return self.drivers().get(name)
        found = [said for said in self.drivers().values() if said.node_id == name]
        return max(found, key=lambda said: said.sent_at, default=None)

    def keeper(self) -> Announcement | None:
        """The keeper of the account; None: it is not announced. By name, the first is it as long as it is there."""
        wanted, drivers = self._ledger.keeper, self.drivers()
        if self._ledger.keeper_is_key:
            return drivers.get(wanted)
        found = {key: said for key, said in drivers.items() if said.node_id == wanted}
        if found and self._keeper_key not in found:
            if self._keeper_key:
                logger.warning("the account is kept under another key from now on; name the keeper by its key")
            self._keeper_key = next(iter(found))
        others = frozenset(found.keys() - {self._keeper_key})
        for key in others - self._rejected:
            logger.warning("%s (%s) calls itself %s too and is not believed", found[key].address, key[:12], wanted)
        self._rejected = others
        return found.get(self._keeper_key)


class DriverPeerView(SwarmPeers):
    """Announces a driver and knows the workers (a `StageDirectory`); for one event loop.

    ``progress`` returns what to announce of the driver; ``hearing`` is told of all others, every half second.
    """

    def __init__(
        self,
        config: RunConfig,
        endpoint: Endpoint,
        shape: SwarmShape,
        progress: Callable[[], NodeStats],
        hearing: Callable[[tuple[Announcement, ...]], None],
    ) -> None:
        super().__init__(config, shape, lambda: self._announcements)
        self._config = config
        self._endpoint = endpoint
        self._own_terms = shape.terms(DRIVER)
        self._fit = self.fit_check(endpoint)
        self._misfits: set[str] = set()
        self._progress = progress
        self._hearing = hearing
        self._discovery = open_discovery(endpoint, config.discovery_options, stage_names(config.swarm.num_stages))
        self._watchdog = PeerWatchdog(self._discovery, "worker of any stage", _UNHEARD_S)
        self.figures: Callable[[], OwnFigures] | None = None
        """What to report on this driver once a minute; to be set before `register`. None: nothing."""
        self.remembered: RememberedPeers | None = None
        """Where the addresses of others are kept for this driver's next start; None: nowhere."""
        self._reporter: NodeReporter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_words: dict[str, tuple[float, LastWord]] = {}
        """By key: when the newest announcement was sent, by its own account, and what matters of it."""
        self._announcements: tuple[Announcement, ...] = ()
        self.found_keeper: Callable[[], PeerId | None] | None = None
        """The key of the driver that has the journal, where that may be any; None: the run file names the keeper."""
        self.silence_s = _SILENT_INTERVALS * config.discovery.announce_interval_s  # See `StageDirectory`.

    @property
    def discovery(self) -> Discovery:
        """How this driver finds the others."""
        return self._discovery

    def register(self) -> None:
        """Answers what this driver drives; before the endpoint starts."""
        register_terms(self._endpoint, self._own_terms)
        if self.figures is not None and self._config.discovery.report_interval_s:
            self._reporter = NodeReporter(self._config, self._endpoint, self._discovery, self.figures)
            self._reporter.register()

    async def start(self) -> None:
        """Starts discovery and announces the driver."""
        await self._discovery.start()
        await self._announce()
        self._tasks.append(asyncio.create_task(self._refresh_forever(), name="driver-peer-view"))
        if self._reporter is not None:
            self._tasks.append(asyncio.create_task(self._reporter.run(), name="node-reports"))

    async def stop(self) -> None:
        """Ends discovery."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._discovery.close()

    async def reached(self) -> tuple[Announcement, ...]:
        """Returns the peers that discovery has reached."""
        return await self._discovery.peers()

    async def check_fit(self, wait_s: float, stop: Callable[[], bool]) -> None:
        """Compares this driver with the peers it discovers within a while; waits for none without addresses."""
        deadline_s = time.monotonic() + (wait_s if self._config.discovery.initial_peers else 0.0)
        while not self.heard() and time.monotonic() < deadline_s and not stop():
            await asyncio.sleep(_LOOK_S)
        await self._fit.begin(stop)

    async def watch_fit(self) -> None:
        """Repeats that comparison until somebody has answered, and then waits for ever."""
        await self._fit.go_on()
        await asyncio.Event().wait()

    def hear(self, announcements: tuple[Announcement, ...], words: tuple[Announcement, ...] = ()) -> None:
        """Takes up what discovery knows now: announcements of peers that can be reached, ``words`` of all."""
        now_s = time.monotonic()
        self._last_words = {said.peer_id: self._word(said, now_s) for said in (*words, *announcements)}
        self._misfits &= self._last_words.keys()  # Keys cost nothing, so what is known of them must not pile up.
        self._announcements = announcements

    def last_word(self, key: str) -> LastWord | None:
        """See `StageDirectory`."""
        found = self._last_words.get(key)
        return None if found is None else found[1]

    def workers(self) -> tuple[StageWorker, ...]:
        """See `StageDirectory`."""
        return workers_in(self.workers_heard())

    def workers_heard(self, stage: str = "") -> list[Announcement]:
        """See `SwarmPeers`; logs each worker that trains something else, once."""
        found = super().workers_heard(stage)
        known = {said.peer_id for said in found} | self._misfits
        for said in self.heard():
            if said.stage is not None and said.peer_id not in known and holds_stage(stage, said):
                self._misfits.add(said.peer_id)
                logger.warning(
                    "%s (%s) has another run file or vocabulary than this driver, and gets no work; give both the same",
                    said.node_id,
                    said.stage.uid,
                )
        return found

    def keeper_peer(self) -> Peer | None:
        """Where the keeper is, which may be this driver; None: it is not there."""
        if self.found_keeper is not None:
            key = self.found_keeper()
            said = None if key is None else self.drivers().get(key)
            if key == self._endpoint.peer_id:
                return self._endpoint.peer
            return None if said is None else said.peer()
        if keeps_account(self._config, self._endpoint.peer_id):
            return self._endpoint.peer
        found = self.keeper()
        return None if found is None else found.peer()

    @property
    def keeper_name(self) -> str:
        """Who keeps the account, for people: a node id, or a key."""
        if self.found_keeper is None:
            return self._ledger.keeper
        key = self.found_keeper()
        if key is None:
            return self._ledger.keeper_text
        said = self.drivers().get(key)
        return self._config.node_id if key == self._endpoint.peer_id else key if said is None else said.node_id

    def _word(self, said: Announcement, now_s: float) -> tuple[float, LastWord]:
        """What is remembered of an announcement; as before if it is still the same one."""
        known = self._last_words.get(said.peer_id)
        if known is not None and known[0] == said.sent_at:
            return known
        incarnation = "" if said.stage is None else said.stage.incarnation
        return said.sent_at, LastWord(incarnation, said.address, now_s)

    async def _announce(self) -> None:
        said = announcement_of(self._config, self._endpoint, self._own_terms, self._progress())
        await self._discovery.announce(said)

    async def _refresh_forever(self) -> None:
        interval_s = self._config.discovery.announce_interval_s / 2
        next_announcement_s = time.monotonic() + interval_s
        while True:
            try:
                self.hear(await self._discovery.peers(), self._discovery.heard())
                self._hearing(self.heard())
                if self.remembered is not None:
                    self.remembered.note(self.heard())
                self._watchdog.look(len(self.heard()))
                if time.monotonic() >= next_announcement_s:
                    next_announcement_s = time.monotonic() + interval_s
                    await self._announce()
            except TrainerError as error:
                logger.warning("discovery: %s", error)
            except Exception:  # Without this task a driver would work on with the workers known before.
                logger.exception("discovery: going on with those known before")
            await asyncio.sleep(_REFRESH_S)


def holds_stage(stage: str, said: Announcement) -> bool:
    """Whether an announcement is of a worker of this stage; of any, where it is empty."""
    return said.stage is not None and (not stage or stage_of(said.stage) == stage)


def seen_as_part(stage: str, shape: SwarmShape) -> Callable[[Announcement], Announcement]:
    """Returns what members of a stage's group make of an announcement: of a whole node's, the stage's part.

    Of a node that trains by other terms they make nothing else, and ignore it.
    """
    whole, of_stage = shape.terms(WHOLE).digest(), shape.terms(stage).digest()

    def seen(said: Announcement) -> Announcement:
        part = next((part for part in said.parts if part.stage == stage), None)
        if part is None or said.terms_digest != whole:
            return said
        return said.model_copy(
            update={
                "terms_digest": of_stage,
                "outer_step": part.outer_step,
                "state_digest": part.state_digest,
                "stage": part.as_worker(),
            }
        )

    return seen


def _role_of(said: Announcement) -> str:
    if said.stage is not None:
        return stage_of(said.stage)
    return WHOLE if said.parts else DRIVER
