"""The outer step: Nesterov momentum on the anchor, with the pseudo-gradient in the gradient's place (spec T-12).

With ``δ = anchor − replica`` (averaged) and the share ``p`` of the round's planned work that is in it, the step is
``anchor ← anchor − lr·(δ + p·μ·(μ·v + δ))`` and ``v ← (1 − p·(1 − μ))·v + δ``. For ``p = 1`` that is
``torch.optim.SGD(nesterov=True)``; a round requested early moves the anchor by at most ``p`` of a full step, the work
itself keeps its weight ``lr``, and ``1/p`` such rounds decay and fill the velocity as one full round does.

Every product and sum is rounded separately, in blocks that stay in the cache: members compute this step each for
themselves and must agree in every bit, and fused multiply-add gives another last bit on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_VALUES = 1 << 18


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """Applies agreed pseudo-gradients to the anchor; the caller keeps the momentum."""

    lr: float = 0.7
    momentum: float = 0.9

    @torch.no_grad()
    def step(self, anchor: Tensor, momentum: Tensor, pseudo_gradient: Tensor, progress: float = 1.0) -> None:
        """Moves anchor and momentum (zeros before the first step), [P] fp32, in place, by a round of that progress."""
        kept = self.momentum if progress == 1.0 else 1.0 - progress * (1.0 - self.momentum)
        scratch = torch.empty(min(_BLOCK_VALUES, anchor.numel()), dtype=anchor.dtype, device=anchor.device)
        for start in range(0, anchor.numel(), _BLOCK_VALUES):
            block = slice(start, start + _BLOCK_VALUES)
            velocity, delta = momentum[block], pseudo_gradient[block]
            update = scratch[: delta.numel()]
            torch.mul(velocity, self.momentum, out=update)
            update.add_(delta).mul_(progress * self.momentum).add_(delta).mul_(self.lr)
            velocity.mul_(kept).add_(delta)
            anchor[block].sub_(update)
