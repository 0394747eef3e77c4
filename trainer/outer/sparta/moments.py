"""AdamW's moments as flat vectors, and back: what a joiner needs beside the parameters (spec P-42, optimizer state).

They have no other use. Replicas' moments are never averaged: a delta rule on second moments makes negative ones, and
their average belongs to no replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from trainer.errors import TrainerUsageError
from trainer.outer.diloco.flat import FlatLayout

__all__ = ["AdamMoments", "check_optimizer", "gather_moments", "install_moments"]


@dataclass(frozen=True, slots=True, eq=False)
class AdamMoments:
    """AdamW's moments as flat vectors on the CPU, in the layout of the parameters.

    Args:
        exp_avg: [P] fp32, running mean of the gradients.
        exp_avg_sq: [P] fp32, running mean of their squares, 0 or more.
        steps: [T] fp32, steps behind each tensor, as AdamW counts them; 0: its moments are zeros.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor


def check_optimizer(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Refuses an optimizer whose state cannot be handed on.

    Raises:
        TrainerUsageError: it is not a plain Adam or AdamW, or a parameter is not in it.
    """
    if not isinstance(optimizer, Adam) or any(group.get("amsgrad") for group in optimizer.param_groups):
        raise TrainerUsageError(f"async_sparta: expected AdamW without amsgrad, found {type(optimizer).__name__}")
    groups = _group_of(optimizer)
    missing = [name for name, parameter in parameters.items() if id(parameter) not in groups]
    if missing:
        raise TrainerUsageError(
            f"async_sparta: expected an optimizer of all trainable parameters, found none for {missing[0]!r}"
        )


def gather_moments(layout: FlatLayout, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> AdamMoments:
    """Copies the optimizer's moments; zeros where it has taken no step yet."""
    exp_avg, exp_avg_sq = torch.zeros(layout.num_values), torch.zeros(layout.num_values)
    steps = torch.zeros(len(layout.names))
    for index, (name, shape, place) in enumerate(layout.slices()):
        state = optimizer.state.get(parameters[name])
        if state:
            exp_avg[place].view(shape).copy_(state["exp_avg"])
            exp_avg_sq[place].view(shape).copy_(state["exp_avg_sq"])
            steps[index] = float(state["step"])
    return AdamMoments(exp_avg, exp_avg_sq, steps)


@torch.no_grad()
def install_moments(
    moments: AdamMoments, layout: FlatLayout, parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> None:
    """Replaces the optimizer's moments; the caller has checked them (`SpartaState.check`)."""
    groups = _group_of(optimizer)
    for index, (name, shape, place) in enumerate(layout.slices()):
        parameter = parameters[name]
        group = groups[id(parameter)]
        on_device = bool(group.get("fused") or group.get("capturable"))  # Where AdamW itself keeps its step count.
        first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first.copy_(moments.exp_avg[place].view(shape))
        second.copy_(moments.exp_avg_sq[place].view(shape))
        optimizer.state[parameter] = {
            "step": moments.steps[index].clone().to(parameter.device if on_device else "cpu"),
            "exp_avg": first,
            "exp_avg_sq": second,
        }


def _group_of(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Parameter groups by identity of the parameter."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
