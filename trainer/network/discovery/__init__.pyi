"""The public names of `trainer.network.discovery`; each module is imported when a name of it is first used."""

from .announcement import Announcement as Announcement
from .announcement import AnnouncementRefusedError as AnnouncementRefusedError
from .announcement import sign_announcement as sign_announcement
from .announcement import verify_announcement as verify_announcement
from .base import Discovery as Discovery
from .base import PeerWatchdog as PeerWatchdog
from .base import open_discovery as open_discovery
from .config import DiscoveryConfig as DiscoveryConfig
from .dht import DhtDiscovery as DhtDiscovery
from .node_report import NodeReport as NodeReport
from .report_exchange import ReportExchange as ReportExchange
from .seed import SeedConfig as SeedConfig
from .seed import seed as seed
from .stage_report import StagePartitions as StagePartitions
from .stage_report import settled_uid as settled_uid
from .stage_report import workers_of as workers_of
from .static import StaticDiscovery as StaticDiscovery
