"""What `trainer.monitor` offers, by module; a name's module is imported when the name is first used."""

from .app import ShutdownHook as ShutdownHook
from .app import create_app as create_app
from .config import ApiConfig as ApiConfig
from .event_log import Event as Event
from .event_log import EventLog as EventLog
from .event_log import read_events as read_events
from .facts import AnnouncedNode as AnnouncedNode
from .facts import RoundFacts as RoundFacts
from .facts import StepFacts as StepFacts
from .metrics import MeteredIterator as MeteredIterator
from .metrics import Observer as Observer
from .metrics import TrainingMetrics as TrainingMetrics
from .plot import plot as plot
from .server import ApiServer as ApiServer
from .speed import Peak as Peak
from .speed import SpeedMeter as SpeedMeter
from .status import LostShare as LostShare
from .status import PerishedShare as PerishedShare
from .status import PipelineView as PipelineView
from .status import StageStatus as StageStatus
from .status import SwarmAccount as SwarmAccount
from .status import SwarmStages as SwarmStages
from .status import TallyStatus as TallyStatus
from .status import TrainingStatus as TrainingStatus
from .status import WorkerStatus as WorkerStatus
from .tracker import TrainingTracker as TrainingTracker
