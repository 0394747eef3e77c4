"""`StageConfig`: the options of a stage's compute, checked where they are given.

Clipping (spec P-29): of S stages each has 1/sqrt(S) of the whole norm, the tail five times that (0.1768 and 0.8839
with 32 stages), so that no stage waits to hear the others' norms before it steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from trainer.errors import TrainerUsageError

__all__ = ["BackwardMode", "StageConfig"]

BackwardMode = Literal["cached", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """How a worker computes its stage.

    Raises:
        TrainerUsageError: a value is out of range; it names field and value.
    """

    target_tokens: int = 0
    """Tokens, over all workers of the stage, whose gradients make one step; 0: eight micro-batches' worth."""
    clip_factor: float = 1.0
    """A stage's gradient is scaled down to this norm over the root of the number of stages; ``.inf``: never."""
    tail_clip_factor: float = 5.0
    """The same for the tail."""
    outlier_factor: float = 50.0
    """A micro-batch's gradient is scaled down to so many times the norm that is usual in the stage; ``.inf``: never.
    Honest ones had up to 17 times (head of ``tiny``, real text, 2,000 micro-batches, learning rates up to 1e-2)."""
    backward: BackwardMode = "cached"
    """Keep what a backward pass needs from the forward pass on, or compute it again from the input: a third more
    compute, a tenth of the memory."""
    max_cached_bytes: int = 1 << 30
    """Of inputs and graphs kept for backward passes to come; beyond it the oldest are computed again."""
    max_staleness: int = 50
    """Optimizer steps between a micro-batch's forward and backward pass; a gradient further off is refused."""

    def __post_init__(self) -> None:
        _check(self.target_tokens >= 0, "target_tokens", "0 (eight micro-batches) or more", self.target_tokens)
        for name in ("clip_factor", "tail_clip_factor"):
            value = getattr(self, name)
            _check(value > 0 and not math.isnan(value), name, "a number above 0", value)
        _check(self.outlier_factor >= 1, "outlier_factor", "a number of 1 or more", self.outlier_factor)
        _check(self.backward in get_args(BackwardMode), "backward", "cached or recompute", self.backward)
        _check(self.max_cached_bytes >= 0, "max_cached_bytes", "0 (keep nothing) or more", self.max_cached_bytes)
        _check(self.max_staleness >= 0, "max_staleness", "0 or more", self.max_staleness)


def _check(holds: bool, name: str, expected: str, found: object) -> None:
    if not holds:
        raise TrainerUsageError(f"{name}: expected {expected}, found {found!r}")
