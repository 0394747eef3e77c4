"""What the members of a round claim and send, checked: weights are capped, gradients validated (spec T-20).

Validation compares direction (cosine), magnitude (norm) and spread (variance), all from the moments. Three or more are
compared with each other, so that a poisoned earlier result has no influence. An honest member's ``n // 2``-th largest
cosine is to an honest one; of liars that send one vector it is not. It is judged as a share of the median member's, and
late in a run, when members hardly agree and all cosines are near 0, by its distance from it: a share of nothing would
leave out honest members. The price: what is nearly orthogonal to everybody then passes, and the rule has to bear it.
One or two are compared with the last result. What cannot be compared passes, with a reason; so does a bound met
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Final, Literal

from trainer.aggregation.config import RuleConfig
from trainer.aggregation.second_moments import GramMatrix, Moments
from trainer.errors import TrainerUsageError

Weighing = Literal["root", "linear", "pace"]
"""What a member's claimed work weighs: the root of its batches times their freshness; the claim (tokens) itself; or
``pace``, the square of its batches over the steps they took: as much as it did, times what it did in a step (Decoupled
DiLoCo)."""

DEFAULT_MAX_RATIO: Final = 3.0
_FRESHNESS: Final = ((3600.0, 1.0), (86_400.0, 0.9), (7 * 86_400.0, 0.7))  # Below that age.
_STALE: Final = 0.3  # Above, and for NaN.
# More than any run trains in a round; keeps the square root finite for a claimed integer of a thousand digits.
_MAX_BATCHES: Final = 10**12

LEAST_MEMBERS: Final = 3  # Among fewer there is no majority to compare with.

_SLACK: Final = 1e-9
# A variance below this share of the mean square is rounding, and the vector constant.
_CONSTANT: Final = 1e-12
# Of the cosine between unrelated vectors, whose standard deviation is one over the root of their length.
_DEVIATIONS: Final = 3.0
# Measured: honest members of four have cosines of -0.02 to 0.02 to each other after 200 steps.
_LEAST_GAP: Final = 0.05


def contribution_weight(num_batches: int, age_s: float, weighing: Weighing = "root", num_steps: int = 0) -> float:
    """Returns the square root of the batches trained, times the freshness of the oldest; any claim is accepted.

    ``linear``: the claim itself, which is exact for mean gradients over so many tokens. ``pace``: its square over
    ``num_steps``; of claims of no step, as if each batch had been one.
    """
    claimed = min(max(num_batches, 0), _MAX_BATCHES)
    if weighing == "linear":
        return float(claimed)
    if weighing == "pace":
        return claimed * claimed / min(num_steps, _MAX_BATCHES) if num_steps > 0 else float(claimed)
    freshness = next((factor for limit_s, factor in _FRESHNESS if age_s < limit_s), _STALE)
    return math.sqrt(claimed) * freshness


def cap_weights(claimed: Sequence[float], max_ratio: float = DEFAULT_MAX_RATIO) -> list[float]:
    """Limits each member's weight to ``max_ratio`` (1 or more) times the lower median of the positive claims.

    NaN, infinities and negative claims weigh 0. If no claim is positive, all weigh 1. Operations are correctly rounded:
    every member computes the same bits.
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
    """Returns the share of a round's planned work that its members did, 0 to 1, the same bits at all of them.

    It is the weighted average of the claims, but at most their median: otherwise a liar that asks for a round early and
    claims a full round's work would have the others apply a whole round's momentum to one step's work.
    """
    counted = [(value, weight) for value, weight in zip(claimed, weights, strict=True) if weight > 0]
    if not counted:
        return 0.0
    mean = math.fsum(value * weight for value, weight in counted) / math.fsum(weight for _, weight in counted)
    return min(mean, median_high([value for value, _ in counted]))


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of validating one member."""

    member: int
    passed: bool
    reason: str  # One line; empty if every check was made and passed.
    cosine: float | None = None
    """Agreement with the others of the round; among one or two members, cosine to the reference."""
    norm_ratio: float | None = None
    variance_ratio: float | None = None


def unusable(found: Moments, weights: Sequence[float]) -> dict[int, str]:
    """Returns the members that bring nothing to aggregate, and why; weights that are all 0 are all equal."""
    excluded = {member: "not finite" for member in range(found.num_members) if not found.finite[member]}
    idle = [member for member in range(found.num_members) if member not in excluded and weights[member] == 0]
    if len(idle) + len(excluded) < found.num_members:
        excluded |= dict.fromkeys(idle, "brings nothing (weight 0)")
    return excluded


def validate(found: Moments, config: RuleConfig, weights: Sequence[float] | None = None) -> tuple[Finding, ...]:
    """Compares the members with each other, or one or two with the reference, over whole vectors or a part of them.

    Members of weight 0 are not looked at; without ``weights`` all count. Returns one finding a member, in order.
    """
    idle = unusable(found, [1.0] * found.num_members if weights is None else weights)
    members = [member for member in range(found.num_members) if member not in idle]
    if len(members) < LEAST_MEMBERS:
        judged = {member: _beside_reference(found, member, config) for member in members}
    else:
        judged = _beside_each_other(found, members, config)
    return tuple(
        judged[member] if member in judged else Finding(member, bool(found.finite[member]), idle[member])
        for member in range(found.num_members)
    )


def _beside_each_other(found: Moments, members: Sequence[int], config: RuleConfig) -> dict[int, Finding]:
    gram = found.gram.tolist()
    norms = {member: math.sqrt(gram[member + 1][member + 1]) for member in members}
    agreements = {member: _agreement(gram, norms, member) for member in members}
    variances = {member: _variance(found, member + 1) for member in members}
    usual = median_low(agreements.values())
    least_cosine = min(config.min_cosine * usual, usual - _LEAST_GAP) - _DEVIATIONS / math.sqrt(found.num_values)
    median_norm, median_variance = median_low(norms.values()), median_low(variances.values())
    if median_norm == 0:
        reason = "most contributions are zero: nothing to compare with"
        return {member: Finding(member, True, reason) for member in members}
    findings = {}
    for member in members:
        norm_ratio = norms[member] / median_norm
        variance_ratio = variances[member] / median_variance if median_variance > 0 else None
        reason = _reason(agreements[member], norm_ratio, variance_ratio, least_cosine, config)
        findings[member] = Finding(member, not reason, reason, agreements[member], norm_ratio, variance_ratio)
    return findings


def _agreement(gram: GramMatrix, norms: Mapping[int, float], member: int) -> float:
    """The ``n // 2``-th largest cosine to the others; a vector of zeros has cosine 0 to all."""
    cosines = sorted(
        gram[member + 1][other + 1] / norms[member] / norms[other] if norms[member] and norms[other] else 0.0
        for other in norms
        if other != member
    )
    return cosines[-(len(norms) // 2)]


def _beside_reference(found: Moments, member: int, config: RuleConfig) -> Finding:
    row = member + 1
    reference_norm = math.sqrt(float(found.gram[0, 0]))
    if reference_norm == 0:
        return Finding(member, True, "no reference to compare with yet")
    norm = math.sqrt(float(found.gram[row, row]))
    cosine = float(found.gram[0, row]) / norm / reference_norm if norm else 0.0
    reference_variance = _variance(found, 0)
    variance_ratio = _variance(found, row) / reference_variance if reference_variance > 0 else None
    reason = _reason(
        cosine, norm / reference_norm, variance_ratio, config.min_cosine, config, beside="the run's latest direction"
    )
    passed = not reason
    if passed and variance_ratio is None:
        reason = "variance not compared: the reference has none"
    return Finding(member, passed, reason, cosine, norm / reference_norm, variance_ratio)


def _reason(
    cosine: float,
    norm_ratio: float,
    variance_ratio: float | None,
    least_cosine: float,
    config: RuleConfig,
    *,
    beside: str = "the others",
) -> str:
    if cosine < least_cosine - _SLACK:
        return f"direction: cosine {cosine:.3g} to {beside}, at least {least_cosine:.3g} expected"
    if not config.min_norm_ratio * (1 - _SLACK) <= norm_ratio <= config.max_norm_ratio * (1 + _SLACK):
        bounds = f"{config.min_norm_ratio:g} to {config.max_norm_ratio:g}"
        return f"magnitude: {norm_ratio:.3g} times the usual norm, {bounds} expected"
    if variance_ratio is not None and variance_ratio > config.max_variance_ratio * (1 + _SLACK):
        return f"variance: {variance_ratio:.3g} times the usual, at most {config.max_variance_ratio:g} expected"
    return ""


def _variance(found: Moments, row: int) -> float:
    """Unbiased variance of a vector's values; 0 for a constant one, or a single value."""
    if found.num_values < 2:
        return 0.0
    total, square = float(found.sums[row]), float(found.gram[row, row])
    spread = square - total * total / found.num_values
    return spread / (found.num_values - 1) if spread > _CONSTANT * square else 0.0
