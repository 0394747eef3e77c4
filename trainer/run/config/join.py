"""`JoinConfig`: how workers of a stage come and go (spec P-40, P-41, P-43)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import TrainerUsageError

__all__ = ["JoinConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """How workers come and go.

    Raises:
        TrainerUsageError: a value is out of range.
    """

    window: float = 0.1
    """Share of a round, from its beginning, in which a newcomer may take up the stage's state (spec P-43)."""
    max_rounds_behind: int = 5
    """A newcomer that is further behind when it has the state fetches a newer one (spec P-43)."""
    max_failed_rounds: int = 2
    """Rounds failed in a row, while the others went on, after which a worker takes up their state (spec P-41)."""
    idle_s: float = 20.0
    """A stage whose round has not moved for so long has nobody to wait for."""
    first_peers_s: float = 6.0
    """How long a worker looks for others of its stage before it takes itself for the first."""
    leave_s: float = 30.0
    """How long a worker that is asked to stop may take to finish what it has been given and hand over."""

    def __post_init__(self) -> None:
        if not 0 < self.window <= 1:
            raise TrainerUsageError(f"swarm.join.window: expected more than 0 and at most 1, found {self.window}")
        for name in ("max_rounds_behind", "max_failed_rounds"):
            if getattr(self, name) < 1:
                raise TrainerUsageError(f"swarm.join.{name}: expected 1 or more, found {getattr(self, name)}")
        for name in ("idle_s", "first_peers_s", "leave_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TrainerUsageError(f"swarm.join.{name}: expected seconds, 0 or more, found {value}")
