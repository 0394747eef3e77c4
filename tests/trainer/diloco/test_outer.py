from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.diloco import OuterOptimizer, outer

SMALL_NUMBERS = st.integers(-512, 512).map(lambda number: number / 64)


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
