"""What `trainer.collective` offers, by module; a name's module is imported when the name is first used."""

from .config import CollectiveConfig as CollectiveConfig
from .config import Compression as Compression
from .directory import Directory as Directory
from .peer_collective import PeerCollective as PeerCollective
from .terms import Terms as Terms
