"""Centred clipping (Karimireddy et al., 2021), iterated in the coordinates of a Gram matrix.

The centre v starts at the reference, or, without one, at the member with the closest company, and moves again and
again by the mean of the members' pulls x_i - v, each shortened to a radius. All pull alike: a weight is a claim, and
with claims of three times the median (`cap_weights`) two liars of seven would have the greater part of the pull. v is
at every moment a convex combination of reference and members, so n+1 coefficients describe it and no vector is touched
until it is found.

The automatic radius is the (lower) median of the distances to v, taken anew at each move: no scale to configure, none
to go stale as training slows. At the fixed point v is within R·n/(n-2f) of the honest mean if the
n-f honest lie within R of it, whatever the f others send (a byzantine pull is at most the radius; an honest one, seen
from farther away than R, points home with at least (e-R)/(e+R) of it). n=5, f=1: 1.67 R; n=7, f=2: 2.33 R.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trainer.aggregation.second_moments import GramMatrix, krum_order, squared_distances

__all__ = ["clipped_centre"]

# The rest of the way shrinks by half or more a move; a radius set by hand may stop the walk short of its fixed point.
_MOST_MOVES: Final = 60
_STILL: Final = 1e-12


def clipped_centre(gram: GramMatrix, members: Sequence[int], radius: float) -> list[float]:
    """The centre as coefficients over the rows of a Gram matrix.

    Args:
        gram: inner products of (reference, x_1, ..., x_n).
        members: rows of those that count, 1 to n.
        radius: how far one member may pull a move; 0 takes the median distance.

    Returns:
        n+1 coefficients, 0 or more, that add up to 1.
    """
    rows = [0, *members]
    coefficients = [0.0] * len(gram)
    coefficients[_start(gram, members)] = 1.0
    for _ in range(_MOST_MOVES):
        distances = _distances_to(gram, rows, coefficients)
        limit = radius or sorted(distances)[(len(distances) - 1) // 2]
        pulls = [(limit / distance if distance > limit else 1.0) / len(members) for distance in distances]
        stays = max(0.0, 1.0 - math.fsum(pulls))
        moved = [coefficient * stays for coefficient in coefficients]
        for row, pull in zip(members, pulls, strict=True):
            moved[row] += pull
        change = max(abs(new - old) for new, old in zip(moved, coefficients, strict=True))
        coefficients = moved
        if change < _STILL:
            break
    return coefficients


def _start(gram: GramMatrix, members: Sequence[int]) -> int:
    """The reference, or the member closest to half of the others: among them at least one is honest."""
    if gram[0][0] > 0:
        return 0
    return members[krum_order(squared_distances(gram, members), (len(members) - 1) // 2)[0]]


def _distances_to(gram: GramMatrix, rows: Sequence[int], coefficients: Sequence[float]) -> list[float]:
    """Distance of every row but the first to the combination of rows that the coefficients give."""
    products = [math.fsum(coefficients[j] * gram[i][j] for j in rows) for i in rows]
    square = math.fsum(coefficients[i] * product for i, product in zip(rows, products, strict=True))
    return [
        math.sqrt(max(0.0, math.fsum((gram[i][i], -2.0 * product, square))))
        for i, product in zip(rows[1:], products[1:], strict=True)
    ]
