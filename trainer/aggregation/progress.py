"""How much of the work a round was meant to have is in it, from what its members claim: what an outer step may weigh.

The average of the claims by weight is what is in the aggregate of honest members. A liar who asks for a round early and
claims to have done all of its work would have the others apply a whole round's momentum to a step's work; so nothing
above the median counts, which is an honest member's, or below one's, while the honest are a majority.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high

__all__ = ["common_progress"]


def common_progress(claimed: Sequence[float], weights: Sequence[float]) -> float:
    """The progress of a round, rounded alike at all members.

    Args:
        claimed: of each member, 0 to 1.
        weights: of each, 0 or more; a member that weighs nothing is left out.

    Returns:
        0 to 1; 0 where nobody weighs anything.
    """
    counted = [(value, weight) for value, weight in zip(claimed, weights, strict=True) if weight > 0]
    if not counted:
        return 0.0
    mean = math.fsum(value * weight for value, weight in counted) / math.fsum(weight for _, weight in counted)
    return min(mean, median_high([value for value, _ in counted]))
