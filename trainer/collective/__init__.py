"""The collective among strangers: rounds that are agreed, robust, and bit-identical at every member.

    collective = PeerCollective(endpoint, loop, run_id, terms, rule, config, directory, vocabulary_rows)
    result = collective.reduce(contribution)        # the same vector at every member, or RoundFailedError

Guarantees: the members are agreed before a tensor moves; each reduces a slice of the vector under the robust rule and
sends the *result* to all; a round commits only what every remaining member holds with one digest, so that members end
bit for bit alike; a dead member does not fail the round (its slice is reduced again by the others) and a dead
coordinator is replaced. Not guaranteed: a member cut off from the others while they commit has to fetch their state; a
reducer that tells all members the same lie about its slice is not detected (see docs/training.md).

The trade-off: one more round trip than a plain butterfly for the agreement and one for the vote, some milliseconds on
a LAN, a second across the world, once every few hundred inner steps.

``planning`` is arithmetic that every member checks; ``membership``, ``commit_vote`` and ``moments`` are the
coordinator's side, ``reduction`` and ``arithmetic`` the reducer's, ``member`` and ``coordinator_client`` the member's;
``service`` answers others; ``messages`` is the protocol.
"""

from __future__ import annotations

from trainer.collective.config import CollectiveConfig, Compression
from trainer.collective.messages import Terms
from trainer.collective.peer_collective import PeerCollective
from trainer.collective.service import Directory

__all__ = [
    "CollectiveConfig",
    "Compression",
    "Directory",
    "PeerCollective",
    "Terms",
]
