"""What `trainer.pipeline.worker` offers, by module; a name's module is imported when the name is first used."""

from .config import WorkerConfig as WorkerConfig
from .replies import ReplyCache as ReplyCache
from .runtime import Runtime as Runtime
from .service import StageService as StageService
from .service import StageWorker as StageWorker
from .stepping import StageStepper as StageStepper
