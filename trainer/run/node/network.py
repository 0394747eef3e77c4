"""A node's network side: endpoint, discovery, handing out state, rounds; all in one event loop of its own.

The training thread calls in and never waits for a peer except in a round and while it catches up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from trainer.collective import Terms
from trainer.errors import TrainerError
from trainer.network.discovery import Announcement, PeerWatchdog, open_discovery
from trainer.network.discovery.stage_report import MOST_SHARDS_BESIDE_PARTS
from trainer.network.reachability import ReachabilityService
from trainer.network.rpc import Counters, Endpoint, Identity, Peer, scoped_endpoint
from trainer.network.transfer import choose_state
from trainer.run.config import RunConfig
from trainer.run.node.admission import admission_client, join_reachably, reach_of
from trainer.run.node.identity import (
    FitCheck,
    NodeStats,
    announcement_of,
    ask_addresses,
    register_terms,
)
from trainer.run.node.loop_thread import LoopThread
from trainer.run.node.peer_book import PeerBook, StateChoice, as_said, holds_whole_model
from trainer.run.node.relaying import RelayFinder, ServedRelay
from trainer.run.node.remembered_peers import RememberedPeers
from trainer.run.node.reporting import NodeReporter, OwnFigures
from trainer.run.node.round_group import RoundGroup
from trainer.run.node.state_form import StateForm
from trainer.run.signed import SignedRun

logger = logging.getLogger(__name__)

S = TypeVar("S")

_REFRESH_S = 0.5
_START_S = 60.0
_PERMIT_S = 60.0  # For the run's authorities to answer, which dial back meanwhile.
_FIRST_PEERS_S = 15.0
_UNHEARD_S = 75.0  # A minute after `_FIRST_PEERS_S`, when it is logged for the first time.


class Listener(Protocol):
    """The rest of the node, called in the event loop's thread."""

    def progress(self) -> NodeStats:
        """Returns what to announce of training, before each announcement."""

    def peers(self, announcements: tuple[Announcement, ...]) -> None:
        """Receives the announcements of all other nodes, again and again."""

    def state(self, outer_step: int, digest: str, part: str = "") -> None:
        """Learns that others can fetch this state, of a part of the model where it has parts, from now on."""


class Network(RoundGroup[S]):
    """One node among others, and the group of those that train by its terms.

    ``vocabulary_rows`` returns the most rows of vocabulary this node could have now, ``form`` says which states it can
    take up, ``choose`` which of these is to be taken up, and ``same_kind`` whether a node of the run ought to have this
    node's terms. ``stages`` are all of the run's, in order, where its model is cut; ``near`` are its own and those
    beside it: all it looks for where a DHT is partitioned by stage. ``run`` is the signed run it belongs to, if any;
    ``stage`` is its own. ``scope`` names the methods of the group's rounds and states (`ScopedEndpoint`), and
    ``seen_as`` is what an announcement says to the group.
    """

    def __init__(
        self,
        config: RunConfig,
        identity: Identity,
        terms: Terms,
        vocabulary_rows: Callable[[], int],
        form: StateForm[S],
        stopping: Callable[[], bool],
        choose: StateChoice = choose_state,
        same_kind: Callable[[Announcement], bool] = holds_whole_model,
        stages: tuple[str, ...] = (),
        near: tuple[str, ...] = (),
        run: SignedRun | None = None,
        stage: str = "",
        scope: str = "",
        seen_as: Callable[[Announcement], Announcement] = as_said,
    ) -> None:
        self._stopping = stopping
        self._remembered = RememberedPeers.of(config)
        config = self._remembered.completed(config)
        self._terms = terms
        self._is_of_pipeline = bool(near)
        self._has_told_namesake = False
        self._admission = admission_client(config, identity, "worker" if stage else "node", stage)
        admission = None if self._admission is None else self._admission.admission
        self._reach = reach_of(config, self._admission)
        self.endpoint = Endpoint(identity, config.run_id, config.rpc, admission, self._reach)
        """Further methods are registered on it before `start`."""
        self._discovery = open_discovery(self.endpoint, config.discovery_options, stages)
        self._finder = RelayFinder(config.relay, config.discovery, self.endpoint, self._reach, self._discovery)
        self._served: ServedRelay | None = None
        self._relaying: list[asyncio.Task[None]] = []
        if near and config.discovery.partition_by_stage:
            self._discovery.look_for(near)
        self._watchdog = PeerWatchdog(self._discovery, "other node of the run", _UNHEARD_S)
        super().__init__(
            config,
            scoped_endpoint(self.endpoint, scope),
            LoopThread("genesis-network"),
            terms,
            vocabulary_rows,
            form,
            PeerBook(terms.digest(), choose, same_kind, seen_as),
            Path(config.state_dir).expanduser() / "state" / config.run_id / config.node_id,
            self._tell_state,
            stopping,
            run,
        )
        self._groups: dict[str, RoundGroup[S]] = {}
        self._listener: Listener | None = None
        self.figures: Callable[[], OwnFigures] | None = None
        """What to report on this node once a minute; to be set before `start`. None: nothing."""
        self._reporting: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._fit = FitCheck(self.endpoint, terms, lambda: self._book.compared_peers(terms), config.run_id)
        self._comparing: concurrent.futures.Future[None] | None = None
        self._run = run
        self._records = run.connect(self.endpoint, self._known_peers, self._discovery) if run is not None else None
        self._reachability = ReachabilityService(self.endpoint, tls=config.rpc.tls)

    @property
    def peer_id(self) -> str:
        """This node's key."""
        return self.endpoint.peer_id

    @property
    def relayed_bytes(self) -> tuple[int, int]:
        """Bytes sent and received by way of relays, among those of `counters`."""
        return self.endpoint.relayed_bytes

    @property
    def counters(self) -> Counters:
        """Bytes to and from others, and refusals."""
        return self.endpoint.counters

    @property
    def announcements(self) -> tuple[Announcement, ...]:
        """All other nodes known now."""
        return self._book.announcements

    @property
    def expects_others(self) -> bool:
        """Whether it was told where to look for others, or remembers where some were."""
        return bool(self._config.discovery.initial_peers)

    def add_group(
        self,
        part: str,
        terms: Terms,
        vocabulary_rows: Callable[[], int],
        form: StateForm[S],
        seen_as: Callable[[Announcement], Announcement],
    ) -> RoundGroup[S]:
        """Makes this node a member of a group more, for a part of its model; before `start`.

        Its rounds and states have methods of their own, by the name of the part.
        """
        group = RoundGroup(
            self._config,
            scoped_endpoint(self.endpoint, part),
            self._loop,
            terms,
            vocabulary_rows,
            form,
            PeerBook(terms.digest(), seen_as=seen_as),
            self._snapshots / part,
            partial(self._tell_state, part=part),
            self._stopping,
            self._run,
        )
        self._groups[part] = group
        return group

    def start(self, listener: Listener) -> None:
        """Answers and looks for others; waits for the first, and raises `IncompatiblePeerError` if it does not fit."""
        self._listener = listener
        self._loop.start()
        self._loop.run(self._start(), self._start_limit_s())
        if self.expects_others:
            self._wait_for_peers()
            if not self.announcements:
                self._loop.run(ask_addresses(self.endpoint, self._terms, self._config), 60.0)
            elif not self._is_of_pipeline:  # A pipeline compares all its nodes itself.
                self._loop.run(self._fit.begin(self._stopping), 60.0)
                self._comparing = self._loop.spawn(self._fit.go_on())
            if self._records is not None and self.announcements:
                self._loop.run(self._records.catch_up(), 60.0)

    def _start_limit_s(self) -> float:
        joining_s = self._config.admission.join_timeout_s if self._admission else 0.0
        by_relay_s = self._config.relay.wait_s if self._config.relay.through or self._admission else 0.0
        return _START_S + joining_s + by_relay_s

    def _wait_for_peers(self) -> None:
        deadline_s = time.monotonic() + _FIRST_PEERS_S
        while not self.announcements and not self._stopping():
            if time.monotonic() >= deadline_s:
                named = ", ".join(self._config.discovery.initial_peers)
                logger.warning(
                    "none of %s answers yet; training begins alone, and joins the others when they are found "
                    "(python -m trainer doctor, with the same options, says why they are not)",
                    named,
                )
                return
            time.sleep(0.1)

    def check_fit(self) -> None:
        """Raises what the background has found: `IncompatiblePeerError`, or `AdmissionError` for a revoked node."""
        self.check_admitted()
        if self._comparing is not None and self._comparing.done():
            self._comparing.result()

    def check_admitted(self) -> None:
        """Raises `AdmissionError` once the run's authority has revoked this node."""
        if self._admission is not None:
            self._admission.check()

    def may_move_to(self, stage: str) -> bool:
        """Gets what this worker needs to hold another stage: where the run has an authority, a credential for it."""
        if self._admission is None:
            return True
        try:
            self._loop.run(self._admission.prepare_move(self.endpoint.address, stage), _PERMIT_S)
        except TrainerError as error:
            logger.warning("stays where it is, since it is not admitted to %s: %s", stage, error)
            return False
        return True

    def stop(self) -> None:
        """Ends announcements, rounds and connections; also where `start` was never called."""
        for group in (self, *self._groups.values()):
            group.collective.close()
        try:
            if self._loop.is_running:
                self._loop.run(self._stop(), 20.0)
        except TrainerError as error:
            logger.warning("leaving: %s", error)
        self._loop.stop()

    # -- in the loop ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        for group in (self, *self._groups.values()):
            group.start_donor()
        register_terms(self.endpoint, self._terms)
        self._reachability.register()
        if self._admission is not None:
            self._admission.register(self.endpoint)
        reporter = self._reporter()
        await self.endpoint.start()
        if self._admission is not None:  # Before anybody is called: without a credential, all would refuse.
            await join_reachably(self._admission, self.endpoint, self._reach, self._config, self._stopping)
            self._admission.start(lambda: self.endpoint.address, self._discovery, self.endpoint)
        await self._discovery.start()
        if self._records is not None:
            self._records.start()
        self._relaying = [asyncio.create_task(self._finder.run(), name="relay-finder")]
        if self._config.relay.serve and self._reach.relay is not None:
            self._served = ServedRelay(self._reach.relay, self.endpoint, self._discovery)
            self._relaying.append(asyncio.create_task(self._served.run(self.announce), name="relay-check"))
        if reporter is not None:
            self._reporting = asyncio.create_task(reporter.run(), name="node-reports")
        await self._announce()
        self._refreshing = asyncio.create_task(self._refresh_forever())

    def _reporter(self) -> NodeReporter | None:
        if self.figures is None or not self._config.discovery.report_interval_s:
            return None
        reporter = NodeReporter(self._config, self.endpoint, self._discovery, self.figures)
        reporter.register()
        return reporter

    async def _stop(self) -> None:
        for task in (self._refreshing, self._comparing, self._reporting, *self._relaying):
            if task is not None:
                task.cancel()
        if self._records is not None:
            await self._records.close()
        if self._admission is not None:
            await self._admission.stop()
        await self._discovery.close()
        for group in (self, *self._groups.values()):
            group.close_donor()
        await self._reachability.close()
        await self.endpoint.stop()

    async def _tell_state(self, outer_step: int, digest: str, part: str = "") -> None:
        if digest and self._listener is not None:
            self._listener.state(outer_step, digest, part)
        await self._announce_now()

    def _known_peers(self) -> list[Peer]:
        return [said.peer() for said in self._book.announcements]

    def announce(self) -> None:
        """Announces this node now, before the next regular announcement; returns at once."""
        self._loop.spawn(self._announce_now())

    async def _announce_now(self) -> None:
        try:
            await self._announce()
        except TrainerError as error:
            logger.warning("discovery: %s", error)

    def _stats(self) -> NodeStats:
        """Returns what to announce of training."""
        return self._listener.progress() if self._listener is not None else NodeStats()

    async def _announce(self) -> None:
        outer_step, digest = self._book.own_state
        announcement = announcement_of(self._config, self.endpoint, self._terms, self._stats())
        members = self._members if len(self._members) <= 64 else ()
        changes: dict[str, object] = {"outer_step": outer_step, "state_digest": digest, "last_round_members": members}
        if self._served is not None:
            changes["relay_port"] = self._served.announced_port
        if self._groups:
            changes |= self._of_parts(announcement)
        await self._discovery.announce(announcement.model_copy(update=changes))

    def _of_parts(self, announcement: Announcement) -> dict[str, object]:
        """What a node with several parts announces of their states, beside what it says of each."""
        held = {name: (group.outer_step, group.state_digest) for name, group in self._groups.items()}
        parts = tuple(
            said.model_copy(update={"outer_step": held[said.stage][0], "state_digest": held[said.stage][1]})
            for said in announcement.parts
        )
        return {
            "outer_step": min(step for step, _ in held.values()),
            "state_digest": "",
            "last_round_members": (),  # Of which round?
            "shards": announcement.shards[:MOST_SHARDS_BESIDE_PARTS],
            "parts": parts,
        }

    def _tell_namesake(self) -> None:
        """Warns once of another node with this one's id: both get the same shards, and nothing else tells of it."""
        own = self._config.node_id
        found = None if self._has_told_namesake else next((it for it in self.alike() if it.node_id == own), None)
        if found is None:
            return
        self._has_told_namesake = True
        logger.warning(
            "another node of the run is called %s too (key %s, at %s), so both train on the same shards; give each a "
            "--node-id of its own, unless that is an earlier start of this node under another key",
            *(own, found.peer_id[:12], found.address),
        )

    async def _refresh_forever(self) -> None:
        interval_s = self._config.discovery.announce_interval_s / 2
        next_announcement_s = time.monotonic() + interval_s
        while True:
            try:
                announcements = await self._discovery.peers()
                for group in (self, *self._groups.values()):
                    group.update(announcements)
                if self._admission is not None and self._run is not None:
                    self._admission.go_by(self._run.authorities())
                if self._listener is not None:
                    self._listener.peers(self.announcements)
                self._watchdog.look(len(self.announcements))
                self._tell_namesake()
                self._remembered.note(self.alike())
                if time.monotonic() >= next_announcement_s:
                    next_announcement_s = time.monotonic() + interval_s
                    await self._announce()
            except TrainerError as error:
                logger.warning("discovery: %s", error)
            except Exception:
                # An error of a listener must not end the announcements: the node would be lost to the others.
                logger.exception("looking for others")
            await asyncio.sleep(_REFRESH_S)
