"""A round's arithmetic in one process: reducers' slices, their moments added up, decisions, parts reduced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import add

import torch
from torch import Tensor

from trainer.aggregation import (
    Moments,
    RuleConfig,
    RuleDecision,
    decide,
    moments,
    needs_decision,
    needs_moments,
    reduce_part,
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slices_of(num_values: int, num_slices: int) -> list[slice]:
    bounds = [num_values * index // num_slices for index in range(num_slices + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def whole_moments(rows: Tensor, reference: Tensor, num_slices: int = 3) -> Moments:
    cuts = slices_of(reference.numel(), num_slices)
    return reduce(add, (moments(rows[:, cut], reference[cut]) for cut in cuts))


def aggregate(
    rows: Tensor,
    config: RuleConfig,
    *,
    weights: Sequence[float] | None = None,
    reference: Tensor | None = None,
    num_parts: int = 4,
) -> tuple[Tensor, RuleDecision | None]:
    """Returns fp32[d] and the decision over whole vectors, if the rule or its validation needs one."""
    weights = [1.0] * len(rows) if weights is None else weights
    reference = torch.zeros(rows.shape[1]) if reference is None else reference
    decision = decide(whole_moments(rows, reference), weights, config) if needs_decision(config) else None
    parts = []
    for cut in slices_of(rows.shape[1], num_parts):
        of_part = decision
        if decision is not None and not needs_moments(config):
            of_part = decide(moments(rows[:, cut], reference[cut]), weights, config)
        parts.append(reduce_part(rows[:, cut], weights, config, of_part, reference[cut]))
    return torch.cat(parts), decision
