"""What `trainer.network.relay` offers, by module; a name's module is imported when the name is first used."""

from .config import RelayConfig as RelayConfig
from .reach import RelayedReach as RelayedReach
from .server import Relay as Relay
