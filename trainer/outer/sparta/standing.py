"""Where a node stands among the others' rounds: which is next, how many failed in a row, how far it is behind.

A round's number advances when the round is committed, here or, as far as is known, by others; never by a failure. A
round that fails for everybody is thus tried again by everybody, with the same slice; one that failed for this node
alone is over, which the node learns when it is refused with it, and goes on with the next. Rounds it missed so are
borne up to ``max_staleness_rounds``: the next cycles average what they would have.

Failures are told apart, so that nobody is sent away for the others' (spec P-41: after two failed averages): a node
is to rejoin only if rounds failed for it *and* the others have committed some since it last did.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoundStanding"]


@dataclass(slots=True)
class RoundStanding:
    """Counters alone; see :class:`~trainer.outer.sparta.trainer.SpartaTrainer` for who moves them.

    Args:
        max_staleness_rounds: rounds of the others that may be missed.
        max_failed_rounds: failures in a row before rejoining.
        round_index: the round that is next.
        reached: the round that was next after this node's last committed round, or when it took up a state.
        failed_in_a_row: rounds tried in vain since the last committed one.
        failed_round: the last round that failed, -1: none since the last committed one.
        ghost_rounds_left: committed rounds in which this node still counts for nothing.
        behind: more rounds were missed than may be.
        damaged: parameters are not finite; only another's state heals that.
    """

    max_staleness_rounds: int
    max_failed_rounds: int
    round_index: int = 0
    reached: int = 0
    failed_in_a_row: int = 0
    failed_round: int = -1
    ghost_rounds_left: int = 0
    behind: bool = False
    damaged: bool = False

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
        """A round was committed, here."""
        self.round_index += 1
        self.reached = self.round_index
        self.failed_in_a_row, self.failed_round, self.behind = 0, -1, False
        self.ghost_rounds_left = max(0, self.ghost_rounds_left - 1)

    def failed(self) -> None:
        """A round ended without a result, for all one knows for everybody; it will be tried again."""
        self.failed_in_a_row += 1
        self.failed_round = self.round_index

    def missed(self, frontier: int = 0) -> None:
        """The others have gone on without this node: counted once, also where its own failure came first.

        Args:
            frontier: the round they are at, where that is known.
        """
        if self.failed_round != self.round_index:
            self.failed()
        self.see(max(frontier, self.round_index + 1))

    def see(self, frontier: int) -> bool:
        """The others are at this round.

        Returns:
            Whether this node went on to it, or is found behind only now.
        """
        if frontier <= self.round_index:
            return False
        if frontier - self.reached > self.max_staleness_rounds:
            was_behind, self.behind = self.behind, True
            return not was_behind
        self.round_index = frontier
        return True

    def adopted(self, round_index: int, ghost_rounds: int) -> None:
        """Another member's state was taken up."""
        self.round_index = self.reached = round_index
        self.failed_in_a_row, self.failed_round, self.behind, self.damaged = 0, -1, False, False
        self.ghost_rounds_left = ghost_rounds
