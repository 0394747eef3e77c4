"""`SubspaceConfig`: how narrow the links between stages are, and what error on them is an alarm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SubspaceConfig:
    """Options of subspace networks. Raises `TrainerUsageError`: a value is out of range."""

    rank: int = 0
    """Values a position has on a link instead of the model's width; 0: an ordinary model."""
    seed: int = 0
    """Of the basis and the fixed embedding; the same at all nodes of a run."""
    max_error: float = 0.01
    """Relative error of what a link's far end makes of an activation, beyond the codec's rounding, above which an
    alarm is raised. Products in bf16 leave some 2e-3; one AdamW step (1e-3) without projection 4e-2 and more."""

    def __post_init__(self) -> None:
        for name in ("rank", "seed"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise TrainerUsageError(f"subspace.{name}: expected a whole number of at least 0, found {value!r}")
        if not (math.isfinite(self.max_error) and self.max_error > 0):
            raise TrainerUsageError(f"subspace.max_error: expected a number above 0, found {self.max_error}")

    def applied_to(self, config: ModelConfig, free_layers: int) -> ModelConfig:
        """Returns the shape of a subspace network, whose last ``free_layers`` lie behind the last stage boundary.

        Raises `TrainerUsageError`: the rank does not suit the model.
        """
        if self.rank == 0:
            return config
        return replace(config, subspace_rank=self.rank, subspace_seed=self.seed, subspace_free_layers=free_layers)
