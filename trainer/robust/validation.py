"""Gradient validation of 000: does a member's vector look like one of this run's at all?

Three comparisons with the reference, the last accepted outer pseudo-gradient: direction (cosine at least 0.3),
magnitude (norm ratio 0.1 to 10) and spread (variance ratio at most 100). All follow from the moments, in float64, over
the whole flat vector. What cannot be compared is not held against anybody, and is said: before the first round there is
no reference; a vector of one value has no variance, and a constant reference none to compare with. A bound met exactly
passes (a slack of 1e-9 stands for rounding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from trainer.robust.config import RuleConfig
from trainer.robust.second_moments import Moments, moments

__all__ = ["Finding", "validate", "validate_gradient"]

_SLACK: Final = 1e-9
# A variance below this share of the mean square is rounding, and the vector constant.
_CONSTANT: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Finding:
    """What validation found of one member."""

    member: int
    """Its position among the contributions."""
    passed: bool
    reason: str
    """One line; empty where every check was made and passed."""
    cosine: float | None = None
    norm_ratio: float | None = None
    variance_ratio: float | None = None


def validate(found: Moments, config: RuleConfig) -> tuple[Finding, ...]:
    """Compare every member with the reference.

    Args:
        found: moments over whole vectors.
        config: the bounds.

    Returns:
        One finding a member, in order.
    """
    return tuple(_examine(found, member, config) for member in range(found.num_members))


def validate_gradient(submitted: Tensor, reference: Tensor, config: RuleConfig | None = None) -> Finding:
    """Compare one gradient with a reference; both of any one shape.

    Raises:
        TrainerUsageError: they are of different sizes, or the reference is not finite.
    """
    rows = submitted.detach().reshape(1, -1).float()
    return validate(moments(rows, reference.detach().reshape(-1).float()), config or RuleConfig())[0]


def _examine(found: Moments, member: int, config: RuleConfig) -> Finding:
    if not found.finite[member]:
        return Finding(member, False, "not finite")
    row = member + 1
    reference_norm = math.sqrt(float(found.gram[0, 0]))
    if reference_norm == 0:
        return Finding(member, True, "no reference to compare with yet")
    norm = math.sqrt(float(found.gram[row, row]))
    cosine = float(found.gram[0, row]) / norm / reference_norm if norm else 0.0
    variance_ratio = _variance_ratio(found, row)
    reason = _reason(cosine, norm / reference_norm, variance_ratio, config)
    passed = not reason
    if passed and variance_ratio is None:
        reason = "variance not compared: the reference has none"
    return Finding(member, passed, reason, cosine, norm / reference_norm, variance_ratio)


def _reason(cosine: float, norm_ratio: float, variance_ratio: float | None, config: RuleConfig) -> str:
    if cosine < config.min_cosine - _SLACK:
        return f"direction: cosine {cosine:.3g} to the reference, at least {config.min_cosine:g} expected"
    if not config.min_norm_ratio * (1 - _SLACK) <= norm_ratio <= config.max_norm_ratio * (1 + _SLACK):
        bounds = f"{config.min_norm_ratio:g} to {config.max_norm_ratio:g}"
        return f"magnitude: {norm_ratio:.3g} times the reference's norm, {bounds} expected"
    if variance_ratio is not None and variance_ratio > config.max_variance_ratio * (1 + _SLACK):
        return f"variance: {variance_ratio:.3g} times the reference's, at most {config.max_variance_ratio:g} expected"
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
