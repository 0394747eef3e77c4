"""The outer step: Nesterov momentum on the anchor, with the pseudo-gradient in the gradient's place (spec T-12).

With ``δ = anchor − replica`` (averaged) and the share ``p`` of the round's planned work that is in it, the step is
``anchor ← anchor − lr·(δ + p·μ·(μ·v + δ))`` and ``v ← (1 − p·(1 − μ))·v + δ``. For ``p = 1`` that is
``torch.optim.SGD(nesterov=True)``; a round requested early moves the anchor by at most ``p`` of a full step, the work
itself keeps its weight ``lr``, and ``1/p`` such rounds decay and fill the velocity as one full round does.

Every product and sum is rounded separately, in blocks that stay in the cache: members compute this step each for
themselves and must agree in every bit, and fused multiply-add gives another last bit on another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_VALUES = 1 << 18


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """Applies agreed pseudo-gradients to the anchor; the caller keeps the momentum."""

    lr: float = 0.7
    momentum: float = 0.9

    def step(self, anchor: Tensor, momentum: Tensor, pseudo_gradient: Tensor, progress: float = 1.0) -> None:
        """Moves anchor and momentum (zeros before the first step), [P] fp32, in place, by a round of that progress."""
        for block, scratch in _blocks(anchor):
            self._step(anchor[block], momentum[block], pseudo_gradient[block], scratch, progress)

    def stepped(
        self, anchor: Tensor, momentum: Tensor, pseudo_gradient: Tensor, progress: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns the new anchor and momentum, and leaves the old ones as they are; in one pass over memory."""
        new_anchor, new_momentum = torch.empty_like(anchor), torch.empty_like(momentum)
        for block, scratch in _blocks(anchor):
            moved, velocity = new_anchor[block].copy_(anchor[block]), new_momentum[block].copy_(momentum[block])
            self._step(moved, velocity, pseudo_gradient[block], scratch, progress)
        return new_anchor, new_momentum

    @torch.no_grad()
    def _step(self, anchor: Tensor, velocity: Tensor, delta: Tensor, update: Tensor, progress: float) -> None:
        kept = self.momentum if progress == 1.0 else 1.0 - progress * (1.0 - self.momentum)
        torch.mul(velocity, self.momentum, out=update)
        update.add_(delta).mul_(progress * self.momentum).add_(delta).mul_(self.lr)
        velocity.mul_(kept).add_(delta)
        anchor.sub_(update)


def _blocks(vector: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields the blocks of a vector, and room for as many values, the same memory each time."""
    scratch = torch.empty(min(_BLOCK_VALUES, vector.numel()), dtype=vector.dtype, device=vector.device)
    for start in range(0, vector.numel(), _BLOCK_VALUES):
        block = slice(start, min(start + _BLOCK_VALUES, vector.numel()))
        yield block, scratch[: block.stop - start]
