"""How much a member's vector counts, and how much of a round's planned work its members did.

Weights are claims of strangers. ``contribution_weight`` is a total function of them (no claim makes it raise), and
``cap_weights`` bounds each by a multiple of the median, so that one claim of 1e12 weighs three honest ones and no more.
Both are sequences of correctly rounded operations: every member computes the same bits.

Effect of weights by rule: mean, and trimmed mean over the values kept at a coordinate, are weighted averages; so is
multi-Krum over those selected. Median, Krum and centred clip ignore them, except that weight 0 in every rule means
"brings nothing" and is left out.

``common_progress`` bounds what an outer step may weigh. The weighted average of the claims is what is in the aggregate
of honest members. A liar that asks for a round early and claims to have done all of its work would have the others
apply a whole round's momentum to one step's work; so no claim counts for more than the median, which is an honest
member's, or below one's, while the honest are a majority.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high
from typing import Final

from trainer.errors import TrainerUsageError

__all__ = ["DEFAULT_MAX_RATIO", "cap_weights", "common_progress", "contribution_weight", "freshness"]

DEFAULT_MAX_RATIO: Final = 3.0
_FRESHNESS: Final = ((3600.0, 1.0), (86_400.0, 0.9), (7 * 86_400.0, 0.7))
_STALE: Final = 0.3
# No run trains that many batches in a round; keeps the square root of a claimed integer of a thousand digits finite.
_MOST_BATCHES: Final = 10**12


def freshness(age_s: float) -> float:
    """1.0 below an hour, 0.9 below a day, 0.7 below a week, 0.3 from then on (and for NaN); clocks ahead are fresh."""
    for limit_s, factor in _FRESHNESS:
        if age_s < limit_s:
            return factor
    return _STALE


def contribution_weight(num_batches: int, age_s: float) -> float:
    """The square root of the batches trained, times freshness: 400 batches weigh twice what 100 do.

    Args:
        num_batches: batches that went into the vector; 0 or less weighs 0.
        age_s: seconds since the oldest of them.
    """
    return math.sqrt(min(max(num_batches, 0), _MOST_BATCHES)) * freshness(age_s)


def cap_weights(claimed: Sequence[float], max_ratio: float = DEFAULT_MAX_RATIO) -> list[float]:
    """Weights none of which is more than ``max_ratio`` times the median.

    The median is the lower one of the positive claims, so that it is an honest member's, or below one's, while the
    honest are a majority. NaN, infinities and negative claims weigh 0: who makes them is left out. If no claim is
    positive all weigh 1.

    Args:
        claimed: one weight a member, as claimed.
        max_ratio: 1 or more; 1 lets nobody weigh more than the median.

    Returns:
        As many weights, finite and 0 or more, at least one of them positive (unless ``claimed`` is empty).

    Raises:
        TrainerUsageError: ``max_ratio`` is below 1 or not finite.
    """
    if not 1 <= max_ratio < math.inf:
        raise TrainerUsageError(f"max_ratio: expected 1 or more, found {max_ratio!r}")
    cleaned = [weight if math.isfinite(weight) and weight > 0 else 0.0 for weight in claimed]
    positive = sorted(weight for weight in cleaned if weight > 0)
    if not positive:
        return [1.0] * len(cleaned)
    ceiling = max_ratio * positive[(len(positive) - 1) // 2]
    return [min(weight, ceiling) for weight in cleaned]


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
