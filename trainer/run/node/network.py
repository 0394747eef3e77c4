"""A node's network side: endpoint, discovery, handing out state, rounds; all in one event loop of its own.

The training thread calls in and never waits for a peer except in a round and while it catches up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from trainer.collective import PeerCollective, Terms
from trainer.errors import IncompatiblePeerError, MalformedAnswerError, StateTransferError, TrainerError
from trainer.network.discovery import Announcement, PeerWatchdog, open_discovery
from trainer.network.reachability import ReachabilityService
from trainer.network.relay import RelayedReach
from trainer.network.rpc import Counters, Endpoint, Identity, Peer
from trainer.network.rpc.envelope import peer_boundary
from trainer.network.transfer import StateDonor, choose_state, fetch_descriptor, fetch_state, write_snapshot
from trainer.run.config import RunConfig
from trainer.run.node.admission import admission_client
from trainer.run.node.identity import (
    ComparedPeer,
    FitCheck,
    NodeStats,
    announcement_of,
    ask_addresses,
    register_terms,
)
from trainer.run.node.loop_thread import LoopThread
from trainer.run.node.remembered_peers import RememberedPeers
from trainer.run.node.reporting import NodeReporter, OwnFigures
from trainer.run.node.state_form import StateForm
from trainer.run.signed import SignedRun

logger = logging.getLogger(__name__)

S = TypeVar("S")

_REMEMBERED_STATES = 64
_REFRESH_S = 0.5
_START_S = 60.0
_PERMIT_S = 60.0  # For the run's authorities to answer, which dial back meanwhile.
_FIRST_PEERS_S = 15.0
_UNHEARD_S = 75.0  # A minute after `_FIRST_PEERS_S`, when it is logged for the first time.
_CATCH_UP_S = 120.0
_SETTLE_S = 600.0
_FETCH_SLACK_S = 30.0  # Fetching has its own deadline; the loop's comes after it.

StateChoice = Callable[[tuple[int, str], Iterable[Announcement]], str | None]
"""Returns the digest to take up, from this node's own state and the others' announcements; None to keep its own."""


def _holds_whole_model(announcement: Announcement) -> bool:
    return announcement.stage is None


@dataclass(slots=True)
class PeerBook:
    """The other nodes of the run; written by the event loop, read by any thread (one assignment each)."""

    terms_digest: str
    choose: StateChoice = choose_state
    same_kind: Callable[[Announcement], bool] = _holds_whole_model
    announcements: tuple[Announcement, ...] = ()
    own_state: tuple[int, str] = (0, "")  # Outer step and digest of the snapshot this node hands out.
    _held: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STATES))
    _misfits: frozenset[str] = frozenset()  # Digests of states, announced now, that this node cannot take up.
    _peers: Mapping[str, Peer] = field(default_factory=dict)
    _distrusted: dict[str, float] = field(default_factory=dict)

    def update(self, announcements: tuple[Announcement, ...]) -> None:
        """Takes over what discovery knows now."""
        self.announcements = announcements
        self._misfits &= {found.state_digest for found in announcements}
        self._peers = {found.peer_id: found.peer() for found in self.alike()}

    def alike(self) -> list[Announcement]:
        """Returns the announcements of nodes that train by this node's terms and are trusted."""
        now_s = time.monotonic()
        return [
            found
            for found in self.announcements
            if found.terms_digest == self.terms_digest and self._distrusted.get(found.peer_id, 0.0) <= now_s
        ]

    def compared_peers(self, terms: Terms) -> list[ComparedPeer]:
        """Returns the nodes of this node's kind, to be compared with its ``terms``."""
        return [
            ComparedPeer(found.peer(), found.node_id, found.terms_digest, terms, fits)
            for found in self.announcements
            if (fits := found.terms_digest == self.terms_digest) or self.same_kind(found)
        ]

    def peers(self) -> Mapping[str, Peer]:
        """See `trainer.collective.Directory`."""
        return self._peers

    def distrust(self, peer_id: str, seconds: float) -> None:
        """Ignores a peer for a while: no round with it, no state of it; from the loop alone."""
        self._distrusted = {key: until_s for key, until_s in self._distrusted.items() if until_s > time.monotonic()}
        self._distrusted[peer_id] = time.monotonic() + seconds
        self.update(self.announcements)

    def pass_over(self, state_digest: str) -> None:
        """Ignores a state for as long as it is announced; from the loop alone."""
        self._misfits |= {state_digest}

    def state_to_adopt(self) -> str | None:
        """Returns the digest most nodes hold, of those this node could take up; None if it is this node's."""
        return self.choose(self.own_state, (it for it in self.alike() if it.state_digest not in self._misfits))

    def hold(self, outer_step: int, state_digest: str) -> None:
        """Records which state this node hands out from now on."""
        self.own_state = (outer_step, state_digest)
        self._held.append(state_digest)

    def state_elsewhere(self) -> str | None:
        """Returns `state_to_adopt`, but none this node has held: nodes that announce such a one are only behind."""
        digest = self.state_to_adopt()
        return None if digest in self._held else digest

    def holds_most_held_state(self) -> bool:
        """See `trainer.collective.Directory`."""
        return self.state_to_adopt() is None


class Listener(Protocol):
    """The rest of the node, called in the event loop's thread."""

    def progress(self) -> NodeStats:
        """Returns what to announce of training, before each announcement."""

    def peers(self, announcements: tuple[Announcement, ...]) -> None:
        """Receives the announcements of all other nodes, again and again."""

    def state(self, outer_step: int, digest: str) -> None:
        """Learns that others can fetch this state from now on."""


class Network(Generic[S]):
    """One node among others.

    ``vocabulary_rows`` returns the most rows of vocabulary this node could have now, ``form`` says which states it can
    take up, ``choose`` which of these is to be taken up, and ``same_kind`` whether a node of the run ought to have this
    node's terms. ``stages`` are all of the run's, in order, where its model is cut; ``near`` are its own and those
    beside it: all it looks for where a DHT is partitioned by stage. ``run`` is the signed run it belongs to, if any;
    ``stage`` is its own.
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
        same_kind: Callable[[Announcement], bool] = _holds_whole_model,
        stages: tuple[str, ...] = (),
        near: tuple[str, ...] = (),
        run: SignedRun | None = None,
        stage: str = "",
    ) -> None:
        self._form = form
        self._stopping = stopping
        self._remembered = RememberedPeers.of(config)
        config = self._remembered.completed(config)
        self._config = config
        self._terms = terms
        self._is_of_pipeline = bool(near)
        self._snapshots = Path(config.state_dir).expanduser() / "state" / config.run_id / config.node_id
        self._loop = LoopThread("genesis-network")
        self._admission = admission_client(config, identity, "worker" if stage else "node", stage)
        admission = None if self._admission is None else self._admission.admission
        self.endpoint = Endpoint(identity, config.run_id, config.rpc, admission, RelayedReach(config.relay))
        """Further methods are registered on it before `start`."""
        self._discovery = open_discovery(self.endpoint, config.discovery_options, stages)
        if near and config.discovery.partition_by_stage:
            self._discovery.look_for(near)
        self._watchdog = PeerWatchdog(self._discovery, "other node of the run", _UNHEARD_S)
        self._book = PeerBook(terms.digest(), choose, same_kind)
        self._listener: Listener | None = None
        self.figures: Callable[[], OwnFigures] | None = None
        """What to report on this node once a minute; to be set before `start`. None: nothing."""
        self._reporting: asyncio.Task[None] | None = None
        self._members: tuple[str, ...] = ()
        self._fetched_digest = ""
        self._donors: tuple[Announcement, ...] = ()
        self._unpublished: deque[S] = deque(maxlen=1)
        """The newest state that is not being written yet; it replaces older ones, which a slow disk would pile up."""
        self._publishing: concurrent.futures.Future[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._fit = FitCheck(self.endpoint, terms, lambda: self._book.compared_peers(terms), config.run_id)
        self._comparing: concurrent.futures.Future[None] | None = None
        self._run = run
        self._records = run.connect(self.endpoint, self._known_peers, self._discovery) if run is not None else None
        self._donor = StateDonor(self.endpoint, self._snapshots, config.state)
        self._reachability = ReachabilityService(self.endpoint, tls=config.rpc.tls)
        self.collective = PeerCollective(
            self.endpoint,
            self.loop,
            config.run_id,
            terms,
            config.rule,
            config.round_options,
            self._book,
            vocabulary_rows,
            stopping,
            changes=run,
            weighing="linear" if config.strategy == "grad" else "pace" if config.collective.quorum else "root",
            averaging=config.sparseloco.averaging,
            cycle=config.outer.num_fragments,
        )

    @property
    def peer_id(self) -> str:
        """This node's key."""
        return self.endpoint.peer_id

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop in which everything that talks to others runs."""
        return self._loop.loop

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

    def alike(self) -> list[Announcement]:
        """Returns the announcements of those that train by this node's terms."""
        return self._book.alike()

    def distrust(self, peer_id: str, seconds: float) -> None:
        """Ignores a peer for a while: no round with it, no state of it. From any thread."""
        self.loop.call_soon_threadsafe(self._book.distrust, peer_id, seconds)

    @property
    def state_digest(self) -> str:
        """Digest of the snapshot handed out now."""
        return self._book.own_state[1]

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
        return _START_S + joining_s + (self._config.relay.wait_s if self._config.relay.through else 0.0)

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
        self.collective.close()
        try:
            if self._loop.is_running:
                self._loop.run(self._stop(), 20.0)
        except TrainerError as error:
            logger.warning("leaving: %s", error)
        self._loop.stop()

    # -- state ---------------------------------------------------------------------------------------------------------

    def publish(self, shared: S, members: tuple[str, ...] = ()) -> None:
        """Hands out this state once it is written, in the background; a newer one may replace it before."""
        self._members = members
        self._unpublished.append(shared)
        self._publishing = self._loop.spawn(self._publish(self._publishing))

    def settle(self, timeout_s: float = _SETTLE_S) -> None:
        """Waits until the state published last is handed out, or cannot be."""
        try:
            if self._publishing is not None:
                self._publishing.result(timeout_s)
        except TimeoutError:
            logger.warning("this node's state is not written after %.0f s; is the disk hanging?", timeout_s)

    def catch_up(
        self, *, wait_s: float = _CATCH_UP_S, stop: Callable[[], bool] = lambda: False, is_new: bool = False
    ) -> S | None:
        """Fetches the state most others hold; returns None where this node holds it already, or ``stop`` says True.

        With ``is_new`` it is one that this node has never held. It looks and tries again for ``wait_s``. The others'
        next round waits for this node, a bounded while, until it says which round it trains towards
        (`PeerCollective.move_to`).
        """
        self.collective.catch_up()
        self.settle()
        deadline_s = time.monotonic() + wait_s
        while not stop():
            digest = self._book.state_elsewhere() if is_new else self._book.state_to_adopt()
            if digest is not None:
                try:
                    return self._fetched(digest, stop)
                except StateTransferError as error:
                    logger.warning("state %s: %s", digest[:12], error)
                except IncompatiblePeerError as error:
                    logger.warning("state %s does not fit this node, and is passed over: %s", digest[:12], error)
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(_REFRESH_S)
        return None

    def _fetched(self, digest: str, stop: Callable[[], bool]) -> S | None:
        timeout_s = self._config.collective.round_timeout_s + _FETCH_SLACK_S
        deadline_s = time.monotonic() + timeout_s
        fetching = self._loop.spawn(self._fetch(digest))
        while not concurrent.futures.wait([fetching], _REFRESH_S).done:
            if stop():
                fetching.cancel()
                return None
            if time.monotonic() > deadline_s:
                fetching.cancel()
                raise StateTransferError(f"expected it within {timeout_s:.0f} s, found the network side busy or stuck")
        return fetching.result()

    @property
    def holds_common_state(self) -> bool:
        """Whether this node hands out the state that most others hold."""
        return bool(self.state_digest) and self._book.state_to_adopt() is None

    @property
    def shares_common_state(self) -> bool:
        """Whether others hand out the same state as this node, and most do."""
        return self.holds_common_state and any(found.state_digest == self.state_digest for found in self.alike())

    def let_go(self) -> None:
        """Gives up this node's own state: `catch_up` takes any state the others hold."""
        self.settle()
        self._book.own_state = (self._book.own_state[0], "")

    @property
    def donors(self) -> tuple[Announcement, ...]:
        """The nodes that announced the state that was fetched last, when its fetching began."""
        return self._donors

    def pass_over_fetched(self) -> None:
        """Ignores the state that was fetched last, which does not fit, while it is announced."""
        if self._fetched_digest:
            self.loop.call_soon_threadsafe(self._book.pass_over, self._fetched_digest)

    def is_on_its_own(self, num_members: int) -> bool:
        """Returns whether a round had few members while most others hold a state this node has never had."""
        if 2 * num_members > 1 + len(self._book.peers()):
            return False
        self.settle()
        return self._book.state_elsewhere() is not None

    # -- in the loop ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._donor.start()
        register_terms(self.endpoint, self._terms)
        self._reachability.register()
        if self._admission is not None:
            self._admission.register(self.endpoint)
        reporter = self._reporter()
        await self.endpoint.start()
        if self._admission is not None:  # Before anybody is called: without a credential, all would refuse.
            await self._admission.join(self.endpoint.address, self._stopping)
            self._admission.start(lambda: self.endpoint.address, self._discovery, self.endpoint)
        await self._discovery.start()
        if self._records is not None:
            self._records.start()
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
        for task in (self._refreshing, self._comparing, self._reporting):
            if task is not None:
                task.cancel()
        if self._records is not None:
            await self._records.close()
        if self._admission is not None:
            await self._admission.stop()
        await self._discovery.close()
        self._donor.close()
        await self._reachability.close()
        await self.endpoint.stop()

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

    async def _announce(self) -> None:
        outer_step, digest = self._book.own_state
        stats = self._listener.progress() if self._listener is not None else NodeStats()
        announcement = announcement_of(self._config, self.endpoint, self._terms, stats)
        members = self._members if len(self._members) <= 64 else ()
        changes = {"outer_step": outer_step, "state_digest": digest, "last_round_members": members}
        await self._discovery.announce(announcement.model_copy(update=changes))

    async def _refresh_forever(self) -> None:
        interval_s = self._config.discovery.announce_interval_s / 2
        next_announcement_s = time.monotonic() + interval_s
        while True:
            try:
                self._book.update(await self._discovery.peers())
                if self._admission is not None and self._run is not None:
                    self._admission.go_by(self._run.authorities())
                if self._listener is not None:
                    self._listener.peers(self.announcements)
                self._watchdog.look(len(self.announcements))
                self._remembered.note(self._book.alike())
                if time.monotonic() >= next_announcement_s:
                    next_announcement_s = time.monotonic() + interval_s
                    await self._announce()
            except TrainerError as error:
                logger.warning("discovery: %s", error)
            except Exception:
                # An error of a listener must not end the announcements: the node would be lost to the others.
                logger.exception("looking for others")
            await asyncio.sleep(_REFRESH_S)

    async def _publish(self, before: concurrent.futures.Future[None] | None) -> None:
        if before is not None:
            await asyncio.wait([asyncio.wrap_future(before)])
        if not self._unpublished:  # The call before took it.
            return
        shared = self._unpublished.popleft()
        digest = await self._write(shared)
        outer_step = self._form.outer_step(shared)
        self._book.hold(outer_step, digest)
        if digest and self._listener is not None:
            self._listener.state(outer_step, digest)
        await self._announce_now()

    async def _write(self, shared: S) -> str:
        packed = self._form.pack(shared)
        if packed is None:
            return ""
        try:
            keep = self._config.state.keep_snapshots
            return (await asyncio.to_thread(write_snapshot, self._snapshots, *packed, keep=keep)).digest
        except StateTransferError as error:
            logger.warning("this node hands out no state: %s", error)
            return ""

    async def _fetch(self, digest: str) -> S:
        donors = [found for found in self.alike() if found.state_digest == digest]
        peers = [found.peer() for found in donors]
        logger.info("fetching state %s from %d nodes", digest[:12], len(peers))
        stall_timeout_s = self._config.state.stall_timeout_s
        descriptor = await fetch_descriptor(self.endpoint, peers, digest, stall_timeout_s=stall_timeout_s)
        with self._ignored_if_unfit(digest):
            expectation = self._form.expectation(descriptor)
        snapshot = await fetch_state(
            self.endpoint,
            peers,
            digest,
            self._snapshots,
            expectation=expectation,
            timeout_s=self._config.collective.round_timeout_s,
            config=self._config.state,
        )
        self._fetched_digest, self._donors = digest, tuple(donors)
        with self._ignored_if_unfit(digest):
            return self._form.unpack(snapshot.meta, snapshot.tensors)

    @contextmanager
    def _ignored_if_unfit(self, digest: str) -> Iterator[None]:
        """Encloses the reading of a state of others: one that cannot be taken up is not fetched again."""
        try:
            with peer_boundary(f"the holders of the state {digest[:12]}"):
                yield
        except (IncompatiblePeerError, MalformedAnswerError) as error:
            self._book.pass_over(digest)
            raise IncompatiblePeerError(str(error)) from error
