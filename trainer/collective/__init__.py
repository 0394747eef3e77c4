"""The collective among strangers: rounds that are agreed, robust, and bit-identical at every member.

    collective = PeerCollective(endpoint, loop, run_id, terms, rule, config, directory, vocabulary_rows)
    result = collective.reduce(contribution)        # the same vector at every member, or RoundFailedError

What a round guarantees: its members are agreed before a tensor moves; each reduces a slice of the vector under the
robust rule and sends the *result* to all; it commits only what every member left holds with one digest, so that members
end bit for bit alike; a member that dies costs nobody the round (its slice is reduced again among the rest) and a
coordinator that dies is replaced. What it does not: a member cut off from the others while they commit has to fetch
their state; a reducer that lies about its slice to everybody alike is not found out (see docs/training.md).

The trade-off: one more round trip than a plain butterfly for the agreement and one for the vote, some milliseconds on
a LAN, a second across the world, once every few hundred inner steps.

``planning`` and ``deciding`` are arithmetic; ``membership``, ``commit_vote`` and ``moments`` the coordinator's side;
``reduction`` the reducer's; ``exchange``, ``results``, ``asking`` and ``member`` the member's; ``service`` answers
others; ``messages`` is what is said.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
