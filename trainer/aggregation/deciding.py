"""From the moments of whole vectors to what is done with each: the one place where a round's rule is decided.

``decide`` is pure and works in plain Python floats, correctly rounded sums and square roots: whoever has the same
moments, weights and configuration decides the same, bit for bit, on any machine. Permuting the members permutes the
decision (of members whose distances to all others are exactly equal the first is taken).

Enforced validation leaves members out, but never the greater part: if more than half of the finite vectors fail, the
members differ too much to say who is odd, nobody is left out, and the note says so. Among fewer than three nobody is
left out either: an honest member that differs from the last result would be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from trainer.aggregation.clipping import clipped_centre
from trainer.aggregation.config import RuleConfig, RuleName
from trainer.aggregation.second_moments import GramMatrix, Moments, krum_order, squared_distances
from trainer.aggregation.validation import LEAST_MEMBERS, Finding, unusable, validate
from trainer.errors import TrainerUsageError

__all__ = ["Decision", "EffectiveRule", "decide", "effective_rule", "needs_decision", "needs_moments", "trim_count"]

_OVER_WHOLE_VECTORS: Final = frozenset[RuleName]({"krum", "multi_krum", "centered_clip"})


@dataclass(frozen=True, slots=True)
class EffectiveRule:
    """What a configured rule comes to among so many members."""

    rule: RuleName
    num_trimmed: int
    """trimmed_mean: values left out at each end of a coordinate; else 0."""
    note: str
    """Why it is another rule, or protects less than was asked for; empty otherwise."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with each member's vector; equal at all members of a round."""

    coefficients: tuple[float, ...] | None
    """[n] shares of a linear combination; None: ``rule_used`` works coordinate by coordinate."""
    reference_coefficient: float
    """The reference's share; 0 without ``coefficients``."""
    excluded: Mapping[int, str]
    """Members left out before the rule, and why. Positions among the contributions."""
    rule_used: RuleName | Literal["none"]
    """none: everybody is left out, and there is nothing to aggregate."""
    note: str
    findings: tuple[Finding, ...] = ()
    """Of gradient validation, unless it is off."""

    @property
    def odd(self) -> dict[int, str]:
        """Finite contributions that validation left out, and why."""
        failed = {finding.member for finding in self.findings if not finding.passed and finding.cosine is not None}
        return {member: reason for member, reason in self.excluded.items() if member in failed}


def needs_moments(config: RuleConfig) -> bool:
    """Whether whole vectors must be looked at before the first part can be reduced."""
    return config.rule in _OVER_WHOLE_VECTORS


def needs_decision(config: RuleConfig) -> bool:
    """Whether a part is reduced by a decision: over whole vectors, or, to validate, over the part alone."""
    return needs_moments(config) or config.validation == "enforce"


def trim_count(num_members: int, config: RuleConfig) -> int:
    """Values the trimmed mean leaves out at each end: the fraction, at least ``num_byzantine``; one always stays."""
    wanted = max(int(num_members * config.trim_fraction + 1e-9), config.num_byzantine)
    return max(0, min(wanted, (num_members - 1) // 2))


def effective_rule(num_members: int, config: RuleConfig) -> EffectiveRule:
    """The rule as it can be applied to so many members, and what is to be said about it."""
    rule, num_byzantine = config.rule, config.num_byzantine
    trimmed = trim_count(num_members, config) if rule == "trimmed_mean" else 0
    is_alone = num_members == 1 and rule not in _OVER_WHOLE_VECTORS
    if rule == "mean" or num_members < 1 or is_alone:
        return EffectiveRule(rule, trimmed, "")
    least = {"krum": 2 * num_byzantine + 3, "multi_krum": 2 * num_byzantine + 3}.get(rule, 2 * num_byzantine + 1)
    if rule == "centered_clip":
        least = max(3, least)
    if num_members >= least:
        return EffectiveRule(rule, trimmed, "")
    note = f"{rule} against {num_byzantine} needs {least} members, found {num_members}"
    if rule in _OVER_WHOLE_VECTORS:
        rule, note = "median", f"{note}: median instead"
    if num_members < 2 * num_byzantine + 1:
        note = f"{note}; robustness is not available"
    return EffectiveRule(rule, trimmed, note)


def decide(found: Moments, weights: Sequence[float], config: RuleConfig) -> Decision:
    """Who is left out, and how the others become one vector.

    Args:
        found: moments over whole vectors, added up over all slices in one order; of a rule that looks at one coordinate
            at a time they may be those of a part, and the decision is for that part.
        weights: [n], capped; 0 means the member brings nothing.
        config: rule and bounds.

    Raises:
        TrainerUsageError: there are not as many weights as members, or one is no weight.
    """
    if len(weights) != found.num_members or not all(0 <= weight < math.inf for weight in weights):
        raise TrainerUsageError(
            f"weights: expected {found.num_members}, finite and 0 or more (see cap_weights), found {list(weights)}"
        )
    excluded = unusable(found, weights)
    findings: tuple[Finding, ...] = () if config.validation == "off" else validate(found, config, weights)
    lifted = ""
    if config.validation == "enforce":
        lifted = _enforce(findings, excluded)
    members = [member for member in range(found.num_members) if member not in excluded]
    if not members:
        return Decision(None, 0.0, MappingProxyType(excluded), "none", "no usable contribution", findings)
    effective = effective_rule(len(members), config)
    note = "; ".join(part for part in (effective.note, lifted) if part)
    combination = None
    if effective.rule in _OVER_WHOLE_VECTORS:
        combination = _combine(found.gram.tolist(), members, weights, effective.rule, config)
    return Decision(
        coefficients=None if combination is None else tuple(combination[1:]),
        reference_coefficient=0.0 if combination is None else combination[0],
        excluded=MappingProxyType(excluded),
        rule_used=effective.rule,
        note=note,
        findings=findings,
    )


def _enforce(findings: Sequence[Finding], excluded: dict[int, str]) -> str:
    """Add those who failed to ``excluded``, unless they are the greater part; the note to make."""
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
        return clipped_centre(gram, rows, config.clip_radius)
    num_neighbours = len(members) - config.num_byzantine - 2
    order = krum_order(squared_distances(gram, rows), num_neighbours)
    chosen = sorted(order[: 1 if rule == "krum" else num_neighbours])
    combination = [0.0] * len(gram)
    shares = _shares([weights[members[position]] for position in chosen])
    for position, share in zip(chosen, shares, strict=True):
        combination[rows[position]] = share
    return combination


def _shares(weights: Sequence[float]) -> list[float]:
    """Weights as shares of their sum; equal shares where no weight is positive."""
    if not any(weight > 0 for weight in weights):
        return [1.0 / len(weights)] * len(weights)
    total = math.fsum(weights)
    return [weight / total for weight in weights]
