"""Clipping and AdamW with the same bits on every machine: what each member computes for itself from the agreed result.

torch's fused kernel contracts products and sums where a processor can, and shares a tensor among threads, so its last
bits depend on the machine and on the number of threads. Here every product, sum, quotient and root is rounded by
itself, in blocks that stay in the cache, and norms are added up in one order. The price is three to four times the
fused kernel's time, 3 to 4 ns a parameter on one core, and 1 ns for the norm: little beside a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from trainer.errors import TrainerUsageError
from trainer.outer.diloco.flat import FlatLayout

_BLOCK_VALUES: Final = 1 << 18
_NORM_BLOCK_VALUES: Final = 1 << 18  # A power of two: it is folded in halves.
_CLIP_EPS: Final = 1e-6  # What torch adds to a norm before it divides by it.


@torch.no_grad()
def exact_norm(vector: Tensor) -> float:
    """Returns the Euclidean norm of [P] fp32, the same bits however many threads there are; infinite on overflow."""
    sums = []
    for start in range(0, vector.numel(), _NORM_BLOCK_VALUES):
        block = vector[start : start + _NORM_BLOCK_VALUES].double()
        squares = block.mul_(block)
        while squares.numel() > 1:
            half = squares.numel() // 2
            folded = squares[:half] + squares[half : 2 * half]
            if squares.numel() % 2:
                folded[0] += squares[-1]
            squares = folded
        sums.append(float(squares[0]))
    return math.sqrt(math.fsum(sums)) if all(map(math.isfinite, sums)) else math.inf


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Returns what a gradient of this norm is multiplied by, 1 or less."""
    return min(1.0, max_norm / (norm + _CLIP_EPS))


@dataclass(frozen=True, slots=True)
class ExactAdamW:
    """AdamW over flat vectors; it keeps no state."""

    betas: tuple[float, float]
    eps: float
    decays: tuple[tuple[slice, float], ...]
    """Runs of the vector, one after another, each with its decoupled weight decay."""

    @classmethod
    def of(cls, optimizer: Optimizer, parameters: Mapping[str, Tensor], layout: FlatLayout) -> ExactAdamW:
        """Returns what a model's AdamW would do, by its options; raises TrainerUsageError for another optimizer."""
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        options = {(tuple(group["betas"]), group["eps"]) for group in groups.values() if "betas" in group}
        is_plain = isinstance(optimizer, Adam) and not any(group.get("amsgrad") for group in groups.values())
        if not is_plain or len(options) != 1 or any(id(parameters[name]) not in groups for name in layout.names):
            raise TrainerUsageError(
                f"strategy grad: expected one AdamW without amsgrad of all parameters, whose step all members compute "
                f"with the same bits, found {type(optimizer).__name__}"
            )
        runs: list[tuple[slice, float]] = []
        for name, _, place in layout.slices():
            decay = float(groups[id(parameters[name])]["weight_decay"])
            if runs and runs[-1][1] == decay:
                place = slice(runs.pop()[0].start, place.stop)
            runs.append((place, decay))
        ((betas, eps),) = options
        return cls(betas, eps, tuple(runs))

    @torch.no_grad()
    def step(
        self,
        parameters: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gradient: Tensor,
        *,
        scale: float,
        lr: float,
        update: int,
    ) -> None:
        """Moves parameters and moments, [P] fp32 on the CPU, in place.

        Args:
            parameters: the weights.
            exp_avg: the first moment; zeros before the first update.
            exp_avg_sq: the second moment.
            gradient: not changed; ``scale`` times it is what counts.
            scale: see ``gradient``.
            lr: learning rate.
            update: number of this update, from 1.
        """
        first, second = self.betas
        step_size = lr / (1.0 - _power(first, update))
        root_correction = math.sqrt(1.0 - _power(second, update))
        scratch = torch.empty(2, min(_BLOCK_VALUES, gradient.numel()))
        for place, decay in self.decays:
            for start in range(place.start, place.stop, _BLOCK_VALUES):
                block = slice(start, min(start + _BLOCK_VALUES, place.stop))
                weights, mean, square = parameters[block], exp_avg[block], exp_avg_sq[block]
                scaled, other = scratch[:, : weights.numel()]
                torch.mul(gradient[block], scale, out=scaled)
                mean.mul_(first).add_(torch.mul(scaled, 1.0 - first, out=other))
                torch.mul(scaled, scaled, out=other)
                square.mul_(second).add_(other.mul_(1.0 - second))
                torch.sqrt(square, out=other)
                other.div_(root_correction).add_(self.eps)
                torch.div(mean, other, out=scaled)
                if decay:
                    weights.mul_(1.0 - lr * decay)
                weights.sub_(scaled.mul_(step_size))


def _power(base: float, exponent: int) -> float:
    """``base ** exponent`` by products alone: a library's power has other last bits on another machine."""
    result, square = 1.0, base
    while exponent:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result
