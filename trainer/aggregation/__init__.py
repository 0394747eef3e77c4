"""Aggregation that a minority of broken or lying members cannot subvert: rules, gradient validation, weights.

    found = sum of moments(part_rows, reference_part) over the parts, the slices of all reducers added in one order
    decision = decide(found, weights, config)            # the same at every member
    result = reduce_part(part_rows, weights, config, decision, reference_part)   # part by part, by its reducer

Guarantees: a NaN, an infinity or a claimed weight of 1e12 changes nothing or is bounded; every function is
deterministic, and ``decide`` across machines too; if the members are too few for a rule, the note names the fallback.
The trade-off: exact second moments (float64), the only barrier of a round, wherever a rule looks at whole vectors.
"""

from __future__ import annotations

from trainer.aggregation.config import RuleConfig as RuleConfig
from trainer.aggregation.deciding import RuleDecision as RuleDecision
from trainer.aggregation.deciding import decide as decide
from trainer.aggregation.deciding import effective_rule as effective_rule
from trainer.aggregation.deciding import needs_decision as needs_decision
from trainer.aggregation.deciding import needs_moments as needs_moments
from trainer.aggregation.reducing import reduce_part as reduce_part
from trainer.aggregation.second_moments import Moments as Moments
from trainer.aggregation.second_moments import finite_rows as finite_rows
from trainer.aggregation.second_moments import moments as moments
from trainer.aggregation.validation import DEFAULT_MAX_RATIO as DEFAULT_MAX_RATIO
from trainer.aggregation.validation import Finding as Finding
from trainer.aggregation.validation import Weighing as Weighing
from trainer.aggregation.validation import cap_weights as cap_weights
from trainer.aggregation.validation import common_progress as common_progress
from trainer.aggregation.validation import contribution_weight as contribution_weight
from trainer.aggregation.validation import validate as validate
