"""What `trainer.network.discovery` offers, by module; a name's module is imported when the name is first used."""

from .announcement import Announcement as Announcement
from .announcement import AnnouncementRefusedError as AnnouncementRefusedError
from .announcement import sign_announcement as sign_announcement
from .announcement import verify_announcement as verify_announcement
from .config import DiscoveryConfig as DiscoveryConfig
from .dht import DhtDiscovery as DhtDiscovery
from .opening import PeerWatchdog as PeerWatchdog
from .opening import open_discovery as open_discovery
from .partition import StagePartitions as StagePartitions
from .protocol import Discovery as Discovery
from .seeding import SeedConfig as SeedConfig
from .seeding import seed as seed
from .static import StaticDiscovery as StaticDiscovery
from .uids import settled_uid as settled_uid
from .uids import workers_of as workers_of
