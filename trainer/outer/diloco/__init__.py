"""DiLoCo: many inner steps on each node, then one outer step all nodes agree on; 500 times less to send."""

from __future__ import annotations

from trainer.outer.diloco.config import DiLoCoConfig
from trainer.outer.diloco.flat import FlatLayout, FragmentPlan, synchronised_parameters
from trainer.outer.diloco.outer import OuterOptimizer
from trainer.outer.diloco.state import SharedState
from trainer.outer.diloco.trainer import DiLoCoTrainer

__all__ = [
    "DiLoCoConfig",
    "DiLoCoTrainer",
    "FlatLayout",
    "FragmentPlan",
    "OuterOptimizer",
    "SharedState",
    "synchronised_parameters",
]
