"""What a node must know of the others' rounds, and how to make it of claims of strangers.

The others' announcements name the round each is at. The lower median of them is believed: so a minority of liars moves
nobody, and of honest nodes, which differ by a round at most, it is one that was reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import Final, Protocol, runtime_checkable

from trainer.network.discovery.announcement import Announcement
from trainer.network.transfer import choose_state

__all__ = ["NOBODY", "OtherRounds", "choose_recent_state", "frontier_of"]


@runtime_checkable
class OtherRounds(Protocol):
    """The others' rounds, as far as discovery tells; asked after every step, so it must be cheap."""

    def frontier(self) -> int:
        """The round the others are at (:func:`frontier_of`); 0 if nothing is known."""
        ...

    def move_to(self, round_index: int) -> None:
        """This node trains towards another round from now on (``PeerCollective.move_to``), without having made it."""
        ...


class _Nobody:
    def frontier(self) -> int:
        """Nothing is known."""
        return 0

    def move_to(self, round_index: int) -> None:
        """Nobody is told."""


NOBODY: Final[OtherRounds] = _Nobody()
"""For a node alone, and for engines whose members meet by themselves."""


def frontier_of(rounds: Sequence[int]) -> int:
    """The round the others are at.

    Args:
        rounds: the one each of them says is its next; of each node once.

    Returns:
        Their lower median; 0 where there are none.
    """
    return median_low(rounds) if rounds else 0


def choose_recent_state(
    own: tuple[int, str], announcements: Iterable[Announcement], *, max_staleness_rounds: int = 5
) -> str | None:
    """Which state to take up, where each replica's is its own; a ``StateChoice`` for the node's peer book.

    A node keeps its own while it is within ``max_staleness_rounds`` of the others. Else, of the states that are no
    older than the others' median round and no further ahead than the staleness allowed (nobody honest is), the one most
    nodes hold: joiners that took up the same hand it on together.

    Args:
        own: round and digest of the state this node holds; an empty digest if none worth keeping.
        announcements: verified ones of other nodes of the same stage; ``outer_step`` is the round of the state.
        max_staleness_rounds: of the run.

    Returns:
        The digest to fetch; None: keep the own, or nobody has any.
    """
    offered = [found for found in announcements if found.state_digest]
    frontier = frontier_of([found.outer_step for found in {found.peer_id: found for found in offered}.values()])
    if not offered or (own[1] and own[0] + max_staleness_rounds >= frontier):
        return None
    recent = [found for found in offered if frontier <= found.outer_step <= frontier + max_staleness_rounds]
    return choose_state((0, ""), recent)
