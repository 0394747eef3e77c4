"""Aggregation that a minority of broken or lying members cannot subvert: rules, gradient validation, weights.

    found = sum of moments(part_rows, reference_part) over the parts, the slices of all reducers added in one order
    decision = decide(found, weights, config)            # the same at every member
    result = reduce_part(part_rows, weights, config, decision, reference_part)   # part by part, by its reducer

Guarantees: a NaN, an infinity or a claimed weight of 1e12 changes nothing or is bounded; every function is
deterministic, and ``decide`` across machines too; if the members are too few for a rule, the note names the fallback.
The trade-off: exact second moments (float64), the only barrier of a round, wherever a rule looks at whole vectors.
"""

from __future__ import annotations

from trainer.aggregation.config import RuleConfig, RuleName, ValidationMode
from trainer.aggregation.deciding import (
    EffectiveRule,
    RuleDecision,
    decide,
    effective_rule,
    needs_decision,
    needs_moments,
    trim_count,
)
from trainer.aggregation.reducing import reduce_part
from trainer.aggregation.second_moments import MAX_MEMBERS, Moments, finite_rows, moments
from trainer.aggregation.validation import (
    DEFAULT_MAX_RATIO,
    Finding,
    cap_weights,
    common_progress,
    contribution_weight,
    freshness,
    validate,
    validate_gradient,
)

__all__ = [
    "DEFAULT_MAX_RATIO",
    "MAX_MEMBERS",
    "EffectiveRule",
    "Finding",
    "Moments",
    "RuleConfig",
    "RuleDecision",
    "RuleName",
    "ValidationMode",
    "cap_weights",
    "common_progress",
    "contribution_weight",
    "decide",
    "effective_rule",
    "finite_rows",
    "freshness",
    "moments",
    "needs_decision",
    "needs_moments",
    "reduce_part",
    "trim_count",
    "validate",
    "validate_gradient",
]
