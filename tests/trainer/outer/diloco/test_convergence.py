"""20 inner steps, 20 rounds: the literal formula of 000 goes away from the optimum, DiLoCo goes to it (E1, E2)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.replica_group import MeetingCollective, ReplicaGroup, run_replicas
from tests.support.toy_models import Quadratic, Regression
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer

NUM_REPLICAS, INNER_STEPS, NUM_ROUNDS = 4, 20, 20


def inner_loop(model: nn.Module, first_step: int, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(first_step, first_step + INNER_STEPS):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def by_the_letter(models: list[nn.Module], lr: float) -> None:
    """000 as written: δ = initial − current, and `param.add_(lr · (μ·v + δ))` on the drifted parameters."""
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
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for step in range(NUM_ROUNDS * INNER_STEPS):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
            trainer.after_inner_step()
        trainer.drain()

    run_replicas([lambda rank=rank, model=model: train(rank, model) for rank, model in enumerate(models)])


def distance(models: list[nn.Module]) -> float:
    """Of the first replica from the optimum of the mean of all quadratics."""
    optimum = torch.stack([model.centre for model in models]).mean(dim=0)
    return (models[0].x.detach() - optimum).abs().max().item()


def held_out_loss(model: Regression) -> float:
    return model.loss_on(torch.randn(512, 4, generator=torch.Generator().manual_seed(77))).item()


STREAMED = DiLoCoConfig(inner_steps=INNER_STEPS, num_fragments=3, overlap_steps=3)


@pytest.mark.slow
def test_the_quadratic() -> None:
    letter, ours = ([Quadratic(replica) for replica in range(NUM_REPLICAS)] for _ in range(2))
    start = distance(ours)
    by_the_letter(letter, lr=0.05)
    by_ours(ours, 0.05, DiLoCoConfig(inner_steps=INNER_STEPS))
    assert distance(letter) > 1000 * start
    assert distance(ours) < 0.1 * start


@pytest.mark.slow
@pytest.mark.parametrize("config", [DiLoCoConfig(inner_steps=INNER_STEPS), STREAMED], ids=["whole", "streamed"])
def test_the_network(config: DiLoCoConfig) -> None:
    models: list[nn.Module] = [Regression(replica) for replica in range(NUM_REPLICAS)]
    start = held_out_loss(models[0])
    by_ours(models, 0.05, config)
    assert held_out_loss(models[0]) < 0.1 * start


@pytest.mark.slow
def test_the_network_by_the_letter() -> None:
    models: list[nn.Module] = [Regression(replica) for replica in range(NUM_REPLICAS)]
    start = held_out_loss(models[0])
    by_the_letter(models, lr=0.05)
    assert not held_out_loss(models[0]) < start


def spread(models: list[nn.Module]) -> Tensor:
    vectors = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models])
    return (vectors - vectors.mean(dim=0)).abs().max()


@pytest.mark.slow
def test_right_sign_on_drifted_parameters_keeps_replicas_apart() -> None:
    """E2 alone: without the return to the anchor replicas stay different; ours end each round equal."""
    ours: list[nn.Module] = [Quadratic(replica) for replica in range(NUM_REPLICAS)]
    by_ours(ours, 0.05, DiLoCoConfig(inner_steps=INNER_STEPS))
    assert spread(ours) == 0
    drifted: list[nn.Module] = [Quadratic(replica) for replica in range(NUM_REPLICAS)]
    initial = drifted[0].x.detach().clone()
    for model in drifted:
        inner_loop(model, 0, 0.05)
    delta = torch.stack([initial - model.x.detach() for model in drifted]).mean(dim=0)
    for model in drifted:
        model.x.data.sub_(0.7 * delta)
    assert spread(drifted) > 0.1
