from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

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


def test_a_seed_gives_the_same_bits_on_every_machine():
    assert basis_of(48, 6, 7).digest() == "f1ef4ade34ea817034d685fa0429eca98018825fb6c71400f22de65dae4ea985"


def test_it_depends_on_seed_and_shape():
    digests = {basis_of(32, 4, 0).digest(), basis_of(32, 4, 1).digest(), basis_of(32, 5, 0).digest()}

    assert len(digests) == 3


@pytest.mark.parametrize("rank", [0, 17, -1])
def test_a_rank_that_the_model_has_not_is_refused(rank: int):
    with pytest.raises(TrainerUsageError, match=r"subspace\.rank"):
        basis_of(16, rank, 0)


def test_it_survives_a_file(tmp_path: Path):
    basis = basis_of(24, 3, 5)
    basis.save(tmp_path / "basis.safetensors")

    assert torch.equal(Basis.load(tmp_path / "basis.safetensors", basis.digest()).matrix, basis.matrix)


def test_a_file_that_is_not_the_runs_is_refused(tmp_path: Path):
    basis_of(24, 3, 5).save(tmp_path / "basis.safetensors")

    with pytest.raises(BasisError, match="the run's basis"):
        Basis.load(tmp_path / "basis.safetensors", basis_of(24, 3, 6).digest())


@pytest.mark.parametrize(
    "tensors",
    [
        {"basis": torch.eye(8)[:, :3] * 1.001},
        {"basis": torch.ones(8, 2)},
        {"basis": torch.full((8, 2), torch.nan)},
        {"basis": torch.eye(8)[:3].clone()},  # more columns than rows
        {"basis": torch.eye(8)[:, :3].double()},
        {"basis": torch.ones(1)},
        {"basis": torch.eye(8)[:, :3].clone(), "more": torch.ones(1)},
        {},
    ],
)
def test_a_file_that_holds_no_basis_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "basis.safetensors")

    with pytest.raises(BasisError):
        Basis.load(tmp_path / "basis.safetensors")


def test_a_pickle_is_not_read(tmp_path: Path):
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "basis.pt").write_bytes(pickle.dumps(Attack()))

    with pytest.raises(BasisError, match="safetensors"):
        Basis.load(tmp_path / "basis.pt")
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_and_an_unwritable_one_are_named(tmp_path: Path):
    with pytest.raises(BasisError, match="nowhere"):
        Basis.load(tmp_path / "nowhere")
    with pytest.raises(BasisError, match="cannot write"):
        basis_of(8, 2, 0).save(tmp_path / "no" / "folder")
