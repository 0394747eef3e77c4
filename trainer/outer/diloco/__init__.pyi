"""What `trainer.outer.diloco` offers, by module; a name's module is imported when the name is first used."""

from .config import DiLoCoConfig as DiLoCoConfig
from .flat import FlatLayout as FlatLayout
from .flat import FragmentPlan as FragmentPlan
from .flat import synchronised_parameters as synchronised_parameters
from .outer import OuterOptimizer as OuterOptimizer
from .state import SharedState as SharedState
from .trainer import DiLoCoTrainer as DiLoCoTrainer
