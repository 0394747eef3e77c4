"""What `trainer.outer.grad` offers, by module; a name's module is imported when the name is first used."""

from .averaging import GradientSource as GradientSource
from .averaging import GradientSum as GradientSum
from .averaging import Packing as Packing
from .config import GradConfig as GradConfig
from .state import GradFit as GradFit
from .state import GradState as GradState
from .timing import Progress as Progress
from .trainer import GradOutcome as GradOutcome
from .trainer import GradStep as GradStep
from .trainer import GradTrainer as GradTrainer
