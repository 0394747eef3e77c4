"""`RoundGroup`: a node among those with whom it has a model, or a stage, in common: who they are, rounds, the state.

Most nodes belong to one group, which is that of all nodes of the run, or of their stage. A node that holds a whole
model among swarms of stages belongs to one for each stage. The training thread calls in and never waits for a peer
except in a round and while it catches up; all else is in the event loop of the node's endpoint.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from trainer.collective import PeerCollective, Terms
from trainer.errors import IncompatiblePeerError, MalformedAnswerError, StateTransferError
from trainer.network.discovery import Announcement
from trainer.network.rpc import CallEndpoint
from trainer.network.rpc.envelope import peer_boundary
from trainer.network.transfer import StateDonor, fetch_descriptor, fetch_state, write_snapshot
from trainer.run.config import RunConfig
from trainer.run.node.loop_thread import LoopThread
from trainer.run.node.peer_book import PeerBook
from trainer.run.node.state_form import StateForm
from trainer.run.signed import SignedRun

logger = logging.getLogger(__name__)

S = TypeVar("S")

_REFRESH_S = 0.5
_CATCH_UP_S = 120.0
_SETTLE_S = 600.0
_FETCH_SLACK_S = 30.0  # Fetching has its own deadline; the loop's comes after it.


class RoundGroup(Generic[S]):
    """One node in one group.

    ``vocabulary_rows`` returns the most rows of vocabulary this node could have now, ``form`` says which states it can
    take up, ``book`` knows the others, ``snapshots`` is the folder that states are handed out from, and ``handed_out``
    is awaited whenever it is another one, with its outer step and digest.
    """

    def __init__(
        self,
        config: RunConfig,
        endpoint: CallEndpoint,
        loop: LoopThread,
        terms: Terms,
        vocabulary_rows: Callable[[], int],
        form: StateForm[S],
        book: PeerBook,
        snapshots: Path,
        handed_out: Callable[[int, str], Awaitable[None]],
        stopping: Callable[[], bool],
        run: SignedRun | None,
    ) -> None:
        self._config = config
        self._calls = endpoint
        self._loop = loop
        self._form = form
        self._book = book
        self._snapshots = snapshots
        self._handed_out = handed_out
        self._members: tuple[str, ...] = ()
        self._fetched_digest = ""
        self._donors: tuple[Announcement, ...] = ()
        self._unpublished: deque[S] = deque(maxlen=1)
        """The newest state that is not being written yet; it replaces older ones, which a slow disk would pile up."""
        self._publishing: concurrent.futures.Future[None] | None = None
        self._donor = StateDonor(endpoint, snapshots, config.state)
        self.collective = PeerCollective(
            endpoint,
            loop.loop,
            config.run_id,
            terms,
            config.rule,
            config.round_options,
            book,
            vocabulary_rows,
            stopping,
            changes=run,
            weighing=config.weighing,
            averaging=config.sparseloco.averaging,
            cycle=config.outer.num_fragments,
        )

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop in which everything that talks to others runs."""
        return self._loop.loop

    def alike(self) -> list[Announcement]:
        """Returns the announcements of those that train by this group's terms."""
        return self._book.alike()

    def distrust(self, peer_id: str, seconds: float) -> None:
        """Ignores a peer for a while: no round with it, no state of it. From any thread."""
        self.loop.call_soon_threadsafe(self._book.distrust, peer_id, seconds)

    @property
    def state_digest(self) -> str:
        """Digest of the snapshot handed out now."""
        return self._book.own_state[1]

    @property
    def outer_step(self) -> int:
        """Outer step of the snapshot handed out now."""
        return self._book.own_state[0]

    def group(self, part: str) -> RoundGroup[S]:
        """Returns the group of a part of the model that has rounds of its own; without parts, this one."""
        del part
        return self

    def note_catching_up(self) -> None:
        """Notes that the node fetches the others' state, until `move_to`."""
        self.collective.catch_up()

    def move_to(self, next_round: int) -> None:
        """Notes that the node has taken a state and trains towards this round."""
        self.collective.move_to(next_round)

    def update(self, announcements: tuple[Announcement, ...]) -> None:
        """Takes over what discovery knows now; in the loop."""
        self._book.update(announcements)

    def start_donor(self) -> None:
        """Answers who asks for the state; before the endpoint starts."""
        self._donor.start()

    def close_donor(self) -> None:
        """Closes the files of states."""
        self._donor.close()

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
        self.note_catching_up()
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

    async def _publish(self, before: concurrent.futures.Future[None] | None) -> None:
        if before is not None:
            await asyncio.wait([asyncio.wrap_future(before)])
        if not self._unpublished:  # The call before took it.
            return
        shared = self._unpublished.popleft()
        digest = await self._write(shared)
        outer_step = self._form.outer_step(shared)
        self._book.hold(outer_step, digest)
        await self._handed_out(outer_step, digest)

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
        logger.info("fetching state %s from %d %s", digest[:12], len(peers), "node" if len(peers) == 1 else "nodes")
        stall_timeout_s = self._config.state.stall_timeout_s
        descriptor = await fetch_descriptor(self._calls, peers, digest, stall_timeout_s=stall_timeout_s)
        with self._ignored_if_unfit(digest):
            expectation = self._form.expectation(descriptor)
        snapshot = await fetch_state(
            self._calls,
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
