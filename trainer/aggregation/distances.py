"""Krum and multi-Krum: who has the closest company, told from a Gram matrix.

Plain Python floats and ``math.fsum`` on purpose: sums are rounded once, correctly, so that the result does not depend
on the order of members, on a BLAS or on a processor, and every member of a round decides the same. n is at most 256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["GramMatrix", "krum_order", "squared_distances"]

GramMatrix = Sequence[Sequence[float]]
"""Inner products, row by row; symmetric."""


def squared_distances(gram: GramMatrix, members: Sequence[int]) -> list[list[float]]:
    """Squared distances among some of the vectors of a Gram matrix; exactly 0 to itself, never negative.

    Args:
        gram: inner products.
        members: rows to look at, in the order of the result.
    """
    return [
        [0.0 if i == j else max(0.0, math.fsum((gram[i][i], gram[j][j], -2.0 * gram[i][j]))) for j in members]
        for i in members
    ]


def krum_order(distances: Sequence[Sequence[float]], num_neighbours: int) -> list[int]:
    """Positions from the best Krum score to the worst.

    The score of a vector is the sum of its squared distances to its ``num_neighbours`` closest others. With one
    neighbour the closest pair always ties: of equal scores the one with the nearer next neighbours comes first, then
    the lower position.

    Args:
        distances: squared, n by n.
        num_neighbours: n - num_byzantine - 2 for Krum.
    """
    scores = []
    for position, row in enumerate(distances):
        others = sorted(distance for other, distance in enumerate(row) if other != position)
        scores.append((math.fsum(others[:num_neighbours]), others, position))
    return [position for _, _, position in sorted(scores)]
