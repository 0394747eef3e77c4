"""Second moments of whole vectors, summed over slices, and the distances that Krum decides by.

Distances, norms, cosines and variances among n vectors and a reference follow from their Gram matrix and their sums, in
float64. Each reducer computes both for its slice; the members exchange them (n = 8: 456 bytes) and add them in one
order. A reducer can lie about them; ``from_bytes`` refuses what no vectors can have (Cauchy-Schwarz).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Buffer

from trainer.errors import CodecError, TrainerUsageError

GramMatrix = Sequence[Sequence[float]]  # Inner products, row by row; symmetric.
MAX_MEMBERS: Final = 256  # Vectors in one round.
_MAGIC: Final = b"GMO1"
_HEADER: Final = struct.Struct("<4sIQ")
# Values worked on at once, all vectors together: 4 MiB of float64, which stays in the last-level cache.
_CHUNK_TOTAL: Final = 1 << 19
# Rounding in sums of float64; far above what 1e12 terms accumulate.
_SLACK: Final = 1 + 1e-6


def squared_distances(gram: GramMatrix, members: Sequence[int]) -> list[list[float]]:
    """Returns squared distances among some rows of a Gram matrix, in their order; 0 to itself, never negative."""
    return [
        [0.0 if i == j else max(0.0, math.fsum((gram[i][i], gram[j][j], -2.0 * gram[i][j]))) for j in members]
        for i in members
    ]


def krum_order(distances: Sequence[Sequence[float]], num_neighbours: int) -> list[int]:
    """Returns positions from the best Krum score to the worst.

    The score of a vector is the sum of its squared ``distances`` (n by n) to its ``num_neighbours`` closest others,
    n - num_byzantine - 2 for Krum. With one neighbour the closest pair always ties: of equal scores the one with the
    nearer next neighbours comes first, then the lower position.
    """
    scores = []
    for position, row in enumerate(distances):
        others = sorted(distance for other, distance in enumerate(row) if other != position)
        scores.append((math.fsum(others[:num_neighbours]), others, position))
    return [position for _, _, position in sorted(scores)]


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Second moments of n vectors and a reference over some of their coordinates."""

    gram: NDArray[np.float64]  # [n+1, n+1], inner products of (reference, x_1, ..., x_n); symmetric, finite.
    sums: NDArray[np.float64]  # [n+1], sums of the values of each.
    num_values: int
    finite: NDArray[np.bool_]  # [n], whether the vector is finite; if not, its entries are zero or cover a part only.

    @property
    def num_members(self) -> int:
        """Vectors, the reference not counted."""
        return len(self.finite)

    def __add__(self, other: Moments) -> Moments:
        """Returns the moments over both ranges of coordinates; the order of several additions affects the bits."""
        if other.num_members != self.num_members:
            raise TrainerUsageError(f"expected moments of {self.num_members} members, found {other.num_members}")
        num_values = self.num_values + other.num_values
        return Moments(self.gram + other.gram, self.sums + other.sums, num_values, self.finite & other.finite)

    def to_bytes(self) -> bytes:
        """Encodes a header, a flag a member, the upper triangle and the sums: 16 + n + 4(n+1)(n+4) bytes."""
        triangle = self.gram[np.triu_indices(self.num_members + 1)]
        header = _HEADER.pack(_MAGIC, self.num_members, self.num_values)
        flags = self.finite.astype(np.uint8).tobytes()
        return header + flags + triangle.astype("<f8").tobytes() + self.sums.astype("<f8").tobytes()

    @classmethod
    def from_bytes(cls, buffer: Buffer, num_members: int) -> Moments:
        """Decodes the bytes of ``to_bytes``; raises CodecError for other members, or what no vectors can have."""
        view = memoryview(buffer).cast("B")
        if view.nbytes < _HEADER.size:
            raise CodecError(f"moments: expected at least {_HEADER.size} bytes, found {view.nbytes}")
        magic, count, num_values = _HEADER.unpack_from(view)
        if magic != _MAGIC or count != num_members:
            raise CodecError(f"moments: expected {_MAGIC!r} of {num_members} members, found {magic!r} of {count}")
        rows = count + 1
        num_products = rows * (rows + 1) // 2
        size_bytes = _HEADER.size + count + 8 * (num_products + rows)
        if view.nbytes != size_bytes:
            raise CodecError(f"moments: expected {size_bytes} bytes for {count} members, found {view.nbytes}")
        flags = np.frombuffer(view, dtype=np.uint8, count=count, offset=_HEADER.size)
        numbers = np.frombuffer(view[_HEADER.size + count :], dtype="<f8").astype(np.float64)
        gram = np.zeros((rows, rows))
        upper = np.triu_indices(rows)
        gram[upper] = gram.T[upper] = numbers[:num_products]
        found = cls(gram, numbers[num_products:], num_values, flags.astype(np.bool_))
        _check_possible(found, flags)
        return found


def _check_possible(found: Moments, flags: NDArray[np.uint8]) -> None:
    squares = np.diagonal(found.gram)
    if (flags > 1).any() or not np.isfinite(found.gram).all() or not np.isfinite(found.sums).all():
        raise CodecError("moments: expected flags of 0 and 1 and finite numbers, found others")
    if (squares < 0).any():
        raise CodecError(f"moments: expected squares of 0 or more, found {squares.min():.4g}")
    norms = np.sqrt(squares)
    # Norms first, then their products: the product of two squares could overflow.
    products_fit = (np.abs(found.gram) <= np.outer(norms, norms) * _SLACK).all()
    sums_fit = (np.abs(found.sums) <= norms * np.sqrt(float(found.num_values)) * _SLACK).all()
    if not (products_fit and sums_fit):
        raise CodecError("moments: expected inner products and sums within Cauchy-Schwarz, found greater ones")


def finite_rows(contributions: Tensor | Sequence[Tensor]) -> list[bool]:
    """Returns which of the vectors fp32[n, d] hold no NaN and no infinity."""
    # A finite sum proves finite terms, at twice the speed of looking at each; a sum may also overflow.
    return [bool(torch.isfinite(row.sum())) or bool(torch.isfinite(row).all()) for row in contributions]


def moments(contributions: Tensor | Sequence[Tensor], reference: Tensor) -> Moments:
    """Computes Gram matrix, sums and finite flags of vectors fp32[n, d] and a finite reference fp32[d].

    Raises:
        TrainerUsageError: lengths differ, there are more than ``MAX_MEMBERS``, or the reference is not finite.
    """
    rows = [reference, *contributions]
    num_values = reference.numel()
    if len(rows) > MAX_MEMBERS + 1 or any(row.shape != (num_values,) for row in rows):
        raise TrainerUsageError(
            f"moments: expected up to {MAX_MEMBERS} vectors of {num_values} values, the reference's number; found "
            f"{len(rows) - 1} of shapes {sorted({tuple(row.shape) for row in rows[1:]})}"
        )
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    totals = torch.zeros(len(rows), dtype=torch.float64)
    width = _CHUNK_TOTAL // len(rows)
    scratch = torch.empty(len(rows), min(width, num_values), dtype=torch.float64)
    for start in range(0, num_values, width):
        chunk = scratch[:, : min(width, num_values - start)]
        for row, into in zip(rows, chunk, strict=True):
            into.copy_(row[start : start + width])
        products += chunk @ chunk.T
        totals += chunk.sum(1)
    gram, sums = products.numpy(), totals.numpy()
    # fp32 squares cannot overflow float64: a square is finite exactly if its vector is.
    finite = np.isfinite(np.diagonal(gram))
    if not finite[0]:
        raise TrainerUsageError("moments: expected a finite reference, found NaN or infinity")
    gram[~finite, :] = 0.0
    gram[:, ~finite] = 0.0
    sums[~finite] = 0.0
    return Moments(np.triu(gram) + np.triu(gram, 1).T, sums, num_values, finite[1:])
