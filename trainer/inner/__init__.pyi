"""What `trainer.inner` offers, by module; a name's module is imported when the name is first used."""

from .config import InnerConfig as InnerConfig
from .config import batch_size_for as batch_size_for
from .loop import Batch as Batch
from .loop import InnerLoop as InnerLoop
from .loop import NonFiniteGuard as NonFiniteGuard
from .loop import StepResult as StepResult
from .loop import make_optimizer as make_optimizer
from .loop import parameter_groups as parameter_groups
from .machine import autocast_for as autocast_for
from .machine import choose_device as choose_device
from .machine import compiled as compiled
from .machine import rng_state as rng_state
from .machine import set_rng_state as set_rng_state
from .machine import undisturbed_rng as undisturbed_rng
from .machine import use_device as use_device
from .schedule import lr_at as lr_at
