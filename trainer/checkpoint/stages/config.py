"""Options of stage checkpoints; apart from their user, which imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import TrainerUsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StagewiseConfig:
    """Checkpoints of stages by time. Raises `TrainerUsageError`: a value is out of range."""

    directory: str = "~/.neuroshard/checkpoints/swarm"
    """Folder of ``{run_id}/{stage}/{UTC time}-{who}.pt``. To assemble a set that several machines wrote, copy their
    folders into one: names do not collide."""
    interval_s: float = 600.0
    """A stage is written at the first optimizer step after each multiple of this of the wall clock; 0 for never."""
    keep: int = 6
    """Files kept of each worker, none older than the stage's newest so many intervals; one has 12 bytes a parameter."""
    begin_anew: bool = False
    """Lets a stage without checkpoint and worker begin with first weights, though other stages have checkpoints."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval_s) and (self.interval_s == 0 or self.interval_s >= 1)):
            raise TrainerUsageError(f"interval_s: expected 0 or at least 1 second, found {self.interval_s}")
        if self.keep < 1:
            raise TrainerUsageError(f"keep: expected 1 or more, found {self.keep}")
        if not self.directory:
            raise TrainerUsageError("directory: expected a folder, found none")
