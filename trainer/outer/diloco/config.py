"""The options of DiLoCo, with their units; the defaults are those of spec T-10 and T-12."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import TrainerUsageError

__all__ = ["DiLoCoConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoConfig:
    """How often nodes synchronise, how far the outer step goes, and whether parts of the model take turns.

    Raises:
        TrainerUsageError: a value makes no sense.
    """

    inner_steps: int = 500
    """Inner steps between two synchronisations of the same parameter."""
    outer_lr: float = 0.7
    """How much of the agreed pseudo-gradient the outer step takes; 1 with momentum 0 averages the replicas."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer step, 0 to under 1."""
    num_fragments: int = 1
    """Parts of the model synchronised in turn, evenly spread over inner_steps; 1: all of it at once."""
    overlap_steps: int = 0
    """Inner steps that go on while a round runs in the background; 0: training waits for the round."""
    merge_alpha: float = 0.5
    """With overlap: share of the node's own, meanwhile trained parameters when the result comes in, 0 to under 1."""
    round_timeout_s: float = 3600.0
    """A round in the background that is not back by then is given up (engines have deadlines of their own)."""

    def __post_init__(self) -> None:
        if self.inner_steps < 1:
            raise TrainerUsageError(f"diloco.inner_steps: expected 1 or more, found {self.inner_steps}")
        if not (math.isfinite(self.outer_lr) and self.outer_lr > 0):
            raise TrainerUsageError(f"diloco.outer_lr: expected a number over 0, found {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise TrainerUsageError(f"diloco.outer_momentum: expected 0 to under 1, found {self.outer_momentum}")
        if not 1 <= self.num_fragments <= self.inner_steps:
            raise TrainerUsageError(
                f"diloco.num_fragments: expected 1 to inner_steps ({self.inner_steps}), found {self.num_fragments}"
            )
        spacing = self.inner_steps // self.num_fragments
        if not 0 <= self.overlap_steps < spacing:
            raise TrainerUsageError(
                f"diloco.overlap_steps: expected 0 to under {spacing} (inner_steps / num_fragments; one round at a "
                f"time), found {self.overlap_steps}"
            )
        if not 0 <= self.merge_alpha < 1:
            raise TrainerUsageError(f"diloco.merge_alpha: expected 0 to under 1, found {self.merge_alpha}")
        if not (math.isfinite(self.round_timeout_s) and self.round_timeout_s > 0):
            raise TrainerUsageError(f"diloco.round_timeout_s: expected more than 0 s, found {self.round_timeout_s}")

    def planned_steps(self, round_index: int) -> int:
        """Inner steps since the round before of the same fragment, or the beginning, that a round is meant to have."""
        return sum(self.steps_before(fragment) for fragment in range(min(round_index + 1, self.num_fragments)))

    def steps_before(self, fragment: int) -> int:
        """Inner steps from the synchronisation before to that of ``fragment``; over all fragments: inner_steps."""
        before = fragment * self.inner_steps // self.num_fragments
        return (fragment + 1) * self.inner_steps // self.num_fragments - before
