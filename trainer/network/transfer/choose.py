"""Which state a node adopts when those it sees differ: the one most of them hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low

from trainer.network.discovery.announcement import Announcement

__all__ = ["choose_state"]


@dataclass(slots=True)
class _Candidate:
    holders: set[str] = field(default_factory=set)
    claimed_steps: list[int] = field(default_factory=list)


def choose_state(own: tuple[int, str], announcements: Iterable[Announcement]) -> str | None:
    """Picks the state the most distinct nodes hold, this one included.

    Ties go to the higher outer step (the median of what its holders say), then to the lower digest, so that nodes that
    see the same announcements choose the same. One node has one vote, whatever it claims of itself: a liar who is alone
    wins only against a state that nobody but this node holds.

    Args:
        own: outer step and digest of the state this node holds; an empty digest if it holds none worth keeping.
        announcements: verified ones of other nodes; those with an empty `state_digest` have no vote.

    Returns:
        The digest to fetch, or None: keep the own state, or nobody has any.
    """
    candidates: dict[str, _Candidate] = {}
    votes = [
        (announcement.peer_id, announcement.outer_step, announcement.state_digest) for announcement in announcements
    ]
    for holder, step, digest in [("", *own), *_one_vote_each(votes)]:
        if digest:
            candidate = candidates.setdefault(digest, _Candidate())
            candidate.holders.add(holder)
            candidate.claimed_steps.append(step)
    if not candidates:
        return None
    best = min(
        candidates,
        key=lambda digest: (
            -len(candidates[digest].holders),
            -median_low(candidates[digest].claimed_steps),
            digest,
        ),
    )
    return None if best == own[1] else best


def _one_vote_each(votes: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """If a node is listed twice its last word counts, by step and digest, whatever the order."""
    return list({holder: (holder, step, digest) for holder, step, digest in sorted(votes)}.values())
