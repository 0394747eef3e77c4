"""How much training waits in each fragment for a committed round: what a contribution's weight is made of."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Progress"]


@dataclass(slots=True)
class Progress:
    """Batches trained on since a fragment's last committed round.

    Wall-clock time, because it must mean something after a restart; a clock that was set back counts as no age.

    Args:
        num_batches: so many.
        since_s: Unix time of the oldest of them; 0 while there is none.
    """

    num_batches: int = 0
    since_s: float = 0.0

    def add(self, num_batches: int) -> None:
        """Count batches of the step just done."""
        if num_batches and not self.num_batches:
            self.since_s = time.time()
        self.num_batches += num_batches

    def age_s(self) -> float:
        """Seconds since the oldest batch."""
        return max(0.0, time.time() - self.since_s) if self.num_batches else 0.0

    def settle(self, num_batches: int) -> None:
        """Take off the batches of a committed round; those left are younger than the round, and count from now."""
        self.num_batches = max(0, self.num_batches - num_batches)
        self.since_s = time.time() if self.num_batches else 0.0
