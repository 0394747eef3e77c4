"""What `trainer.checkpoint.stages` offers, by module; a name's module is imported when the name is first used."""

from .config import StagewiseConfig as StagewiseConfig
from .contents import RunShape as RunShape
from .contents import StageHeader as StageHeader
from .contents import StageState as StageState
from .contents import read_stage as read_stage
from .huggingface import fingerprint as fingerprint
from .initial import load_initial_state as load_initial_state
from .naming import format_time_us as format_time_us
from .naming import parse_time as parse_time
from .naming import time_us as time_us
from .sets import RollBack as RollBack
from .sets import StageFile as StageFile
from .sets import StageSet as StageSet
from .sets import WholeModel as WholeModel
from .sets import assemble as assemble
from .sets import newest_set as newest_set
from .sets import roll_back as roll_back
from .torchtitan import export_torchtitan as export_torchtitan
from .writer import StageCheckpoints as StageCheckpoints
