"""DiLoCo: many inner steps on each node, then one outer step all nodes agree on.

``trainer.py`` holds the transaction (prepare, collective, commit) and its guarantees; ``outer.py`` the arithmetic of
the outer step; ``flat.py`` and ``fragments.py`` say which value of a vector belongs to which parameter; ``state.py`` is
what members share, ``saved.py`` its form in a checkpoint. Against every-step averaging this sends inner_steps times
less: 500 times.
"""

from __future__ import annotations

from trainer.outer.diloco.config import DiLoCoConfig
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.diloco.fragments import FragmentPlan, synchronised_parameters
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
