"""Aggregation of sparse contributions: validated by direction, clipped to the median norm, averaged.

    outcome = aggregate_sparse(contributions, weights, rule, averaging="replicas")
    outcome.vector                                    # fp32[P], the same bits wherever the same bytes were decoded

Each member of a round sends 64 values of 4,096, of its own choosing. So most members have no value at a coordinate, and
rules that look for a middle value there (median, trimmed mean) find zero nearly everywhere; Krum compares distances,
which among vectors that hardly overlap are the norms, so that it would pick the smallest; centred clipping starts from
one of them. What means something is direction over whole vectors (spec T-20) and length: whoever pulls harder than the
median member is scaled down to it (arXiv 2508.15706), so that a minority moves the mean by no more than its share.

Guarantees: every number comes of elementwise operations and of sums in one fixed order, so members that decoded the
same bytes in the same order end bit for bit alike, on any machine. The trade-off: everybody looks at everything, some
10 ns for each pair of members and value sent; in return nobody's word is taken for what others sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.aggregation.config import Averaging as Averaging
from trainer.aggregation.config import RuleConfig
from trainer.aggregation.config import require_sparse_rule as require_sparse_rule
from trainer.aggregation.deciding import RuleDecision, decide
from trainer.aggregation.second_moments import Moments
from trainer.errors import RoundFailedError

SPARSE_RULE: Final = "clipped_mean"
_LEAST_COMPARED: Final = 3  # Fewer have nothing but a reference to be compared with, and sparse rounds have none.


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """The values of a vector that are not left out: [m] each, at most 64 of 4,096, by rising index."""

    num_values: int  # Of the whole vector.
    indices: NDArray[np.int64]
    values: NDArray[np.float32]

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Returns fp32[num_values] on the CPU, zeros elsewhere; ``out`` or a new one."""
        vector = torch.zeros(self.num_values) if out is None else out.zero_()
        vector.numpy()[self.indices] = self.values
        return vector

    def subtract_from(self, vector: Tensor) -> None:
        """Subtracts it from fp32[num_values] on the CPU, in place."""
        vector.numpy()[self.indices] -= self.values


@dataclass(frozen=True, slots=True, eq=False)
class SparseOutcome:
    """What a round of sparse contributions comes to."""

    vector: Tensor  # fp32[P] on the CPU.
    decision: RuleDecision
    clipped: Mapping[int, float]
    """By position, what members longer than the median were multiplied by."""


def aggregate_sparse(
    contributions: Sequence[SparseVector | None],
    weights: Sequence[float],
    rule: RuleConfig,
    averaging: Averaging = "replicas",
) -> SparseOutcome:
    """Aggregates the contributions of a round's members, in the order that all members have them.

    Args:
        contributions: of equal length; None: nothing that could be decoded came of this member.
        weights: capped, one a member; all 0 are all equal.
        rule: of which the part about validation counts.
        averaging: what sums are divided by.

    Raises:
        RoundFailedError: no usable contribution is left.
    """
    present = [each for each in contributions if each is not None]
    if not present:
        raise RoundFailedError(f"expected a usable contribution of {len(contributions)} members, found none; train on")
    vector = torch.zeros(present[0].num_values)
    found = _moments(contributions, vector.numpy(), compare=rule.validation != "off")
    decision = decide(found, weights, replace(rule, rule="mean"))
    if decision.rule_used == "none":
        raise RoundFailedError(
            f"expected a usable contribution of {len(contributions)} members, found none: {decision.note}; train on"
        )
    members = [member for member in range(len(contributions)) if member not in decision.excluded]
    norms = {member: math.sqrt(found.gram[member + 1, member + 1]) for member in members}
    lengths = [norm for norm in norms.values() if norm > 0]
    limit = median_low(lengths) if lengths else 0.0
    clipped = {member: limit / norm for member, norm in norms.items() if norm > limit}
    shares = {member: float(weights[member]) for member in members}
    if not any(shares.values()):
        shares = dict.fromkeys(members, 1.0)
    kept = [(each, shares[member], clipped.get(member, 1.0)) for member, each in _of(contributions, members)]
    if averaging == "senders":
        _average_of_senders(kept, vector.numpy())
    else:
        _average_of_replicas(kept, vector.numpy())
    return SparseOutcome(vector, decision, MappingProxyType(clipped))


def _of(contributions: Sequence[SparseVector | None], members: Sequence[int]) -> list[tuple[int, SparseVector]]:
    found = ((member, contributions[member]) for member in members)
    return [(member, each) for member, each in found if each is not None]


def _moments(contributions: Sequence[SparseVector | None], scratch: NDArray[np.float32], *, compare: bool) -> Moments:
    """Moments over whole vectors, beside a reference of zeros; ``scratch``, [P] zeros, is zeros again afterwards.

    Sums are cumulative ones, which numpy adds one by one: their bits do not depend on a processor's vector length.
    """
    count = len(contributions)
    gram, sums = np.zeros((count + 1, count + 1)), np.zeros(count + 1)
    present = _of(contributions, range(count))
    compare = compare and len(present) >= _LEAST_COMPARED
    for position, (member, each) in enumerate(present):
        values = each.values.astype(np.float64)
        sums[member + 1] = _sum(values)
        gram[member + 1, member + 1] = _sum(values * values)
        if not compare:
            continue
        scratch[each.indices] = each.values
        for other, beside in present[position + 1 :]:
            products = scratch[beside.indices].astype(np.float64) * beside.values.astype(np.float64)
            gram[member + 1, other + 1] = gram[other + 1, member + 1] = _sum(products)
        scratch[each.indices] = 0
    finite = np.array([each is not None for each in contributions], dtype=np.bool_)
    return Moments(gram, sums, len(scratch), finite)


def _sum(values: NDArray[np.float64]) -> float:
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def _average_of_replicas(kept: Sequence[tuple[SparseVector, float, float]], out: NDArray[np.float32]) -> None:
    total = math.fsum(share for _, share, _ in kept)
    for each, share, scale in kept:
        out[each.indices] += each.values * np.float32(share / total * scale)


def _average_of_senders(kept: Sequence[tuple[SparseVector, float, float]], out: NDArray[np.float32]) -> None:
    """Divides by those that sent something: zeros only fill the chunks of a member that has no 64 other values."""
    greatest = max(share for _, share, _ in kept)
    weight = np.zeros_like(out)
    for each, share, scale in kept:
        relative = np.float32(share / greatest)
        is_sent = each.values != 0
        indices = each.indices[is_sent]
        out[indices] += each.values[is_sent] * np.float32(scale) * relative
        weight[indices] += relative
    np.divide(out, weight, out=out, where=weight > 0)
