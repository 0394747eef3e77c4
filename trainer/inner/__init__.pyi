"""What `trainer.inner` offers, by module; a name's module is imported when the name is first used."""

from .config import InnerConfig as InnerConfig
from .config import batch_size_for as batch_size_for
from .loop import Batch as Batch
from .loop import InnerLoop as InnerLoop
from .loop import NonFiniteGuard as NonFiniteGuard
from .loop import StepResult as StepResult
from .optimizer import lr_at as lr_at
from .optimizer import make_optimizer as make_optimizer
from .optimizer import parameter_groups as parameter_groups
from .precision import autocast_for as autocast_for
from .precision import choose_device as choose_device
from .precision import compiled as compiled
from .random_state import rng_state as rng_state
from .random_state import set_rng_state as set_rng_state
