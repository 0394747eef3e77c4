"""Gradient validation (spec T-20): does a member's vector look like one of this run's?

Three comparisons: direction (cosine), magnitude (norm ratio 0.1 to 10) and spread (variance ratio at most 100). All
follow from the moments, in float64.

Three or more members are compared with each other, so that a poisoned result of an earlier round has no influence, and
an honest member passes while the honest are a majority:

- A member's *agreement* is the ``n // 2``-th largest of its cosines to the others. An honest member finds that many
  honest others; f <= (n - 1) / 2 liars that send one vector are only f - 1 others to each other. The least agreement is
  a share (``min_cosine``) of the median member's: honest pseudo-gradients have cosines of 0.1 to 0.9 with each other,
  by batch size and phase of training, but those of one round are much alike. Three standard deviations of the cosine
  between unrelated vectors are conceded, so that short vectors are not judged by chance.
- Norm and variance are compared with the lower median member's.

One or two members are compared with the last accepted pseudo-gradient (spec T-20); nobody is left out for that
(`deciding`). What cannot be compared passes, with a reason. A bound met exactly passes (a slack of 1e-9 for rounding).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final

from torch import Tensor

from trainer.aggregation.config import RuleConfig
from trainer.aggregation.second_moments import GramMatrix, Moments, moments

__all__ = ["LEAST_MEMBERS", "Finding", "unusable", "validate", "validate_gradient"]

LEAST_MEMBERS: Final = 3
"""Among fewer there is no majority to compare with."""

_SLACK: Final = 1e-9
# A variance below this share of the mean square is rounding, and the vector constant.
_CONSTANT: Final = 1e-12
# Of the cosine between unrelated vectors, whose standard deviation is one over the root of their length.
_DEVIATIONS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of validating one member."""

    member: int
    """Position among the contributions."""
    passed: bool
    reason: str
    """One line; empty if every check was made and passed."""
    cosine: float | None = None
    """Agreement with the others of the round; among one or two members, cosine to the reference."""
    norm_ratio: float | None = None
    """Norm over the median member's, or the reference's."""
    variance_ratio: float | None = None


def unusable(found: Moments, weights: Sequence[float]) -> dict[int, str]:
    """Returns the members that bring nothing to aggregate, and why.

    Args:
        found: moments.
        weights: [n]; all 0 is all equal.
    """
    excluded = {member: "not finite" for member in range(found.num_members) if not found.finite[member]}
    idle = [member for member in range(found.num_members) if member not in excluded and weights[member] == 0]
    if len(idle) + len(excluded) < found.num_members:
        excluded |= dict.fromkeys(idle, "brings nothing (weight 0)")
    return excluded


def validate(found: Moments, config: RuleConfig, weights: Sequence[float] | None = None) -> tuple[Finding, ...]:
    """Compare the members with each other, or one or two with the reference.

    Args:
        found: moments, over whole vectors or a part of them.
        config: the bounds.
        weights: [n], capped; members of weight 0 are not looked at. None: all count.

    Returns:
        One finding a member, in order.
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


def validate_gradient(submitted: Tensor, reference: Tensor, config: RuleConfig | None = None) -> Finding:
    """Compares one gradient with a reference; both of any one shape.

    Raises:
        TrainerUsageError: they are of different sizes, or the reference is not finite.
    """
    rows = submitted.detach().reshape(1, -1).float()
    return validate(moments(rows, reference.detach().reshape(-1).float()), config or RuleConfig())[0]


def _beside_each_other(found: Moments, members: Sequence[int], config: RuleConfig) -> dict[int, Finding]:
    gram = found.gram.tolist()
    norms = {member: math.sqrt(gram[member + 1][member + 1]) for member in members}
    agreements = {member: _agreement(gram, norms, member) for member in members}
    variances = {member: _variance(found, member + 1) for member in members}
    least_cosine = config.min_cosine * median_low(agreements.values()) - _DEVIATIONS / math.sqrt(found.num_values)
    median_norm, median_variance = median_low(norms.values()), median_low(variances.values())
    if median_norm == 0:
        return {
            member: Finding(member, True, "most contributions are zero: nothing to compare with") for member in members
        }
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
    variance_ratio = _variance_ratio(found, row)
    reason = _reason(cosine, norm / reference_norm, variance_ratio, config.min_cosine, config)
    passed = not reason
    if passed and variance_ratio is None:
        reason = "variance not compared: the reference has none"
    return Finding(member, passed, reason, cosine, norm / reference_norm, variance_ratio)


def _reason(
    cosine: float, norm_ratio: float, variance_ratio: float | None, least_cosine: float, config: RuleConfig
) -> str:
    if cosine < least_cosine - _SLACK:
        return f"direction: cosine {cosine:.3g} to the others, at least {least_cosine:.3g} expected"
    if not config.min_norm_ratio * (1 - _SLACK) <= norm_ratio <= config.max_norm_ratio * (1 + _SLACK):
        bounds = f"{config.min_norm_ratio:g} to {config.max_norm_ratio:g}"
        return f"magnitude: {norm_ratio:.3g} times the usual norm, {bounds} expected"
    if variance_ratio is not None and variance_ratio > config.max_variance_ratio * (1 + _SLACK):
        return f"variance: {variance_ratio:.3g} times the usual, at most {config.max_variance_ratio:g} expected"
    return ""


def _variance(found: Moments, row: int) -> float:
    """Unbiased variance of a vector's values; 0 for a constant one."""
    total, square = float(found.sums[row]), float(found.gram[row, row])
    spread = square - total * total / found.num_values
    return spread / (found.num_values - 1) if spread > _CONSTANT * square else 0.0


def _variance_ratio(found: Moments, row: int) -> float | None:
    if found.num_values < 2:
        return None
    reference = _variance(found, 0)
    return _variance(found, row) / reference if reference > 0 else None
