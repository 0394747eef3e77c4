"""What `trainer.outer.sparta` offers, by module; a name's module is imported when the name is first used."""

from .config import SpartaConfig as SpartaConfig
from .rounds import NOBODY as NOBODY
from .rounds import OtherRounds as OtherRounds
from .rounds import choose_recent_state as choose_recent_state
from .rounds import frontier_of as frontier_of
from .state import SpartaFit as SpartaFit
from .trainer import SpartaTrainer as SpartaTrainer
