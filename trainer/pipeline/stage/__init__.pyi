"""What `trainer.pipeline.stage` offers, by module; a name's module is imported when the name is first used."""

from .config import StageConfig as StageConfig
from .interface import Accumulated as Accumulated
from .interface import BackwardResult as BackwardResult
from .interface import StageKind as StageKind
from .interface import StageShape as StageShape
from .interface import StepInfo as StepInfo
from .interface import TailResult as TailResult
from .replica import StageReplica as StageReplica
