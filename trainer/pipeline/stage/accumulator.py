"""`GradientAccumulator` adds up gradients micro-batch by micro-batch; `NormBound` limits what one of them may weigh.

Sums of losses' gradients are added, not means, so micro-batches weigh by their tokens (spec P-25). The first one's
gradients become the sums, and later ones are added in place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_high
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from trainer.pipeline.stage.interface import Accumulated

WINDOW: Final = 64  # Micro-batches that are remembered.
WARM_UP: Final = 16  # Micro-batches before there is a bound.


class GradientAccumulator:
    """Sums of gradients of ``parameters``."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.accumulated = Accumulated()  # Tokens, micro-batches and losses in the sums.
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def sums(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the live sums by ``names`` of all parameters, without those that no gradient has touched."""
        return {name: total for name, total in zip(names, self._sums, strict=True) if total is not None}

    def add(self, gradients: Sequence[Tensor | None], num_tokens: int, loss_sum: float = 0.0) -> None:
        """Adds a micro-batch's gradients of the sum of its losses, and owns them from now on; empty: all are zero."""
        sums: list[Tensor] = []
        summands: list[Tensor] = []
        places: set[int] = set()
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if (total := self._sums[index]) is None:
                self._sums[index] = _own(gradient, self._parameters[index], is_shared=gradient.data_ptr() in places)
                places.add(gradient.data_ptr())
            else:
                sums.append(total)
                summands.append(gradient)
        if sums:
            torch._foreach_add_(sums, summands)
        was = self.accumulated
        self.accumulated = Accumulated(was.num_tokens + num_tokens, was.num_micro_batches + 1, was.loss_sum + loss_sum)

    def norm(self) -> float:
        """Returns the Euclidean norm of the mean over tokens, 0 without tokens; waits for the device."""
        sums = [total for total in self._sums if total is not None]
        num_tokens = self.accumulated.num_tokens
        return float(get_total_norm(sums)) / num_tokens if sums and num_tokens else 0.0

    def hand_over(self, scale: float) -> None:
        """Moves the sums, multiplied by ``scale``, to ``parameter.grad``, and is empty afterwards."""
        present = [total for total in self._sums if total is not None]
        if present and scale != 1.0:
            torch._foreach_mul_(present, scale)
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = total
        self.drop()

    def drop(self) -> Accumulated:
        """Drops the sums; returns what they held."""
        was, self.accumulated = self.accumulated, Accumulated()
        self._sums = [None] * len(self._parameters)
        return was

    def restore(self, sums: Sequence[Tensor | None], accumulated: Accumulated) -> None:
        """Replaces the sums with a copy of saved ones."""
        self._sums = [
            None if total is None else total.to(parameter.device, parameter.dtype, copy=True)
            for parameter, total in zip(self._parameters, sums, strict=True)
        ]
        self.accumulated = accumulated


def _own(gradient: Tensor, parameter: Tensor, *, is_shared: bool) -> Tensor:
    """Returns the gradient in memory of its own and in the parameter's memory order, as kernels want it."""
    if not is_shared and gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class NormBound:
    """Bounds a micro-batch's gradient by ``factor`` times the median norm of the last `WINDOW` counted here.

    This is centered clipping (Karimireddy et al. 2021) with a radius that follows the run, as AutoClip's percentile of
    past norms does (Seetharaman et al. 2020); no minority of liars can move a median. An outlier is scaled, not
    refused: a norm does not prove who is to blame. Norms are remembered unscaled, so a wrong bound corrects itself.

    A gradient of norm g over m tokens suggests up to g * max(n / m, sqrt(n / m)) over n tokens: signal grows with the
    tokens, noise with their root.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.seen: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        """Norm and tokens of each of the last micro-batches, the oldest first."""

    def usual(self, num_tokens: int) -> float | None:
        """Returns the usual norm of a micro-batch of so many tokens; None: too few have been seen."""
        if len(self.seen) < WARM_UP:
            return None
        ratios = [(norm, num_tokens / tokens) for norm, tokens in self.seen]
        return median_high(norm * max(ratio, math.sqrt(ratio)) for norm, ratio in ratios)

    def coefficient(self, norm: float, num_tokens: int) -> float:
        """Returns the factor to scale a gradient with, exactly 1 within the bound; ``norm`` is of the summed losses."""
        usual = self.usual(num_tokens)
        if not usual or norm <= self._factor * usual:
            return 1.0
        return self._factor * usual / norm

    def note(self, norm: float, num_tokens: int) -> None:
        """Remembers a counted micro-batch by the norm its gradient had before scaling."""
        self.seen.append((norm, num_tokens))
