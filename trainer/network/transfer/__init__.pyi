"""What `trainer.network.transfer` offers, by module; a name's module is imported when the name is first used."""

from .config import StateConfig as StateConfig
from .descriptor import Descriptor as Descriptor
from .descriptor import Expectation as Expectation
from .descriptor import TensorSpec as TensorSpec
from .donor import StateDonor as StateDonor
from .fetch import choose_state as choose_state
from .fetch import fetch_descriptor as fetch_descriptor
from .fetch import fetch_state as fetch_state
from .snapshot import Snapshot as Snapshot
from .snapshot import describe as describe
from .snapshot import load_snapshot as load_snapshot
from .snapshot import snapshots_in as snapshots_in
from .snapshot import write_snapshot as write_snapshot
