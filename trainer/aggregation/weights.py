"""Weights of members' vectors, and the share of a round's planned work that its members did.

Both come from claims of strangers. ``contribution_weight`` accepts any claim without raising, and ``cap_weights``
bounds each weight by a multiple of the median: a claim of 1e12 weighs as much as three honest ones. Both consist of
correctly rounded operations, so every member computes the same bits.

Mean, trimmed mean (over the values kept at a coordinate) and multi-Krum (over the selected members) are weighted
averages. Median, Krum and centred clip ignore weights. Under every rule a weight of 0 leaves the member out.

``common_progress`` limits the momentum of an outer step. It is the weighted average of the members' claims, but at most
their median: otherwise a liar that asks for a round early and claims a full round's work would have the others apply a
whole round's momentum to one step's work. While the honest are a majority, the median is an honest claim or below one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high, median_low
from typing import Final

from trainer.errors import TrainerUsageError

__all__ = ["DEFAULT_MAX_RATIO", "cap_weights", "common_progress", "contribution_weight", "freshness"]

DEFAULT_MAX_RATIO: Final = 3.0
_FRESHNESS: Final = ((3600.0, 1.0), (86_400.0, 0.9), (7 * 86_400.0, 0.7))
_STALE: Final = 0.3
# More than any run trains in a round; keeps the square root finite for a claimed integer of a thousand digits.
_MAX_BATCHES: Final = 10**12


def freshness(age_s: float) -> float:
    """Returns 1.0 below an hour, 0.9 below a day, 0.7 below a week, and 0.3 above and for NaN."""
    return next((factor for limit_s, factor in _FRESHNESS if age_s < limit_s), _STALE)


def contribution_weight(num_batches: int, age_s: float) -> float:
    """Returns the square root of the batches trained, times their freshness.

    Args:
        num_batches: batches that went into the vector; 0 or less weighs 0.
        age_s: seconds since the oldest of them.
    """
    return math.sqrt(min(max(num_batches, 0), _MAX_BATCHES)) * freshness(age_s)


def cap_weights(claimed: Sequence[float], max_ratio: float = DEFAULT_MAX_RATIO) -> list[float]:
    """Limits each weight to ``max_ratio`` times the lower median of the positive claims.

    NaN, infinities and negative claims weigh 0. If no claim is positive, all weigh 1.

    Args:
        claimed: one weight a member.
        max_ratio: 1 or more.

    Returns:
        As many weights, finite and 0 or more, at least one of them positive (unless ``claimed`` is empty).

    Raises:
        TrainerUsageError: ``max_ratio`` is below 1 or not finite.
    """
    if not 1 <= max_ratio < math.inf:
        raise TrainerUsageError(f"max_ratio: expected 1 or more, found {max_ratio!r}")
    cleaned = [weight if math.isfinite(weight) and weight > 0 else 0.0 for weight in claimed]
    positive = [weight for weight in cleaned if weight > 0]
    if not positive:
        return [1.0] * len(cleaned)
    ceiling = max_ratio * median_low(positive)
    return [min(weight, ceiling) for weight in cleaned]


def common_progress(claimed: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the share of a round's planned work that its members did, the same bits at all of them.

    Args:
        claimed: share of each member, 0 to 1.
        weights: weight of each, 0 or more; a member of weight 0 is left out.

    Returns:
        0 to 1; 0 if no member has a weight.
    """
    counted = [(value, weight) for value, weight in zip(claimed, weights, strict=True) if weight > 0]
    if not counted:
        return 0.0
    mean = math.fsum(value * weight for value, weight in counted) / math.fsum(weight for _, weight in counted)
    return min(mean, median_high([value for value, _ in counted]))
