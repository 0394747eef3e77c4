"""Sums of gradients, in the parameters' own memory order."""

from __future__ import annotations

import pytest
import torch

from trainer.pipeline.stage import Accumulated
from trainer.pipeline.stage.accumulator import GradientAccumulator


def _parameters() -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))]


def test_gradients_in_another_order_of_memory_are_put_into_the_parameters_order() -> None:
    parameters = _parameters()
    accumulator = GradientAccumulator(parameters)
    transposed = torch.arange(6.0).view(3, 2).t()
    everywhere_one = torch.ones(()).expand(3)
    accumulator.add([transposed, everywhere_one], 1)
    accumulator.add([transposed, everywhere_one], 1)
    accumulator.hand_over(0.5)
    assert torch.equal(parameters[0].grad, transposed)
    assert torch.equal(parameters[1].grad, torch.ones(3))
    assert all(parameter.grad.stride() == parameter.stride() for parameter in parameters)


def test_two_gradients_in_one_piece_of_memory_are_added_up_apart() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
    accumulator = GradientAccumulator(parameters)
    both = torch.ones(3)
    accumulator.add([both, both], 1)
    accumulator.add([torch.ones(3), torch.zeros(3)], 1)
    accumulator.hand_over(1.0)
    assert torch.equal(parameters[0].grad, torch.full((3,), 2.0))
    assert torch.equal(parameters[1].grad, torch.ones(3))


def test_a_parameter_nothing_touched_has_no_gradient() -> None:
    parameters = _parameters()
    accumulator = GradientAccumulator(parameters)
    parameters[0].grad = torch.ones(2, 3)
    accumulator.add([None, torch.tensor([3.0, 0.0, 4.0])], 2)
    assert list(accumulator.sums(["a", "b"])) == ["b"]
    assert accumulator.norm() == pytest.approx(2.5)
    accumulator.hand_over(1.0)
    assert parameters[0].grad is None
    assert accumulator.accumulated == Accumulated()
    assert accumulator.norm() == 0.0
