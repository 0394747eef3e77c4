"""PowerSGD's arithmetic: what is factored, what is lost and kept, and bits that no machine may change."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.compression.powersgd import (
    compress_p,
    compress_q,
    decompress,
    is_factored,
    left_out,
    low_rank_plan,
    orthonormalise,
)
from trainer.errors import TrainerUsageError
from trainer.model import Transformer
from trainer.model.choice import ModelChoice

SEED = 5
SHAPES = ((48, 40), (7,), (30, 64), (), (5, 3), (12, 4, 10))
dimensions = st.integers(1, 40)
shapes = st.lists(st.lists(dimensions, max_size=3).map(tuple), min_size=1, max_size=5).map(tuple)


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def values(num_values: int, salt: int = 0, scale: float = 1.0) -> torch.Tensor:
    """The same on every machine: a product and a remainder of integers."""
    integers = (torch.arange(num_values) * 2654435761 + salt * 40503) % 65521
    return (integers.to(torch.float32) - 32760.0) * (scale / 2**15)


def one_round(plan, vector, basis=None, seed=SEED):
    """What a member alone makes of its vector: the result, what is left out of it, and the next basis."""
    p = orthonormalise(plan, compress_p(plan, vector, basis, seed))
    q = compress_q(plan, vector, p)
    return decompress(plan, p, q), left_out(plan, vector, p, q), plan.basis_of(q)


@settings(max_examples=120, deadline=None)
@given(shapes=shapes, rank=st.integers(1, 6), salt=st.integers(0, 9), exponent=st.integers(-20, 20))
def test_what_is_sent_and_what_is_left_out_add_up_to_the_vector(shapes, rank, salt, exponent):
    plan = low_rank_plan(shapes, rank)
    vector = values(plan.num_values, salt, 2.0**exponent)
    result, residual, basis = one_round(plan, vector)
    assert torch.allclose(result + residual, vector, rtol=0, atol=2e-6 * 2.0**exponent * math.sqrt(40))
    assert basis.shape == (plan.num_basis,)
    for place, _ in plan.whole:
        assert torch.equal(result[place], vector[place]) and not residual[place].any()
    for matrix in plan.matrices:  # A projection: what is left out is orthogonal to what is sent, and no longer.
        left, sent = residual[matrix.place].double(), result[matrix.place].double()
        assert left.norm() <= vector[matrix.place].double().norm() * (1 + 1e-5)
        assert abs(float(left @ sent)) <= 1e-4 * float(vector[matrix.place].double().norm()) ** 2


@settings(max_examples=200, deadline=None)
@given(shapes=shapes, rank=st.integers(1, 6))
def test_every_value_has_one_place_and_only_matrices_that_save_half_are_factored(shapes, rank):
    plan = low_rank_plan(shapes, rank)
    assert plan.num_values == sum(math.prod(shape) for shape in shapes)
    covered = sorted(
        (place.start, place.stop) for place in [*(m.place for m in plan.matrices), *(place for place, _ in plan.whole)]
    )
    assert sum(stop - start for start, stop in covered) == plan.num_values
    assert all(stop <= start for (_, stop), (start, _) in pairwise(covered))
    for matrix in plan.matrices:
        assert 2 * rank * (matrix.rows + matrix.columns) <= matrix.rows * matrix.columns
    assert plan.num_p + plan.num_q <= plan.num_values
    assert plan.num_p == sum(rank * matrix.short for matrix in plan.matrices)


def test_a_matrix_is_factored_from_half_of_its_values_on():
    assert is_factored(256, 256, 64)
    assert not is_factored(256, 255, 64)
    assert not is_factored(0, 0, 1) and not is_factored(1, 1000, 1)


def test_the_shape_of_125m_has_eight_times_fewer_values_at_rank_64():
    with torch.device("meta"):
        model = Transformer(ModelChoice(preset="125m").shape(32_768))
    plan = low_rank_plan(tuple(tuple(parameter.shape) for parameter in model.parameters()))
    assert plan.num_values / (plan.num_p + plan.num_q) >= 8


def test_a_matrix_of_no_more_than_the_rank_is_sent_whole_and_any_other_better_each_round():
    plan = low_rank_plan(((60, 50),), 4)
    left, right = values(60 * 4, 1).view(60, 4), values(4 * 50, 2).view(4, 50)
    exact = (left @ right).flatten()
    result, residual, _ = one_round(plan, exact)
    assert torch.allclose(result, exact, rtol=1e-4, atol=1e-3) and residual.norm() < 1e-4 * exact.norm()

    # Warm-started, it goes towards the best approximation of that rank (power iteration).
    full = (exact.view(60, 50) + 2.0 * values(3000, 3).view(60, 50)).flatten()
    u, s, v = torch.linalg.svd(full.view(60, 50), full_matrices=False)
    best = float((full.view(60, 50) - u[:, :4] * s[:4] @ v[:4]).norm())
    basis, errors = None, []
    for round_index in range(12):
        _, residual, basis = one_round(plan, full, basis, round_index)
        errors.append(float(residual.norm()))
    assert errors[0] > 1.02 * best
    assert errors[-1] <= 1.01 * best
    cold = float(one_round(plan, full, None, 11)[1].norm())
    assert errors[-1] < cold


def test_error_feedback_sends_all_of_a_constant_gradient_in_the_end():
    plan = low_rank_plan(((40, 48),), 2)
    gradient = values(40 * 48, 7)
    residual, sent, basis = torch.zeros_like(gradient), torch.zeros_like(gradient), None
    for round_index in range(60):
        result, residual, basis = one_round(plan, gradient + residual, basis, round_index)
        sent += result
        total = (round_index + 1) * gradient
        assert torch.allclose(sent + residual, total, atol=2e-4 * (round_index + 1))
    assert float((sent / 60 - gradient).norm() / gradient.norm()) < 0.35


def test_columns_are_orthonormal_and_those_that_depend_on_others_zero():
    plan = low_rank_plan(((48, 40), (80, 200)), 6)
    p = compress_p(plan, values(plan.num_values), None, SEED)
    first = plan.matrices[0].p_in(p)
    first[3] = first[0] * 2 - first[1]
    first[5] = 0
    found = orthonormalise(plan, p)
    for matrix, zeros in zip(plan.matrices, ({3, 5}, set()), strict=True):
        columns = matrix.p_in(found).double()
        expected = torch.diag(torch.tensor([0.0 if index in zeros else 1.0 for index in range(6)]).double())
        assert torch.allclose(columns @ columns.T, expected, atol=1e-6)


def test_a_direction_that_brought_nothing_is_replaced_by_another_each_round():
    plan = low_rank_plan(((64, 64),), 4)
    vector = torch.zeros(plan.num_values)
    result, residual, basis = one_round(plan, vector)
    assert not result.any() and not residual.any() and not basis.any()
    again = values(plan.num_values)
    cold, other = (compress_p(plan, again, basis, seed) for seed in (1, 2))
    assert torch.equal(cold, compress_p(plan, again, None, 1)) and not torch.equal(cold, other)
    half = plan.matrices[0].q_in(basis)
    half[1] = values(64, 1)
    assert not torch.equal(compress_p(plan, again, basis, 1), cold)


def test_directions_count_whatever_their_length():
    plan = low_rank_plan(SHAPES, 3)
    vector = values(plan.num_values)
    _, _, basis = one_round(plan, vector)
    expected = compress_p(plan, vector, basis, SEED)
    assert torch.allclose(compress_p(plan, vector, basis * 1e-9, SEED), expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(6)), exponent=st.integers(-60, 30), salt=st.integers(0, 5))
def test_no_order_of_adding_changes_a_bit_of_a_result(order, exponent, salt):
    plan = low_rank_plan(((60, 1300),), 6)
    (matrix,) = plan.matrices
    p, q = values(plan.num_p, salt), values(plan.num_q, salt + 1, 2.0**exponent)
    expected = decompress(plan, p, q)
    permuted_p = matrix.p_in(p)[list(order)].flatten()
    permuted_q = matrix.q_in(q)[list(order)].flatten()
    assert torch.equal(decompress(plan, permuted_p, permuted_q), expected)
    exact = matrix.p_in(p).double().T @ matrix.q_in(q).double()
    assert float((expected.double() - exact.flatten()).norm() / exact.norm()) < 2e-6


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_stay_what_they_are(threads):
    torch.set_num_threads(threads)
    try:
        plan = low_rank_plan(((300, 700), (90,), (640, 256), (33, 5)), 16)
        p = orthonormalise(plan, values(plan.num_p, 3))
        result = decompress(plan, p, values(plan.num_q, 4, 1e-3))
    finally:
        torch.set_num_threads(1)
    assert (digest_of(p), digest_of(result)) == ("25b955f9d7000019", "930cac0483b8f64e")


def test_what_does_not_belong_together_is_refused():
    plan = low_rank_plan(SHAPES, 2)
    with pytest.raises(TrainerUsageError, match="rank: expected 1 to"):
        low_rank_plan(SHAPES, 0)
    for short in (torch.zeros(3), torch.zeros(plan.num_values, dtype=torch.float64)):
        with pytest.raises(TrainerUsageError, match="is the plan of these shapes"):
            compress_p(plan, short, None, 0)


def test_rows_and_columns_of_zeros_stay_zeros_so_that_a_subspace_of_coordinates_is_kept() -> None:
    generator = torch.Generator().manual_seed(5)
    writer, embedding = torch.randn(128, 96, generator=generator), torch.randn(300, 128, generator=generator)
    outside = torch.randperm(128, generator=generator)[16:]
    writer[outside], embedding[:, outside] = 0.0, 0.0
    rank = 24  # More than the 16 dimensions that are left.
    plan = low_rank_plan((tuple(writer.shape), tuple(embedding.shape)), rank)
    vector = torch.cat([writer.flatten(), embedding.flatten()])
    p = orthonormalise(plan, compress_p(plan, vector, None, 3))
    result = decompress(plan, p, compress_q(plan, vector, p))
    assert result.norm() > 0.9 * vector.norm()
    assert not result[vector == 0].any()
