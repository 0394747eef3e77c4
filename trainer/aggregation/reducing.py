"""Reduces the members' copies of one part of a vector to one.

Every operation is an elementwise IEEE operation in a fixed order, so the result at a coordinate depends on that
coordinate alone. The bits are the same however a vector is cut into parts and on every machine, and a reducer's work
can be checked by repeating it. The order of members changes no bit of a median, of a trimmed mean with equal weights,
or of Krum; under other rules it changes the order of a sum and so its rounding. Rounds fix the order: sorted peer ids.

Enforced validation judges the members by the part alone, unless the rule looks at whole vectors anyway. Then no reducer
waits for another, and one that lies about its part changes no other part; the bits depend on the cut into parts, which
the members agree on.

Rows of weight 0 are left out under every rule. Mean and trimmed mean average with the weights (trimmed: over the values
kept at that coordinate; of equal values at the edge the order of members says which is kept). Median, Krum and centred
clip ignore weights; multi-Krum has them in its decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.aggregation.averages import middle_mean, weighted_mean
from trainer.aggregation.config import RuleConfig
from trainer.aggregation.deciding import RuleDecision, effective_rule, needs_moments, trim_count
from trainer.aggregation.second_moments import finite_rows
from trainer.errors import RoundFailedError, TrainerUsageError

__all__ = ["reduce_part"]


def reduce_part(
    contributions: Tensor | Sequence[Tensor],
    weights: Sequence[float] | NDArray[np.float64],
    config: RuleConfig,
    decision: RuleDecision | None = None,
    reference_part: Tensor | None = None,
    positions: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Aggregates the members' copies of one part.

    Rows that are not finite are left out first, then the excluded and those of weight 0.

    Args:
        contributions: fp32[m, d], on the CPU; not changed.
        weights: [m], capped, 0 or more; all 0 is all equal.
        config: the rule.
        decision: result of ``decide`` over whole vectors, required if ``needs_moments(config)``, or, for a
            coordinate-wise rule, over this part. Without one nobody is validated.
        reference_part: fp32[d], the reference's part; required if the decision gives the reference a share.
        positions: [m], positions of the rows in the decision; None: 0 to m-1. If members of the decision are missing,
            the shares of the others grow in proportion.
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
        return result
    rule = effective_rule(len(rows), config).rule if decision is None else decision.rule_used
    kept_weights = [float(weights[row]) for row in usable]
    if rule == "median":
        _median(rows, into)
    elif rule == "trimmed_mean":
        middle_mean(rows, trim_count(len(rows), config), kept_weights, into)
    else:
        weighted_mean(rows, kept_weights, into)
    return result


def _usable(
    contributions: Tensor | Sequence[Tensor],
    weights: Sequence[float] | NDArray[np.float64],
    places: Sequence[int],
    decision: RuleDecision | None,
) -> list[int]:
    """Rows to aggregate, at least one."""
    if not len(contributions) == len(weights) == len(places):
        raise TrainerUsageError(
            f"expected a weight and a position for each of {len(contributions)} rows, found {len(weights)} weights "
            f"and {len(places)} positions"
        )
    excluded = {} if decision is None else decision.excluded
    finite = enumerate(finite_rows(contributions))
    allowed = [row for row, is_finite in finite if is_finite and places[row] not in excluded]
    usable = [row for row in allowed if weights[row] > 0] or allowed
    if not usable:
        raise RoundFailedError(
            f"expected a finite contribution to the part, found none among {len(contributions)}; train on"
        )
    return usable


def _combine(
    rows: Sequence[NDArray[np.float32]],
    places: Sequence[int],
    decision: RuleDecision,
    reference_part: Tensor | None,
    into: NDArray[np.float32],
) -> None:
    """The decision's linear combination over the rows that are present."""
    coefficients = decision.coefficients or ()
    shares = [coefficients[place] for place in places]
    if decision.reference_coefficient > 0:
        if reference_part is None:
            raise TrainerUsageError("expected the reference's part, of which the decision has a share; found none")
        rows = [*rows, reference_part.detach().numpy()]
        shares.append(decision.reference_coefficient)
    if any(share > 0 for share in shares):
        weighted_mean(rows, shares, into)
    else:  # Krum's choice is missing here, and the others were never chosen.
        _median(rows, into)


def _median(rows: Sequence[NDArray[np.float32]], into: NDArray[np.float32]) -> None:
    middle_mean(rows, (len(rows) - 1) // 2, None, into)
