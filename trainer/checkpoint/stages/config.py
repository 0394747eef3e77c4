"""When a stage's state is written, where, and how long it is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import TrainerUsageError

__all__ = ["StagewiseConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagewiseConfig:
    """Checkpoints of stages by time.

    Raises:
        TrainerUsageError: a value is out of range.
    """

    directory: str = "~/.neuroshard/checkpoints/swarm"
    """Folder; files are ``{run_id}/{stage}/{UTC time}-{who}.pt`` in it. To put a set together that several machines
    wrote, copy their folders into one: names do not collide."""
    interval_s: float = 600.0
    """A stage is written at the first optimizer step behind each multiple of this of the wall clock, the same multiples
    on all machines; 0: never."""
    keep: int = 6
    """How many files of each worker are kept, none older than the newest so many intervals of its stage; a stage's file
    has 12 bytes a parameter."""
    begin_anew: bool = False
    """A stage of which there is no checkpoint and no worker begins with first weights, though others have saved what
    they have learned."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval_s) and (self.interval_s == 0 or self.interval_s >= 1)):
            raise TrainerUsageError(f"interval_s: expected 0 or at least 1 second, found {self.interval_s}")
        if self.keep < 1:
            raise TrainerUsageError(f"keep: expected 1 or more, found {self.keep}")
        if not self.directory:
            raise TrainerUsageError("directory: expected a folder, found none")
