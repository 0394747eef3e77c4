"""Options of averaged gradients; the defaults are spec P-36 (state averaged every 5 steps, 5 % of it)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import TrainerUsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class GradConfig:
    """When gradients are averaged, and what keeps replicas from drifting apart.

    Rounds follow each other in one order at all members: ``average_state_every`` of gradients, one of a slice.
    """

    target_tokens: int = 0
    """Tokens, over all nodes, whose gradients make one step of a whole model; 0: eight micro-batches' worth. That of a
    stage is ``swarm.stage.target_tokens``."""
    delayed: bool = False
    """Micro-batches are computed with the old weights while a round runs, and count towards the next step: weights are
    one step old for a part of each batch, and no worker stands still."""
    average_state_every: int = 5
    """Steps from one average of a slice of the parameters to the next; 0: they are never averaged."""
    num_slices: int = 20
    """Such averages in which each parameter is averaged once."""
    ahead_s: float = 1.0
    """So long before the target is reached, by the speed measured, members begin to agree on the round; 0: then."""
    max_weight_ratio: float = 16.0
    """Limit of a member's tokens in the average, as a multiple of the median member's."""

    def __post_init__(self) -> None:
        for field, is_valid, expected in (
            ("target_tokens", self.target_tokens >= 0, "0 (eight micro-batches) or more"),
            ("average_state_every", self.average_state_every >= 0, "0 (never) or more"),
            ("num_slices", self.num_slices >= 1, "1 or more"),
            ("ahead_s", math.isfinite(self.ahead_s) and self.ahead_s >= 0, "seconds, 0 or more"),
            ("max_weight_ratio", 1 <= self.max_weight_ratio < math.inf, "1 or more"),
        ):
            if not is_valid:
                raise TrainerUsageError(f"grad.{field}: expected {expected}, found {getattr(self, field)}")

    def averages_state(self, round_index: int) -> bool:
        """Returns whether a round averages a slice of the parameters, not gradients."""
        every = self.average_state_every
        return every > 0 and round_index % (every + 1) == every

    def slice_number(self, round_index: int) -> int:
        """Returns how many slices were averaged before a round."""
        return round_index // (self.average_state_every + 1) if self.average_state_every else 0
