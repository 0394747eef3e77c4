"""The outer step: its arithmetic, and that it converges where the literal formula of spec T-12 diverges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.replica_group import MeetingCollective, Regression, ReplicaGroup, rounds_of, run_replicas
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer, OuterOptimizer, outer


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


def test_the_step_goes_where_the_inner_steps_went_and_without_work_nowhere() -> None:
    anchor, replica = torch.tensor([1.0]), torch.tensor([0.5])
    OuterOptimizer(lr=0.5, momentum=0.0).step(anchor, torch.zeros(1), torch.tensor([1.0]) - replica)
    assert anchor.item() == 0.75
    anchor, velocity = torch.randn(9), torch.randn(9)
    before, kept = anchor.clone(), velocity.clone()
    OuterOptimizer().step(anchor, velocity, torch.zeros(9), 0.0)
    assert torch.equal(anchor, before) and torch.equal(velocity, kept), "no velocity is spent either"


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
    beside = OuterOptimizer().stepped(start, velocity, delta)
    assert torch.equal(whole[0], beside[0]) and torch.equal(whole[1], beside[1])
    in_numpy = _numpy_step(start, velocity, delta)
    monkeypatch.setattr(outer, "_BLOCK_VALUES", 37)
    for other in (stepped([slice(0, 1003)]), stepped([slice(i, i + 1) for i in range(1003)]), in_numpy):
        assert torch.equal(whole[0], other[0]) and torch.equal(whole[1], other[1])


def _numpy_step(anchor: Tensor, velocity: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """NumPy never fuses a product into a sum."""
    lr, mu, d = np.float32(0.7), np.float32(0.9), delta.numpy()
    v = velocity.numpy() * mu + d
    return torch.from_numpy(anchor.numpy() - lr * (mu * v + d)), torch.from_numpy(v)


@pytest.mark.slow
@given(
    progress=st.floats(0.0, 1.0), momentum=st.floats(0.0, 0.95), seed=st.integers(0, 2**31), num_full=st.integers(0, 5)
)
@settings(deadline=None)
def test_a_step_of_part_of_a_rounds_work_moves_the_anchor_by_no_more_than_that_part(progress, momentum, seed, num_full):
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


NUM_REPLICAS, INNER_STEPS, NUM_ROUNDS = 4, 20, 20
WHOLE = DiLoCoConfig(inner_steps=INNER_STEPS)


def inner_loop(model: nn.Module, first_step: int, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(first_step, first_step + INNER_STEPS):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def by_the_letter(models: list[nn.Module], lr: float) -> None:
    """Spec T-12 read literally: δ = initial − current, and `param.add_(lr · (μ·v + δ))` on the drifted parameters."""
    velocity = [torch.zeros_like(parameter) for parameter in models[0].parameters()]
    for round_index in range(NUM_ROUNDS):
        initial = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
        for model in models:
            inner_loop(model, round_index * INNER_STEPS, lr)
        for index, v in enumerate(velocity):
            currents = [list(model.parameters())[index] for model in models]
            delta = torch.stack(
                [start[index] - current.detach() for start, current in zip(initial, currents, strict=True)]
            ).mean(dim=0)
            v.mul_(0.9).add_(delta)
            for current in currents:
                current.data.add_(0.7 * (0.9 * v + delta))


def by_ours(models: list[nn.Module], lr: float, config: DiLoCoConfig) -> None:
    group = ReplicaGroup(len(models))

    def train(rank: int, model: nn.Module) -> None:
        trainer = DiLoCoTrainer(model, config, MeetingCollective(group, rank))
        rounds_of(model, trainer, NUM_ROUNDS * INNER_STEPS, lr)
        trainer.drain()

    run_replicas([lambda rank=rank, model=model: train(rank, model) for rank, model in enumerate(models)])


@pytest.mark.slow
def test_replicas_converge_and_by_the_letter_they_do_not() -> None:
    unseen = torch.randn(512, 4, generator=torch.Generator().manual_seed(77))

    def held_out_ratio(train) -> float:
        models = [Regression(replica) for replica in range(NUM_REPLICAS)]
        start = models[0].loss_on(unseen)
        train(models)
        return (models[0].loss_on(unseen) / start).item()

    for config in (WHOLE, DiLoCoConfig(inner_steps=INNER_STEPS, num_fragments=3, overlap_steps=3)):
        assert held_out_ratio(lambda models, config=config: by_ours(models, 0.05, config)) < 0.1
    assert not held_out_ratio(lambda models: by_the_letter(models, lr=0.05)) < 1
