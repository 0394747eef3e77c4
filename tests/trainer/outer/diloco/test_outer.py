from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.outer.diloco import OuterOptimizer, outer

SMALL_NUMBERS = st.integers(-512, 512).map(lambda number: number / 64)


@pytest.mark.slow
@given(lr=st.floats(0.01, 2.0), momentum=st.floats(0.01, 0.99), num_steps=st.integers(1, 8), seed=st.integers(0, 2**31))
@settings(deadline=None)
def test_equals_sgd_with_nesterov_on_the_anchor(lr: float, momentum: float, num_steps: int, seed: int) -> None:
    seeded = torch.Generator().manual_seed(seed)
    anchor, velocity = torch.randn(67, generator=seeded), torch.zeros(67)
    parameter = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=True)
    for _ in range(num_steps):
        delta = torch.randn(67, generator=seeded)
        parameter.grad = delta.clone()
        sgd.step()
        OuterOptimizer(lr, momentum).step(anchor, velocity, delta)
    scale = 1 + parameter.detach().abs().max().item() + lr * num_steps / (1 - momentum)
    torch.testing.assert_close(anchor, parameter.detach(), rtol=0, atol=scale * num_steps * 2**-22)


@pytest.mark.slow
@given(
    st.lists(st.lists(SMALL_NUMBERS, min_size=5, max_size=5), min_size=4, max_size=4),
    st.lists(SMALL_NUMBERS, min_size=5, max_size=5),
)
def test_lr_1_without_momentum_is_the_exact_mean_of_the_replicas(rows: list[list[float]], start: list[float]) -> None:
    replicas, anchor = torch.tensor(rows), torch.tensor(start)
    pseudo_gradient = (anchor - replicas).mean(dim=0)
    OuterOptimizer(lr=1.0, momentum=0.0).step(anchor, torch.zeros(5), pseudo_gradient)
    assert torch.equal(anchor, replicas.mean(dim=0))


def test_the_step_goes_where_the_inner_steps_went() -> None:
    anchor, replica = torch.tensor([1.0]), torch.tensor([0.5])
    OuterOptimizer(lr=0.5, momentum=0.0).step(anchor, torch.zeros(1), torch.tensor([1.0]) - replica)
    assert anchor.item() == 0.75


def test_every_bit_is_independent_of_position_and_of_blocks(monkeypatch) -> None:
    """Members whose processors fuse or vectorise differently must agree; slices of odd length stand for them."""
    torch.manual_seed(5)
    start, velocity, delta = torch.randn(1003), torch.randn(1003), torch.randn(1003)

    def stepped(places: list[slice]) -> tuple[Tensor, Tensor]:
        anchor, momentum = start.clone(), velocity.clone()
        for place in places:
            OuterOptimizer().step(anchor[place], momentum[place], delta[place])
        return anchor, momentum

    whole = stepped([slice(0, 1003)])
    in_numpy = _numpy_step(start, velocity, delta)
    monkeypatch.setattr(outer, "_BLOCK_VALUES", 37)
    for other in (stepped([slice(0, 1003)]), stepped([slice(i, i + 1) for i in range(1003)]), in_numpy):
        assert torch.equal(whole[0], other[0]) and torch.equal(whole[1], other[1])


def _numpy_step(anchor: Tensor, velocity: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """NumPy never fuses a product into a sum."""
    import numpy as np

    lr, mu, d = np.float32(0.7), np.float32(0.9), delta.numpy()
    v = velocity.numpy() * mu + d
    return torch.from_numpy(anchor.numpy() - lr * (mu * v + d)), torch.from_numpy(v)


@pytest.mark.slow
@given(
    progress=st.floats(0.0, 1.0),
    momentum=st.floats(0.0, 0.95),
    seed=st.integers(0, 2**31),
    num_full=st.integers(0, 5),
)
@settings(deadline=None)
def test_a_step_of_part_of_a_rounds_work_moves_the_anchor_by_no_more_than_that_part(
    progress: float, momentum: float, seed: int, num_full: int
) -> None:
    """Inner steps that go straight on, so that a share of them makes the same share of the pseudo-gradient."""
    delta = torch.randn(41, generator=torch.Generator().manual_seed(seed))
    optimizer = OuterOptimizer(0.7, momentum)
    anchor, velocity = torch.zeros(41), torch.zeros(41)
    for _ in range(num_full):
        optimizer.step(anchor, velocity, delta)
    early, after_early = anchor.clone(), velocity.clone()
    optimizer.step(early, after_early, progress * delta, progress)
    full, after_full = anchor.clone(), velocity.clone()
    optimizer.step(full, after_full, delta)
    moved, most = (early - anchor).abs(), progress * (full - anchor).abs()
    assert bool((moved <= most * (1 + 1e-5) + 1e-6).all())
    gained, most_gained = (after_early - velocity).abs(), (after_full - velocity).abs()
    assert bool((gained <= progress * most_gained + 1e-5).all()), "the velocity is neither spent nor filled beforehand"


def test_a_round_without_work_moves_nothing_and_spends_no_velocity() -> None:
    anchor, velocity = torch.randn(9), torch.randn(9)
    before, kept = anchor.clone(), velocity.clone()
    OuterOptimizer().step(anchor, velocity, torch.zeros(9), 0.0)
    assert torch.equal(anchor, before) and torch.equal(velocity, kept)
