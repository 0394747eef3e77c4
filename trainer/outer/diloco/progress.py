"""How much training waits in each fragment for a committed round: what a contribution's weight and progress are."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["FragmentProgress"]


@dataclass(slots=True)
class FragmentProgress:
    """Batches trained on since a fragment's last committed round.

    Wall-clock time, because it must mean something after a restart; a clock that was set back counts as no age.

    Args:
        num_batches: so many.
        since_s: Unix time of the oldest of them; 0 while there is none.
        num_steps: inner steps that they took, those included that changed nothing.
    """

    num_batches: int = 0
    since_s: float = 0.0
    num_steps: int = 0

    def add(self, num_batches: int) -> None:
        """Count batches of the step just done."""
        if num_batches and not self.num_batches:
            self.since_s = time.time()
        self.num_batches += num_batches
        self.num_steps += 1

    def age_s(self) -> float:
        """Seconds since the oldest batch."""
        return max(0.0, time.time() - self.since_s) if self.num_batches else 0.0

    def share_of(self, planned_steps: int) -> float:
        """How much of the work that a round was meant to have is there, 0 to 1."""
        return min(1.0, self.num_steps / planned_steps)

    def settle(self, num_batches: int, steps_since: int) -> None:
        """Take off the work of a committed round; what is left is younger than the round, and counts from now.

        Args:
            num_batches: that were in the round.
            steps_since: inner steps since they were read.
        """
        self.num_steps = steps_since
        self.num_batches = max(0, self.num_batches - num_batches)
        self.since_s = time.time() if self.num_batches else 0.0
