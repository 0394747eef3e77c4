"""What `trainer.pipeline.driver` offers, by module; a name's module is imported when the name is first used."""

from .config import DriverConfig as DriverConfig
from .driver import PipelineDriver as PipelineDriver
from .results import MicroBatchResult as MicroBatchResult
from .results import StepLoss as StepLoss
from .stage_caller import LinkForm as LinkForm
from .workers import StageWorker as StageWorker
