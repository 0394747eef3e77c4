"""The options of a round, with their units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.errors import TrainerUsageError

__all__ = ["CollectiveConfig", "Compression"]

Compression = Literal["fp32", "fp16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConfig:
    """How nodes come together for a round, and how long they wait for each other.

    Raises:
        TrainerUsageError: a value makes no sense.
    """

    compression: Compression = "fp32"
    """How pseudo-gradients and results travel: fp32, fp16, or int8 in blocks with error feedback."""
    min_members: int = 1
    """Fewer than this and the round fails; training goes on, and the pseudo-gradient waits for the next round."""
    invite_after_s: float = 10.0
    """So long after the first node is ready, the others are asked to come with what they have."""
    gather_timeout_s: float = 60.0
    """So long after the first node is ready, the round begins without whoever is missing."""
    stall_timeout_s: float = 10.0
    """A peer that is silent for so long is taken for dead, in this round."""
    round_timeout_s: float = 1800.0
    """A round that takes longer has failed."""
    max_passes: int = 4
    """How often slices are reduced: once, and again for what was lost with a reducer."""
    max_weight_ratio: float = 3.0
    """No member counts for more than so many times the median member."""
    part_bytes: int = 1 << 20
    """Size of the pieces that slices travel in."""

    def __post_init__(self) -> None:
        if self.min_members < 1:
            raise TrainerUsageError(f"collective.min_members: expected 1 or more, found {self.min_members}")
        if self.max_passes < 1:
            raise TrainerUsageError(f"collective.max_passes: expected 1 or more, found {self.max_passes}")
        if not 0 < self.stall_timeout_s < self.round_timeout_s:
            raise TrainerUsageError(
                "collective.stall_timeout_s: expected more than 0 and less than round_timeout_s, found "
                f"{self.stall_timeout_s} and {self.round_timeout_s}"
            )
        if not 0 <= self.invite_after_s <= self.gather_timeout_s < self.round_timeout_s:
            raise TrainerUsageError(
                "collective: expected 0 <= invite_after_s <= gather_timeout_s < round_timeout_s, found "
                f"{self.invite_after_s}, {self.gather_timeout_s} and {self.round_timeout_s}"
            )
        if self.max_weight_ratio < 1:
            raise TrainerUsageError(f"collective.max_weight_ratio: expected 1 or more, found {self.max_weight_ratio}")
        if not 4096 <= self.part_bytes <= 1 << 20:
            raise TrainerUsageError(
                f"collective.part_bytes: expected 4096 to {1 << 20}, the most a message carries, found "
                f"{self.part_bytes}"
            )
