"""The collective among strangers: rounds that are agreed, robust, and bit-identical at every member.

    collective = PeerCollective(endpoint, loop, run_id, terms, rule, config, directory, vocabulary_rows)
    result = collective.reduce(contribution)        # the same vector at every member, or RoundFailedError

The members are agreed before a tensor moves; each reduces a slice of the vector under the robust rule and sends the
*result* to all; a round commits only what every remaining member holds with one digest. A dead member does not fail the
round (its slice is reduced again by the others), and a dead coordinator is replaced. The trade-off: one more round trip
than a plain butterfly for the agreement and one for the vote.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
