"""PowerSGD: the matrices of a gradient as products of two thin ones (Vogels et al., arXiv 1905.13727).

    plan = low_rank_plan(shapes, rank=64)
    p = compress_p(plan, vector, basis, seed)         # P = M Q, with Q of the round before
    p = orthonormalise(plan, average_of_p)            # the same bits at all members, from the same bytes
    q = compress_q(plan, vector, p)                   # Q = Mᵀ P, and what is no such matrix, whole
    result = decompress(plan, p, average_of_q)        # P Qᵀ, the same bits at all members
    residual = left_out(plan, vector, p, q)           # for this member's next vector

A tensor is a matrix of its first dimension by all others. It is factored where that saves half of its values or more,
and travels whole otherwise. P belongs to the shorter side, so that little has to be made orthogonal.

Guarantees: `orthonormalise` and `decompress` are functions of their arguments' bits, on any machine, with any number of
threads. The first is modified Gram-Schmidt in fp64, of elementwise operations and sums in one fixed order; a BLAS would
add in an order of its own. The second needs a BLAS for its speed, and so has it add numbers that never round: both
factors as integers with a common exponent, few enough bits that the sum over the rank fits the 53 of an fp64. Against
one reducer that computes for all this costs each member some processor time, but neither a third exchange nor trust.
What is not sent, `left_out` keeps: it is measured against this member's own Q, not the average, or the members'
differences would add up in their residuals.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.compression import DEFAULT_RANK as DEFAULT_RANK
from trainer.compression import MAX_RANK as MAX_RANK
from trainer.errors import TrainerUsageError

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
_Columns: TypeAlias = NDArray[np.float64]

_LEAST_SAVING: Final = 2  # A matrix is factored if it has at least so many times the values of its factors.
_EXACT_BITS: Final = 53  # Integers up to 2**53, and their sums, are exact in fp64.
_DEPENDENT: Final = 1e-6
"""A column of P of which less is left than this share of its norm depends on those before: P comes in fp32, whose
rounding is a tenth of that."""
_BLOCK_VALUES: Final = 1 << 20  # Values that are decompressed at once; 8 MiB of fp64.


@dataclass(frozen=True, slots=True)
class FactoredMatrix:
    """One matrix that travels as two factors, and the places of all three."""

    place: slice  # Of the matrix in the vector.
    rows: int
    columns: int
    rank: int
    p_place: slice  # Of [rank, short] in P.
    q_place: slice  # Of [rank, long] in Q.

    @property
    def short(self) -> int:
        """The lesser number of rows and columns."""
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        """The greater number of rows and columns."""
        return max(self.rows, self.columns)

    def matrix_in(self, vector: Tensor) -> Tensor:
        """Returns the matrix in a vector, [short, long], as a view."""
        matrix = vector[self.place].view(self.rows, self.columns)
        return matrix.T if self.rows > self.columns else matrix

    def p_in(self, p: Tensor) -> Tensor:
        """Returns its part of P, [rank, short], as a view: one column of P after the other."""
        return p[self.p_place].view(self.rank, self.short)

    def q_in(self, q: Tensor) -> Tensor:
        """Returns its part of Q, [rank, long], as a view."""
        return q[self.q_place].view(self.rank, self.long)


@dataclass(frozen=True, slots=True)
class LowRankPlan:
    """Which tensors of a flat vector are factored, and where everything lies."""

    num_values: int  # Of the vector.
    num_p: int  # Values of all P.
    num_basis: int  # Values of all Q, which the next round begins with.
    num_q: int  # Those, and the values that travel whole behind them.
    matrices: tuple[FactoredMatrix, ...]
    whole: tuple[tuple[slice, slice], ...]  # Places in the vector and in Q.
    digest: str  # SHA-256 of shapes and rank.

    def basis_of(self, q: Tensor) -> Tensor:
        """Returns the Q of all matrices, fp32[num_basis]; a copy."""
        return q[: self.num_basis].clone()


@lru_cache(maxsize=64)
def low_rank_plan(shapes: Shapes, rank: int = DEFAULT_RANK) -> LowRankPlan:
    """Plans a vector of tensors of these shapes, one behind the other.

    Raises:
        TrainerUsageError: the rank is not 1 to ``MAX_RANK``.
    """
    if not 1 <= rank <= MAX_RANK:
        raise TrainerUsageError(f"PowerSGD's rank: expected 1 to {MAX_RANK}, found {rank}")
    matrices: list[FactoredMatrix] = []
    kept: list[slice] = []
    start = num_p = num_basis = 0
    for shape in shapes:
        place = slice(start, start := start + math.prod(shape))
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        if not is_factored(rows, columns, rank):
            kept.append(place)
            continue
        p_place = slice(num_p, num_p := num_p + rank * min(rows, columns))
        q_place = slice(num_basis, num_basis := num_basis + rank * max(rows, columns))
        matrices.append(FactoredMatrix(place, rows, columns, rank, p_place, q_place))
    ends = list(accumulate((place.stop - place.start for place in kept), initial=num_basis))
    whole = tuple((place, slice(*between)) for place, between in zip(kept, pairwise(ends), strict=True))
    digest = hashlib.sha256(json.dumps([shapes, rank], separators=(",", ":")).encode()).hexdigest()
    return LowRankPlan(start, num_p, num_basis, ends[-1], tuple(matrices), whole, digest)


def is_factored(rows: int, columns: int, rank: int) -> bool:
    """Returns whether factors of that rank have at most half of the matrix's values."""
    return 0 < _LEAST_SAVING * rank * (rows + columns) <= rows * columns


def compress_p(plan: LowRankPlan, vector: Tensor, basis: Tensor | None, seed: int) -> Tensor:
    """Returns P = M Q of all matrices, fp32[num_p].

    The columns of Q count as directions, whatever their lengths: so P is of the size of the gradient itself, in the
    range of fp16, and members are compared by what their gradients have in these directions.

    Args:
        plan: of the vector.
        vector: fp32[num_values], what earlier rounds left out included.
        basis: fp32[num_basis], the averaged Q of the round before (`LowRankPlan.basis_of`); None at the beginning.
        seed: for directions in place of those that are zero; another one each round.
    """
    _check_length(vector, plan.num_values, "a vector")
    p = torch.empty(plan.num_p)
    for index, matrix in enumerate(plan.matrices):
        found = torch.zeros(matrix.rank, matrix.long) if basis is None else matrix.q_in(basis)
        torch.mm(_directions(found, (seed, index)), matrix.matrix_in(vector).T, out=matrix.p_in(p))
    return p


def orthonormalise(plan: LowRankPlan, p: Tensor) -> Tensor:
    """Returns P, fp32[num_p], with orthonormal columns; one that depends on those before it becomes zero.

    Where a column is zero so is that of Q, and the next round begins with another direction in its place.
    """
    _check_length(p, plan.num_p, "P")
    orthonormal = torch.empty(plan.num_p)
    for matrix in plan.matrices:
        columns = matrix.p_in(p).numpy().astype(np.float64)
        _gram_schmidt(columns)
        matrix.p_in(orthonormal).copy_(torch.from_numpy(columns))
    return orthonormal


def compress_q(plan: LowRankPlan, vector: Tensor, p: Tensor) -> Tensor:
    """Returns Q = Mᵀ P of all matrices, and behind them the other tensors whole; fp32[num_q]."""
    _check_length(vector, plan.num_values, "a vector")
    q = torch.empty(plan.num_q)
    for matrix in plan.matrices:
        torch.mm(matrix.p_in(p), matrix.matrix_in(vector), out=matrix.q_in(q))
    for place, q_place in plan.whole:
        q[q_place] = vector[place]
    return q


def decompress(plan: LowRankPlan, p: Tensor, q: Tensor) -> Tensor:
    """Returns the vector of P Qᵀ and the whole tensors, fp32[num_values]; the same bits wherever P and Q are the same.

    Both factors are rounded to some 23 bits of the largest value of their row, and each product once, to fp32.
    """
    _check_length(q, plan.num_q, "Q")
    vector = torch.empty(plan.num_values)
    for matrix in plan.matrices:
        _write_product(matrix.p_in(p), matrix.q_in(q), matrix.matrix_in(vector))
    for place, q_place in plan.whole:
        vector[place] = q[q_place]
    return vector


def left_out(plan: LowRankPlan, vector: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Returns what a member's own factors leave out of its vector, fp32[num_values].

    Args:
        plan: of the vector.
        vector: what was compressed.
        p: the orthonormal P of the round.
        q: this member's own Q and whole tensors, as they arrived at the others: behind the codec.
    """
    _check_length(q, plan.num_q, "Q")
    residual = vector.clone()
    for matrix in plan.matrices:
        matrix.matrix_in(residual).addmm_(matrix.p_in(p).T, matrix.q_in(q), alpha=-1.0)
    for place, q_place in plan.whole:
        residual[place] -= q[q_place]
    return residual


def _directions(rows: Tensor, seed: Sequence[int]) -> Tensor:
    """Rows of length 1, fp32[rank, n]: those given, and random signs for those that are zero or too long."""
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    usable = (lengths > 0) & torch.isfinite(lengths)
    directions = (rows / torch.where(usable, lengths, 1.0)[:, None]).to(torch.float32)
    missing = torch.nonzero(~usable).flatten().tolist()
    if missing:
        directions[missing] = _random_signs(len(missing), rows.shape[1], seed) / math.sqrt(rows.shape[1])
    return directions


def _random_signs(rows: int, columns: int, seed: Sequence[int]) -> Tensor:
    """-1 and 1, from the generator's raw bits, which no release of numpy changes."""
    words = np.random.PCG64(np.random.SeedSequence(list(seed))).random_raw(-(-rows * columns // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), count=rows * columns)
    return torch.from_numpy(bits.reshape(rows, columns).astype(np.float32)) * 2 - 1


def _gram_schmidt(columns: _Columns) -> None:
    """Makes the rows of fp64[rank, n], columns of P, orthonormal in place; dependent ones become zero."""
    scratch = np.empty_like(columns)
    before = _row_sums(np.multiply(columns, columns, out=scratch)).copy()
    for index, column in enumerate(columns):
        square = float(_row_sums(np.multiply(column, column, out=scratch[0])[None])[0])
        if not square > before[index] * _DEPENDENT**2:
            column[:] = 0
            continue
        column /= np.sqrt(square)
        rest = columns[index + 1 :]
        if not len(rest):
            return
        products = np.multiply(rest, column, out=scratch[: len(rest)])
        shares = _row_sums(products).copy()
        # A product, then a difference, each rounded by itself: one fused operation would change last bits.
        rest -= np.multiply(shares[:, None], column, out=products)


def _row_sums(values: _Columns) -> _Columns:
    """The sum of every row, by halves in one fixed order; overwrites ``values``."""
    width = values.shape[1]
    while width > 1:
        half = width // 2
        values[:, :half] += values[:, width - half : width]
        width -= half
    return values[:, 0]


def _write_product(p: Tensor, q: Tensor, out: Tensor) -> None:
    """Writes pᵀ q, [short, long], from fp32[rank, short] and fp32[rank, long]; every sum is exact before it is rounded.

    Integers below 2**a and 2**b have sums of ``rank`` products below 2**53 if a + b leaves the bits of the rank: then
    no order of adding, fused or not, changes a bit.
    """
    bits = _EXACT_BITS - (len(p) - 1).bit_length()
    p_integers, p_scales = _integers(p, bits // 2)
    q_integers, q_scales = _integers(q, bits - bits // 2)
    step = max(1, _BLOCK_VALUES // p.shape[1])
    for start in range(0, q.shape[1], step):
        block = slice(start, start + step)
        product = torch.mm(p_integers.T, q_integers[:, block])
        product *= p_scales[:, None]  # Powers of two: exact.
        product *= q_scales[block]
        out[:, block].copy_(product)


def _integers(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers of ``bits`` bits, fp64[rank, n], and the power of two that each column of them is multiplied by."""
    _, exponents = np.frexp(values.abs().amax(0).numpy())
    up = torch.from_numpy(np.ldexp(np.ones(len(exponents)), bits - exponents))
    down = torch.from_numpy(np.ldexp(np.ones(len(exponents)), exponents - bits))
    return torch.round(values.double() * up), down


def _check_length(tensor: Tensor, num_values: int, what: str) -> None:
    if tensor.shape != (num_values,) or tensor.dtype != torch.float32:
        raise TrainerUsageError(
            f"expected {what} of [{num_values}] fp32, found {list(tensor.shape)} {tensor.dtype}; is the plan of these "
            "shapes?"
        )
