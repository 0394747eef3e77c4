"""Which round a node is at, what it knows of the others' rounds, and how far it is behind.

A round's number advances when the round is committed, here or, as far as is known, by others; never by a failure: one
that fails for all members is tried again by all. A node rejoins only if rounds failed for it *and* the others have
committed some since it last did (spec P-41). The others' announcements name the round each is at; their lower median is
believed: a minority of liars moves nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any, Final, Protocol, runtime_checkable

from trainer.network.discovery.announcement import Announcement
from trainer.network.transfer import choose_state


@dataclass(slots=True)
class RoundStanding:
    """Counters of one node; :class:`~trainer.outer.sparta.trainer.SpartaTrainer` moves them."""

    max_staleness_rounds: int
    max_failed_rounds: int
    round_index: int = 0  # The next round.
    reached: int = 0  # The round that was next after this node's last committed round, or when it took up a state.
    failed_in_a_row: int = 0
    failed_round: int = -1  # The last round that failed; -1: none since the last committed one.
    ghost_rounds_left: int = 0  # Committed rounds in which this node still counts for nothing.
    behind: bool = False  # More rounds were missed than allowed.
    damaged: bool = False  # Parameters are not finite; only another's state repairs that.

    def counters(self) -> dict[str, Any]:
        """Returns what a checkpoint holds: all but the options."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("max_")}

    @property
    def missed_rounds(self) -> int:
        """Rounds the others have made since this node's last, as far as it has gone on with them."""
        return self.round_index - self.reached

    @property
    def must_adopt(self) -> bool:
        """Whether the others' state has to be taken up."""
        return self.behind or self.damaged

    @property
    def must_rejoin(self) -> bool:
        """Whether to leave, take up the others' state and come again."""
        return self.must_adopt or (self.failed_in_a_row >= self.max_failed_rounds and self.missed_rounds > 0)

    @property
    def counts(self) -> bool:
        """Whether this node's parameters have a weight in the average."""
        return not self.ghost_rounds_left and not self.must_adopt

    def committed(self) -> None:
        """Counts a round committed here."""
        self.round_index += 1
        self.reached = self.round_index
        self.failed_in_a_row, self.failed_round, self.behind = 0, -1, False
        self.ghost_rounds_left = max(0, self.ghost_rounds_left - 1)

    def failed(self) -> None:
        """Counts a round that ended without a result, for all one knows for all members; it will be tried again."""
        self.failed_in_a_row += 1
        self.failed_round = self.round_index

    def missed(self, frontier: int = 0) -> None:
        """Counts a round that the others made without this node, once, even if its own failure came first."""
        if self.failed_round != self.round_index:
            self.failed()
        self.see(max(frontier, self.round_index + 1))

    def see(self, frontier: int) -> bool:
        """Notes the round the others are at; returns whether this node went on to it, or is found behind by it."""
        if frontier <= self.round_index:
            return False
        if frontier - self.reached > self.max_staleness_rounds:
            was_behind, self.behind = self.behind, True
            return not was_behind
        self.round_index = frontier
        return True

    def adopted(self, round_index: int, ghost_rounds: int) -> None:
        """Starts again from another member's state."""
        self.round_index = self.reached = round_index
        self.failed_in_a_row, self.failed_round, self.behind, self.damaged = 0, -1, False, False
        self.ghost_rounds_left = ghost_rounds


@runtime_checkable
class OtherRounds(Protocol):
    """The others' rounds, as far as discovery knows; asked after every step, so it must be cheap."""

    def frontier(self) -> int:
        """Returns the round the others are at (:func:`frontier_of`); 0 if nothing is known."""
        ...

    def move_to(self, round_index: int) -> None:
        """Announces that this node trains towards another round, without having made it."""
        ...


class _Nobody:
    def frontier(self) -> int:
        return 0

    def move_to(self, round_index: int) -> None: ...


NOBODY: Final[OtherRounds] = _Nobody()  # For a node alone, and for engines whose members meet by themselves.


def frontier_of(rounds: Sequence[int]) -> int:
    """Returns the lower median of the rounds that the other nodes say are their next; 0 if there are none."""
    return median_low(rounds) if rounds else 0


def choose_recent_state(
    own: tuple[int, str], announcements: Iterable[Announcement], *, max_staleness_rounds: int = 5
) -> str | None:
    """Chooses the state to take up where each replica's is its own; a ``StateChoice`` for the node's peer book.

    A node keeps its own (round and digest, empty if none is worth keeping) while it is within ``max_staleness_rounds``
    of the others: returns None, as when nobody has any. Otherwise it takes the state that most nodes hold among those
    from the others' median round up to the allowed staleness ahead of it, which no honest node exceeds: joiners that
    took up the same state hand it on together. Announcements are verified ones of the same stage.
    """
    offered = [found for found in announcements if found.state_digest]
    frontier = frontier_of([found.outer_step for found in {found.peer_id: found for found in offered}.values()])
    if not offered or (own[1] and own[0] + max_staleness_rounds >= frontier):
        return None
    recent = [found for found in offered if frontier <= found.outer_step <= frontier + max_staleness_rounds]
    return choose_state((0, ""), recent)
