"""Options of DiLoCo; the defaults are those of spec T-10 and T-12."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import TrainerUsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoConfig:
    """How often nodes synchronise, how far the outer step goes, and whether parts of the model take turns."""

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
    """With overlap: share of the node's own parameters, trained meanwhile, in the merge; 0 to under 1."""
    round_timeout_s: float = 3600.0
    """A background round that is not back by then is given up (engines have deadlines of their own)."""

    def __post_init__(self) -> None:
        spacing = self.inner_steps // max(1, self.num_fragments)
        for field, is_valid, expected in (
            ("inner_steps", self.inner_steps >= 1, "1 or more"),
            ("outer_lr", math.isfinite(self.outer_lr) and self.outer_lr > 0, "a number over 0"),
            ("outer_momentum", 0 <= self.outer_momentum < 1, "0 to under 1"),
            ("num_fragments", 1 <= self.num_fragments <= self.inner_steps, f"1 to inner_steps ({self.inner_steps})"),
            (
                "overlap_steps",
                0 <= self.overlap_steps < spacing,
                f"0 to under {spacing} (inner_steps / num_fragments; one round at a time)",
            ),
            ("merge_alpha", 0 <= self.merge_alpha < 1, "0 to under 1"),
            ("round_timeout_s", math.isfinite(self.round_timeout_s) and self.round_timeout_s > 0, "more than 0 s"),
        ):
            if not is_valid:
                raise TrainerUsageError(f"diloco.{field}: expected {expected}, found {getattr(self, field)}")

    def planned_steps(self, round_index: int) -> int:
        """Returns the inner steps planned from the fragment's round before this one, or the beginning, to this one."""
        return sum(self.steps_before(fragment) for fragment in range(min(round_index + 1, self.num_fragments)))

    def steps_before(self, fragment: int) -> int:
        """Returns the inner steps from the previous synchronisation to that of ``fragment``."""
        before = fragment * self.inner_steps // self.num_fragments
        return (fragment + 1) * self.inner_steps // self.num_fragments - before
