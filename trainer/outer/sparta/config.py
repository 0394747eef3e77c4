"""Options of SPARTA; the defaults are spec P-33 (20 steps, 5 %) and P-40 (staleness 5)."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import TrainerUsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SpartaConfig:
    """How often a slice is averaged, how large it is, and how far a node may fall behind."""

    every_steps: int = 20
    """Optimizer steps from one round to the next."""
    num_slices: int = 20
    """Rounds in which each parameter is averaged once; a round averages 1 / num_slices of them."""
    background: bool = True
    """Steps go on while a round runs; False: training waits for it."""
    ghost_rounds: int = 5
    """Committed rounds in which a joiner takes the average but counts for nothing in it."""
    max_staleness_rounds: int = 5
    """Rounds the others may have made without this node; beyond, it has to take up their state."""
    max_failed_rounds: int = 2
    """Rounds failed in a row, while the others went on, after which the node is to rejoin."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "num_slices", "ghost_rounds", "max_staleness_rounds", "max_failed_rounds"):
            least = 0 if name == "ghost_rounds" else 1
            if getattr(self, name) < least:
                raise TrainerUsageError(f"sparta.{name}: expected {least} or more, found {getattr(self, name)}")
