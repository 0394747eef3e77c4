from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_configs import random_tokens, small_config
from trainer.errors import BasisError, TrainerUsageError
from trainer.inner import InnerConfig, make_optimizer
from trainer.model import ModelConfig, Transformer, build_model, split
from trainer.model.subspace import Basis, SubspaceConfig, SubspaceConstraint, basis_of

_OLMO2 = {"qk_norm": True, "reorder_norm": True}
_RANK = 3
_ROTATED = Basis(torch.linalg.qr(torch.randn(16, _RANK, generator=torch.Generator().manual_seed(4))).Q)
_BASES = pytest.mark.parametrize("basis", [None, _ROTATED], ids=["coordinates", "rotated"])


def _config(free_layers: int = 1, **changes: object) -> ModelConfig:
    return SubspaceConfig(rank=_RANK, seed=5).applied_to(small_config(**changes), free_layers)


def _step(model: Transformer, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids, labels = random_tokens(model.config.vocab_size, 2, 12, seed=seed)
    model(ids, labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_writes_to_the_stream_before_the_last_boundary_is_constrained_and_nothing_else():
    model = build_model(_config(free_layers=2), 0)
    assert set(SubspaceConstraint(model, model.config).names) == _written(0, 1)
    for norms in ({}, _OLMO2):
        model = build_model(_config(**norms), 0)
        head, *_ = split(model, [range(0, 1), range(1, 3), range(3, 4)])
        assert set(SubspaceConstraint(head, model.config).names) == _written(0)


def _written(*layers: int) -> set[str]:
    parts = ("attention.o_proj", "feed_forward.down_proj")
    return {"embedding.weight", *(f"layers.{layer}.{part}.weight" for layer in layers for part in parts)}


@_BASES
@pytest.mark.parametrize("norms", [{}, _OLMO2], ids=["pre-norm", "re-ordered"])
def test_one_step_leaves_the_subspace_unless_it_is_projected(norms: dict[str, bool], basis: Basis | None):
    strays, stays = (build_model(_config(**norms), 0) for _ in range(2))
    constraints = [SubspaceConstraint(model, model.config, basis) for model in (strays, stays)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (strays, stays)]
    constraints[1].attach(optimizers[1])
    for model, optimizer in zip((strays, stays), optimizers, strict=True):
        _step(model, optimizer, seed=0)
    assert constraints[0].distance() > 1e-2
    assert constraints[1].distance() < 1e-6


@pytest.mark.slow
@_BASES
@settings(max_examples=20)
@given(seed=st.integers(0, 2**20), scale=st.floats(1e-6, 1e6))
def test_a_projection_is_orthogonal_and_does_nothing_twice(basis: Basis | None, seed: int, scale: float):
    model = build_model(_config(), 0)
    constraint = SubspaceConstraint(model, model.config, basis)
    generator = torch.Generator().manual_seed(seed)
    given_ = {name: scale * torch.randn(value.shape, generator=generator) for name, value in model.named_parameters()}
    once = {name: value.clone() for name, value in given_.items()}
    constraint.project_(once)
    twice = {name: value.clone() for name, value in once.items()}
    constraint.project_(twice)
    for name, value in given_.items():
        if name not in constraint.names:
            assert torch.equal(once[name], value)
            continue
        torch.testing.assert_close(twice[name], once[name], rtol=0, atol=2e-6 * scale)
        removed = value - once[name]
        assert abs(float((removed * once[name]).sum())) < 1e-4 * scale * scale * value.numel()
        assert float(removed.norm()) > 0.5 * float(value.norm())  # 13 of 16 dimensions


@_BASES
def test_ensure_keeps_the_bits_of_what_is_within_and_heals_what_is_not(basis: Basis | None):
    model = build_model(_config(), 0)
    constraint = SubspaceConstraint(model, model.config, basis)
    constraint.attach(optimizer := torch.optim.AdamW(model.parameters(), lr=1e-2))
    _step(model, optimizer, seed=1)
    before = copy.deepcopy(model.state_dict())
    assert constraint.ensure() < 1e-6
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.get_parameter("layers.1.attention.o_proj.weight").add_(0.01)
    assert constraint.ensure() > 1e-3
    assert constraint.distance() < 1e-6
    unchanged = before.keys() - {"layers.1.attention.o_proj.weight"}
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in unchanged)


def test_constant_gains_are_not_trained():
    model = build_model(_config(free_layers=1, **_OLMO2), 0)
    trained = {id(p) for group in make_optimizer(model, InnerConfig()).param_groups for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in trained}
    assert "layers.0.attention_norm.weight" not in names
    assert {"layers.3.attention_norm.weight", "layers.0.attention.q_norm.weight"} <= names


@given(dim=st.integers(1, 96), share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_columns_are_coordinates_and_exactly_orthonormal(dim: int, share: float, seed: int):
    rank = max(1, round(share * dim))
    basis = basis_of(dim, rank, seed)
    basis.check()
    assert torch.equal(basis.matrix.T @ basis.matrix, torch.eye(rank))
    coordinates = basis.coordinates()
    assert coordinates is not None
    assert torch.equal(basis.matrix, torch.eye(dim)[:, coordinates])
    assert coordinates.tolist() == sorted(set(coordinates.tolist()))


def test_a_seed_and_a_shape_give_the_same_bits_on_every_machine():
    assert basis_of(48, 6, 7).digest() == "f1ef4ade34ea817034d685fa0429eca98018825fb6c71400f22de65dae4ea985"
    assert len({basis_of(32, rank, seed).digest() for rank, seed in ((4, 0), (4, 1), (5, 0))}) == 3


def test_a_rank_that_the_model_has_not_and_a_matrix_that_is_no_basis_are_refused():
    for rank in (0, 17, -1):
        with pytest.raises(TrainerUsageError, match=r"subspace\.rank"):
            basis_of(16, rank, 0)
    columns, wide = torch.eye(8)[:, :3], torch.eye(8)[:3]
    for matrix in (columns * 1.001, columns.double(), wide, torch.ones(8, 2), torch.full((8, 2), torch.nan)):
        with pytest.raises(BasisError):
            Basis(matrix).check()
    with pytest.raises(BasisError):
        Basis(torch.ones(1)).check()
