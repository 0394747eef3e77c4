"""What `trainer.monitor` offers, by module; a name's module is imported when the name is first used."""

from .app import ShutdownHook as ShutdownHook
from .app import create_app as create_app
from .config import ApiConfig as ApiConfig
from .event_log import EventLog as EventLog
from .events import Event as Event
from .events import read_events as read_events
from .facts import AnnouncedNode as AnnouncedNode
from .facts import RoundFacts as RoundFacts
from .facts import StepFacts as StepFacts
from .metrics import MeteredIterator as MeteredIterator
from .metrics import Observer as Observer
from .metrics import TrainingMetrics as TrainingMetrics
from .pipeline import LostShare as LostShare
from .pipeline import PerishedShare as PerishedShare
from .pipeline import PipelineView as PipelineView
from .pipeline import StageStatus as StageStatus
from .pipeline import SwarmAccount as SwarmAccount
from .pipeline import SwarmStages as SwarmStages
from .pipeline import TallyStatus as TallyStatus
from .pipeline import WorkerStatus as WorkerStatus
from .plot import plot as plot
from .server import ApiServer as ApiServer
from .status import TrainingStatus as TrainingStatus
from .tracker import TrainingTracker as TrainingTracker
