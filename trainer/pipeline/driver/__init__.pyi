"""What `trainer.pipeline.driver` offers, by module; a name's module is imported when the name is first used."""

from .balancer import Balancer as Balancer
from .balancer import Reservation as Reservation
from .balancer import WorkerLoad as WorkerLoad
from .config import DriverConfig as DriverConfig
from .config import Routing as Routing
from .driver import PipelineDriver as PipelineDriver
from .failure_detector import Bans as Bans
from .results import DriverStatus as DriverStatus
from .results import Fate as Fate
from .results import HopTime as HopTime
from .results import MicroBatchOutcome as MicroBatchOutcome
from .results import MicroBatchResult as MicroBatchResult
from .results import StageStatus as StageStatus
from .stage_caller import LinkForm as LinkForm
from .steps import StepLoss as StepLoss
from .workers import StageDirectory as StageDirectory
from .workers import StageWorker as StageWorker
from .workers import workers_in as workers_in
