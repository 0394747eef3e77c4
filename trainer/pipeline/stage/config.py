"""Options of a stage's compute: the target of tokens, clipping, what is kept for backward passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from trainer.errors import TrainerUsageError

BackwardMode = Literal["cached", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """How a worker computes its stage.

    Clipping (spec P-29): each of S stages gets 1/sqrt(S) of the whole norm, the tail five times that, so that no stage
    waits for the others' norms before it steps.
    """

    target_tokens: int = 0
    """Tokens, over all workers of the stage, whose gradients make one step; 0: eight micro-batches' worth."""
    clip_factor: float = 1.0
    """A stage's gradient is scaled down to this norm over the root of the number of stages; ``.inf``: never."""
    tail_clip_factor: float = 5.0
    """The same for the tail."""
    outlier_factor: float = 50.0
    """A micro-batch's gradient is scaled down to so many times the usual norm; honest ones had up to 17 (`tiny`)."""
    backward: BackwardMode = "cached"
    """Keep what a backward pass needs, or compute it again: a third more compute, a tenth of the memory."""
    max_cached_bytes: int = 1 << 30
    """Of inputs and graphs kept for backward passes to come; beyond it the oldest are computed again."""
    max_staleness: int = 50
    """Optimizer steps between a micro-batch's forward and backward pass; a gradient further off is refused."""

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("target_tokens", self.target_tokens >= 0, "0 (eight micro-batches) or more"),
            ("clip_factor", self.clip_factor > 0, "a number above 0"),
            ("tail_clip_factor", self.tail_clip_factor > 0, "a number above 0"),
            ("outlier_factor", self.outlier_factor >= 1, "a number of 1 or more"),
            ("backward", self.backward in get_args(BackwardMode), "cached or recompute"),
            ("max_cached_bytes", self.max_cached_bytes >= 0, "0 (keep nothing) or more"),
            ("max_staleness", self.max_staleness >= 0, "0 or more"),
        ):
            if not holds:
                raise TrainerUsageError(f"{name}: expected {expected}, found {getattr(self, name)!r}")
