"""`GradientAccumulator`: gradients of sums of losses, added up micro-batch by micro-batch, with the tokens they are of.

The first micro-batch's gradients become the sums themselves, those that follow are added in place: one pass of reading
and writing each, as autograd's own accumulation has, and no memory between a step and the first backward pass behind
it. Sums, not means: n tokens of mean gradient g weigh n·g whatever micro-batches they came in (spec P-25: an average of
means is off 6.25-fold for micro-batches of 1, 8, 8 and 8).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from trainer.pipeline.stage.results import Accumulated

__all__ = ["GradientAccumulator"]


class GradientAccumulator:
    """Sums of gradients.

    Args:
        parameters: whose; the order is that of `add`.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._accumulated = Accumulated()

    @property
    def accumulated(self) -> Accumulated:
        """Of what the sums are."""
        return self._accumulated

    def sums(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The living sums by parameter name, without those of parameters that nothing has touched.

        Args:
            names: of the parameters, in their order.
        """
        return {name: total for name, total in zip(names, self._sums, strict=True) if total is not None}

    def add(self, gradients: Sequence[Tensor | None], num_tokens: int, loss_sum: float = 0.0) -> None:
        """Counts a micro-batch; the gradients belong to the accumulator from now on.

        Args:
            gradients: of the sum of its losses, no one else's from now on; none where all of them are zero.
            num_tokens: of it.
            loss_sum: of it, where it is known.
        """
        sums: list[Tensor] = []
        summands: list[Tensor] = []
        places: set[int] = set()
        for index, gradient in enumerate(gradients):
            total = self._sums[index]
            if gradient is None:
                continue
            if total is None:
                self._sums[index] = _own(gradient, self._parameters[index], is_shared=gradient.data_ptr() in places)
                places.add(gradient.data_ptr())
            else:
                sums.append(total)
                summands.append(gradient)
        if sums:
            torch._foreach_add_(sums, summands)
        was = self._accumulated
        self._accumulated = Accumulated(was.num_tokens + num_tokens, was.num_micro_batches + 1, was.loss_sum + loss_sum)

    def norm(self) -> float:
        """The Euclidean norm of the mean over tokens; waits for the device. 0 without tokens."""
        sums = [total for total in self._sums if total is not None]
        num_tokens = self._accumulated.num_tokens
        return float(get_total_norm(sums)) / num_tokens if sums and num_tokens else 0.0

    def hand_over(self, scale: float) -> None:
        """Puts the sums, multiplied by ``scale``, where an optimizer looks for gradients, and is empty then."""
        present = [total for total in self._sums if total is not None]
        if present and scale != 1.0:
            torch._foreach_mul_(present, scale)
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = total
        self.drop()

    def drop(self) -> Accumulated:
        """Forgets everything; returns of what it was."""
        was, self._accumulated = self._accumulated, Accumulated()
        self._sums = [None] * len(self._parameters)
        return was

    def restore(self, sums: Sequence[Tensor | None], accumulated: Accumulated) -> None:
        """Takes up a copy of sums that were saved."""
        self._sums = [
            None if total is None else total.to(parameter.device, parameter.dtype, copy=True)
            for parameter, total in zip(self._parameters, sums, strict=True)
        ]
        self._accumulated = accumulated


def _own(gradient: Tensor, parameter: Tensor, *, is_shared: bool) -> Tensor:
    """The gradient in memory of its own and in the parameter's order, as kernels want it."""
    if not is_shared and gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
