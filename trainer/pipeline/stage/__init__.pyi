"""What `trainer.pipeline.stage` offers, by module; a name's module is imported when the name is first used."""

from .checking import StageShape as StageShape
from .config import StageConfig as StageConfig
from .replica import StageReplica as StageReplica
from .results import Accumulated as Accumulated
from .results import BackwardResult as BackwardResult
from .results import LossSum as LossSum
from .results import StageKind as StageKind
from .results import StepInfo as StepInfo
from .results import TailResult as TailResult
