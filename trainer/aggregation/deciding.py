"""Decides from the moments of whole vectors what is done with each of them.

``decide`` is pure and uses plain Python floats, correctly rounded sums and square roots: the same moments, weights and
configuration give the same decision, bit for bit, on any machine; permuting the members permutes it. Centred clipping
(Karimireddy et al., 2021) is iterated in the coordinates of the Gram matrix. Its automatic radius, the lower median
distance, ends within R·n/(n-2f) of the honest mean if the n-f honest lie within R of it, whatever the f others send.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from types import MappingProxyType
from typing import Final, Literal

from trainer.aggregation.config import RuleConfig, RuleName
from trainer.aggregation.second_moments import GramMatrix, Moments, krum_order, squared_distances
from trainer.aggregation.validation import LEAST_MEMBERS, Finding, unusable, validate
from trainer.errors import TrainerUsageError

_OVER_WHOLE_VECTORS: Final = frozenset[RuleName]({"krum", "multi_krum", "centered_clip"})
# The remaining distance halves at least with every move; a radius set by hand may stop short of the fixed point.
_MAX_MOVES: Final = 60
_CONVERGED: Final = 1e-12


@dataclass(frozen=True, slots=True)
class EffectiveRule:
    """The rule that is applied among a given number of members."""

    rule: RuleName
    note: str  # Why it is another rule, or protects less than was asked for; empty otherwise.


@dataclass(frozen=True, slots=True)
class RuleDecision:
    """What to do with each member's vector; equal at all members of a round."""

    coefficients: tuple[float, ...] | None
    """[n] shares of a linear combination; None: ``rule_used`` works coordinate by coordinate."""
    reference_coefficient: float  # The reference's share; 0 without ``coefficients``.
    excluded: Mapping[int, str]  # Members left out before the rule, and why. Positions among the contributions.
    rule_used: RuleName | Literal["none"]  # none: everybody is left out, and there is nothing to aggregate.
    note: str
    findings: tuple[Finding, ...] = ()

    @property
    def odd(self) -> dict[int, str]:
        """Finite contributions that validation left out, and why."""
        failed = {finding.member for finding in self.findings if not finding.passed and finding.cosine is not None}
        return {member: reason for member, reason in self.excluded.items() if member in failed}


def needs_moments(config: RuleConfig) -> bool:
    """Returns whether whole vectors must be looked at before the first part can be reduced."""
    return config.rule in _OVER_WHOLE_VECTORS


def needs_decision(config: RuleConfig) -> bool:
    """Returns whether a part is reduced by a decision: over whole vectors or, to validate, over the part alone."""
    return needs_moments(config) or config.validation == "enforce"


def trim_count(num_members: int, config: RuleConfig) -> int:
    """Returns how many values the trimmed mean leaves out at each end; one value always stays."""
    wanted = max(int(num_members * config.trim_fraction + 1e-9), config.num_byzantine)
    return max(0, min(wanted, (num_members - 1) // 2))


def effective_rule(num_members: int, config: RuleConfig) -> EffectiveRule:
    """Returns the rule as it can be applied to so many members."""
    rule, num_byzantine = config.rule, config.num_byzantine
    least = 2 * num_byzantine + (3 if rule in ("krum", "multi_krum") else 1)
    if rule == "centered_clip":
        least = max(3, least)
    is_alone = num_members == 1 and rule not in _OVER_WHOLE_VECTORS
    if rule == "mean" or num_members < 1 or is_alone or num_members >= least:
        return EffectiveRule(rule, "")
    note = f"{rule} against {num_byzantine} needs {least} members, found {num_members}"
    if rule in _OVER_WHOLE_VECTORS:
        rule, note = "median", f"{note}: median instead"
    if num_members < 2 * num_byzantine + 1:
        note = f"{note}; robustness is not available"
    return EffectiveRule(rule, note)


def decide(found: Moments, weights: Sequence[float], config: RuleConfig) -> RuleDecision:
    """Decides who is left out, and how the others become one vector; a weight (capped) of 0 brings nothing.

    The moments are over whole vectors, all slices added in one order; for a coordinate-wise rule they may be those of a
    part, and the decision is for that part.
    """
    if len(weights) != found.num_members or not all(0 <= weight < math.inf for weight in weights):
        raise TrainerUsageError(
            f"weights: expected {found.num_members}, finite and 0 or more (see cap_weights), found {list(weights)}"
        )
    excluded = unusable(found, weights)
    findings: tuple[Finding, ...] = () if config.validation == "off" else validate(found, config, weights)
    lifted = _enforce(findings, excluded) if config.validation == "enforce" else ""
    members = [member for member in range(found.num_members) if member not in excluded]
    if not members:
        return RuleDecision(None, 0.0, MappingProxyType(excluded), "none", "no usable contribution", findings)
    effective = effective_rule(len(members), config)
    combination = None
    if effective.rule in _OVER_WHOLE_VECTORS:
        combination = _combine(found.gram.tolist(), members, weights, effective.rule, config)
    return RuleDecision(
        coefficients=None if combination is None else tuple(combination[1:]),
        reference_coefficient=0.0 if combination is None else combination[0],
        excluded=MappingProxyType(excluded),
        rule_used=effective.rule,
        note="; ".join(part for part in (effective.note, lifted) if part),
        findings=findings,
    )


def _enforce(findings: Sequence[Finding], excluded: dict[int, str]) -> str:
    """Adds those who failed to ``excluded``, unless most did, or there are too few to say; returns the note to make."""
    checked = [finding for finding in findings if finding.member not in excluded]
    failed = [finding for finding in checked if not finding.passed]
    if len(checked) < LEAST_MEMBERS:
        return ""
    if 2 * len(failed) > len(checked):
        return f"validation not enforced: {len(failed)} of {len(checked)} members differ from the others"
    excluded |= {finding.member: finding.reason for finding in failed}
    return ""


def _combine(
    gram: GramMatrix, members: Sequence[int], weights: Sequence[float], rule: RuleName, config: RuleConfig
) -> list[float]:
    """n+1 coefficients over (reference, x_1, ..., x_n); 0 or more, adding up to 1."""
    rows = [member + 1 for member in members]
    if rule == "centered_clip":
        return _clipped_centre(gram, rows, config.clip_radius)
    num_neighbours = len(members) - config.num_byzantine - 2
    order = krum_order(squared_distances(gram, rows), num_neighbours)
    chosen = sorted(order[: 1 if rule == "krum" else num_neighbours])
    kept_weights = [weights[members[position]] for position in chosen]
    if not any(kept_weights):
        kept_weights = [1.0] * len(chosen)
    total = math.fsum(kept_weights)
    combination = [0.0] * len(gram)
    for position, weight in zip(chosen, kept_weights, strict=True):
        combination[rows[position]] = weight / total
    return combination


def _clipped_centre(gram: GramMatrix, members: Sequence[int], radius: float) -> list[float]:
    """The centre as coefficients, 0 or more and adding up to 1, over the rows of a Gram matrix.

    ``members`` are the rows of those that count. All pull alike: weights are claims, and with claims of three times the
    median (`cap_weights`) two liars of seven would have most of the pull. A ``radius`` of 0 is the median distance.
    """
    rows = [0, *members]
    start = 0
    if not gram[0][0] > 0:  # No reference: the member closest to half of the others, of whom at least one is honest.
        start = members[krum_order(squared_distances(gram, members), (len(members) - 1) // 2)[0]]
    coefficients = [0.0] * len(gram)
    coefficients[start] = 1.0
    for _ in range(_MAX_MOVES):
        distances = _distances_to(gram, rows, coefficients)
        limit = radius or median_low(distances)
        pulls = [(limit / distance if distance > limit else 1.0) / len(members) for distance in distances]
        stays = max(0.0, 1.0 - math.fsum(pulls))
        moved = [coefficient * stays for coefficient in coefficients]
        for row, pull in zip(members, pulls, strict=True):
            moved[row] += pull
        change = max(abs(new - old) for new, old in zip(moved, coefficients, strict=True))
        coefficients = moved
        if change < _CONVERGED:
            break
    return coefficients


def _distances_to(gram: GramMatrix, rows: Sequence[int], coefficients: Sequence[float]) -> list[float]:
    """Distance of every row but the first to the combination of rows that the coefficients give."""
    products = [math.fsum(coefficients[j] * gram[i][j] for j in rows) for i in rows]
    square = math.fsum(coefficients[i] * product for i, product in zip(rows, products, strict=True))
    return [
        math.sqrt(max(0.0, math.fsum((gram[i][i], -2.0 * product, square))))
        for i, product in zip(rows[1:], products[1:], strict=True)
    ]
