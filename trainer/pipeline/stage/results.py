"""What a stage's compute answers; tensors in it are on the stage's device, without a graph behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

__all__ = ["Accumulated", "BackwardResult", "LossSum", "StageKind", "StepInfo", "TailResult"]

StageKind: TypeAlias = Literal["head", "body", "tail"]


@dataclass(frozen=True, slots=True)
class Accumulated:
    """What the accumulators hold, or held."""

    num_tokens: int = 0
    """Labels that count."""
    num_micro_batches: int = 0
    """Of any number of such labels, none included."""
    loss_sum: float = 0.0
    """Tail: of those labels; 0 elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class LossSum:
    """The loss of some labels."""

    loss_sum: float
    num_tokens: int
    """Labels that counted."""


@dataclass(frozen=True, slots=True, eq=False)
class BackwardResult:
    """A micro-batch's gradient was counted."""

    grad_x: Tensor | None
    """fp32[rows, positions, dim], of the sum of the losses; None at the head."""
    version: int
    """Of the weights it was computed at."""
    recomputed: bool
    """Its forward pass was run again: the graph had gone, or the weights had moved on."""
    scale: float = 1.0
    """What it was multiplied by: less than 1 where it was out of the ordinary."""


@dataclass(frozen=True, slots=True, eq=False)
class TailResult:
    """A micro-batch's loss, and its gradient was counted."""

    loss_sum: float
    """Over the labels that count."""
    num_tokens: int
    """How many did."""
    grad_hidden: Tensor
    """fp32[rows, positions, dim], of `loss_sum`."""
    version: int
    """Of the weights it was computed at."""
    scale: float = 1.0
    """What the gradient was multiplied by: less than 1 where it was out of the ordinary."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What a step was."""

    version: int
    """Behind it."""
    lr: float
    """It was taken with."""
    grad_norm: float
    """Of the mean over tokens, this stage's, before clipping; 0 where nothing was accumulated."""
    clip_coefficient: float
    """What clipping left of it, 1 where it had nothing to do."""
    num_tokens: int
    num_micro_batches: int
    loss: float | None
    """Tail: mean over the tokens."""
    applied: bool
    """False: there was no token, or the gradient was not finite; the weights are as they were."""
    seconds: float
    """Until its last kernel was queued."""
