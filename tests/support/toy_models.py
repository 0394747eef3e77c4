"""Small things to train, each replica on data of its own, all from one start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.outer.engine.strategy import OuterResult, OuterStrategy


class Quadratic(nn.Module):
    """0.5 · Σ a (x − c)²: the optimum of the mean over replicas is the mean of their centres (equal a)."""

    def __init__(self, replica: int, num_values: int = 16) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(100 + replica)
        self.x = nn.Parameter(torch.full((num_values,), 5.0))
        self.register_buffer("centre", torch.randn(num_values, generator=seeded))
        self.register_buffer("curvature", torch.linspace(0.2, 1.0, num_values))

    def forward(self, step: int) -> Tensor:
        return 0.5 * (self.curvature * (self.x - self.centre).square()).sum()


class Regression(nn.Module):
    """An MLP that learns a fixed other MLP; each replica draws inputs of its own."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.replica = replica
        self.net = _mlp(seed=1)
        object.__setattr__(self, "teacher", _mlp(seed=2))

    def forward(self, step: int) -> Tensor:
        seeded = torch.Generator().manual_seed(10_000 * self.replica + step)
        return self.loss_on(torch.randn(32, 4, generator=seeded))

    def loss_on(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(inputs)
        return (self.net(inputs) - wanted).square().mean()


def _mlp(seed: int) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    seeded = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded) * 0.5)
    return net


def parameter_bits(model: nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def drift(model: nn.Module, by: float) -> None:
    """Adds to the parameters, as inner steps would: ``by`` to those of the first tensor, twice that to the second, …"""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(by * (index + 1))


def rounds_of(model: nn.Module, strategy: OuterStrategy, num_steps: int, lr: float = 0.05) -> list[OuterResult]:
    """Trains by SGD, with the strategy's turn after each step; returns the rounds that ended."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    results = []
    for step in range(num_steps):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        result = strategy.after_inner_step()
        if result is not None:
            results.append(result)
    return results
