from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import BasisError, TrainerUsageError
from trainer.model.subspace import Basis, basis_of


@given(dim=st.integers(1, 96), share=st.floats(0, 1), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_columns_are_coordinates_and_exactly_orthonormal(dim: int, share: float, seed: int):
    rank = max(1, round(share * dim))
    basis = basis_of(dim, rank, seed)
    basis.check()
    assert torch.equal(basis.matrix.T @ basis.matrix, torch.eye(rank))
    coordinates = basis.coordinates()
    assert coordinates is not None
    assert torch.equal(basis.matrix, torch.eye(dim)[:, coordinates])
    assert coordinates.tolist() == sorted(set(coordinates.tolist()))


def test_another_basis_has_no_coordinates():
    orthonormal = torch.linalg.qr(torch.randn(8, 3, generator=torch.Generator().manual_seed(0))).Q
    Basis(orthonormal).check()
    for matrix in (orthonormal, -torch.eye(8)[:, :3], torch.eye(8)[:, :2] * 2):
        assert Basis(matrix).coordinates() is None


def test_a_seed_and_a_shape_give_the_same_bits_on_every_machine():
    assert basis_of(48, 6, 7).digest() == "f1ef4ade34ea817034d685fa0429eca98018825fb6c71400f22de65dae4ea985"
    assert len({basis_of(32, rank, seed).digest() for rank, seed in ((4, 0), (4, 1), (5, 0))}) == 3


@pytest.mark.parametrize("rank", [0, 17, -1])
def test_a_rank_that_the_model_has_not_is_refused(rank: int):
    with pytest.raises(TrainerUsageError, match=r"subspace\.rank"):
        basis_of(16, rank, 0)


@pytest.mark.parametrize(
    "matrix",
    [
        torch.eye(8)[:, :3] * 1.001,
        torch.ones(8, 2),
        torch.full((8, 2), torch.nan),
        torch.eye(8)[:3],  # more columns than rows
        torch.eye(8)[:, :3].double(),
        torch.ones(1),
    ],
)
def test_a_matrix_that_is_no_basis_is_refused(matrix: torch.Tensor):
    with pytest.raises(BasisError):
        Basis(matrix).check()
