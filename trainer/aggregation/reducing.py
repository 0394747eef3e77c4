"""One part of a vector from the members' copies of it.

Every operation is an elementwise IEEE one in a fixed order. So the result of a coordinate depends on that coordinate
alone: however a vector is cut into parts, on whatever machine, the bits are the same, and a reducer's work can be
checked by redoing it. Permuting the members changes no bit of a median, of a trimmed mean with equal weights, or of
Krum; in the others it changes the order of a sum, thus rounding. The rounds of a run fix the order (sorted peer ids).

Enforced validation judges the members by the part alone, unless the rule looks at whole vectors anyhow: nothing is
waited for, and a reducer that lies about its part changes no other reducer's. The bits then depend on how the vector is
cut, which the members agree on.

Weights: rows of weight 0 are left out of every rule. Mean and trimmed mean average with the weights (trimmed: over the
values kept at that coordinate; which of several equal values at the edge is kept follows the order of members). Median
ignores them, and so do Krum and centred clip; multi-Krum has them in its decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.aggregation.averages import middle_mean, weighted_mean
from trainer.aggregation.config import RuleConfig
from trainer.aggregation.deciding import Decision, effective_rule, needs_moments, trim_count
from trainer.aggregation.second_moments import finite_rows
from trainer.errors import RoundFailedError, TrainerUsageError

__all__ = ["reduce_part"]


def reduce_part(
    contributions: Tensor | Sequence[Tensor],
    weights: Sequence[float] | NDArray[np.float64],
    config: RuleConfig,
    decision: Decision | None = None,
    reference_part: Tensor | None = None,
    positions: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Aggregate the members' copies of one part.

    Rows that are not finite are left out first, then the excluded and those of weight 0.

    Args:
        contributions: fp32[m, d], on the CPU; not changed.
        weights: [m], capped, 0 or more; all 0 is all equal.
        config: the rule.
        decision: what ``decide`` made of the whole vectors, needed where ``needs_moments(config)``, or, for a rule that
            looks at one coordinate at a time, of this part. Without one nobody is validated.
        reference_part: fp32[d], the reference's part; needed where the decision gives it a share.
        positions: [m], the rows' positions in the decision; None: 0 to m-1. Members it knows may be missing: the shares
            of the others grow in proportion.
        out: fp32[d]; written and returned instead of a new vector.

    Returns:
        fp32[d], finite.

    Raises:
        RoundFailedError: no row is left.
        TrainerUsageError: the rule needs a decision or a reference and there is none, or lengths differ.
    """
    if decision is None and needs_moments(config):
        raise TrainerUsageError(f"{config.rule}: expected a decision over whole vectors, found none")
    places = range(len(contributions)) if positions is None else positions
    usable = _usable(contributions, weights, places, decision)
    rows: list[NDArray[np.float32]] = [contributions[row].detach().numpy() for row in usable]
    result = torch.empty(rows[0].size) if out is None else out
    into: NDArray[np.float32] = result.numpy()
    if decision is not None and decision.coefficients is not None:
        _combine(rows, [places[row] for row in usable], decision, reference_part, into)
    else:
        _reduce(rows, [float(weights[row]) for row in usable], config, decision, into)
    return result


def _usable(
    contributions: Tensor | Sequence[Tensor],
    weights: Sequence[float] | NDArray[np.float64],
    places: Sequence[int],
    decision: Decision | None,
) -> list[int]:
    """Rows to aggregate, at least one."""
    if not len(contributions) == len(weights) == len(places):
        raise TrainerUsageError(
            f"expected a weight and a position for each of {len(contributions)} rows, found {len(weights)} weights "
            f"and {len(places)} positions"
        )
    excluded = {} if decision is None else decision.excluded
    allowed = [row for row, is_finite in enumerate(finite_rows(contributions)) if is_finite]
    allowed = [row for row in allowed if places[row] not in excluded]
    usable = [row for row in allowed if weights[row] > 0] or allowed
    if not usable:
        raise RoundFailedError(
            f"expected a finite contribution to the part, found none among {len(contributions)}; train on"
        )
    return usable


def _combine(
    rows: Sequence[NDArray[np.float32]],
    places: Sequence[int],
    decision: Decision,
    reference_part: Tensor | None,
    into: NDArray[np.float32],
) -> None:
    """The decision's linear combination, over the rows that are here."""
    coefficients = decision.coefficients or ()
    shares = [coefficients[place] for place in places]
    if decision.reference_coefficient > 0:
        if reference_part is None:
            raise TrainerUsageError("expected the reference's part, of which the decision has a share; found none")
        rows = [*rows, reference_part.detach().numpy()]
        shares.append(decision.reference_coefficient)
    if any(share > 0 for share in shares):
        weighted_mean(rows, shares, into)
    else:  # Krum's choice is missing here, and the rest was never chosen
        middle_mean(rows, (len(rows) - 1) // 2, None, into)


def _reduce(
    rows: Sequence[NDArray[np.float32]],
    weights: Sequence[float],
    config: RuleConfig,
    decision: Decision | None,
    into: NDArray[np.float32],
) -> None:
    """A rule that looks at one coordinate at a time."""
    rule = effective_rule(len(rows), config).rule if decision is None else decision.rule_used
    if rule == "median":
        middle_mean(rows, (len(rows) - 1) // 2, None, into)
    elif rule == "trimmed_mean":
        middle_mean(rows, trim_count(len(rows), config), weights, into)
    else:
        weighted_mean(rows, weights, into)
