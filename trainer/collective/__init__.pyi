"""What `trainer.collective` offers, by module; a name's module is imported when the name is first used."""

from .config import CollectiveConfig as CollectiveConfig
from .config import Directory as Directory
from .messages import Terms as Terms
from .peer_collective import PeerCollective as PeerCollective
