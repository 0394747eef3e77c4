"""`PeerBook`: those who train by one set of terms, as their announcements say, and which state of theirs to take up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from trainer.collective import Terms
from trainer.network.discovery import Announcement
from trainer.network.rpc import Peer
from trainer.network.transfer import choose_state
from trainer.run.node.identity import ComparedPeer

_REMEMBERED_STATES = 64

StateChoice = Callable[[tuple[int, str], Iterable[Announcement]], str | None]
"""Returns the digest to take up, from this node's own state and the others' announcements; None to keep its own."""


def holds_whole_model(announcement: Announcement) -> bool:
    """Whether a node announces no stage."""
    return announcement.stage is None


def as_said(announcement: Announcement) -> Announcement:
    """Returns an announcement as it is."""
    return announcement


@dataclass(slots=True)
class PeerBook:
    """The other nodes of the run; written by the event loop, read by any thread (one assignment each)."""

    terms_digest: str
    choose: StateChoice = choose_state
    same_kind: Callable[[Announcement], bool] = holds_whole_model
    seen_as: Callable[[Announcement], Announcement] = as_said
    """What an announcement says to this book: of a node with several parts, the part that is this book's."""
    announcements: tuple[Announcement, ...] = ()
    own_state: tuple[int, str] = (0, "")  # Outer step and digest of the snapshot this node hands out.
    _seen: tuple[Announcement, ...] = ()
    _held: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STATES))
    _misfits: frozenset[str] = frozenset()  # Digests of states, announced now, that this node cannot take up.
    _peers: Mapping[str, Peer] = field(default_factory=dict)
    _distrusted: dict[str, float] = field(default_factory=dict)

    def update(self, announcements: tuple[Announcement, ...]) -> None:
        """Takes over what discovery knows now."""
        self.announcements = announcements
        self._seen = tuple(map(self.seen_as, announcements))
        self._misfits &= {found.state_digest for found in self._seen}
        self._peers = {found.peer_id: found.peer() for found in self.alike()}

    def alike(self) -> list[Announcement]:
        """Returns the announcements of nodes that train by this node's terms and are trusted."""
        now_s = time.monotonic()
        return [
            found
            for found in self._seen
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
