"""How the nodes of a run find each other: signed announcements that expire, by a DHT or by peer exchange.

    discovery = open_discovery(endpoint, DiscoveryConfig(initial_peers=("10.0.0.5:4100",)))
    await discovery.start()
    await discovery.announce(Announcement(peer_id=..., node_id="gpu-7", run_id="corpus-1", address="10.0.0.7:4100"))
    for other in await discovery.peers(): ...

Guarantees: each returned announcement was signed by the announced node, for this run, and has not expired; nobody can
announce for another, and what strangers can make this node remember is bounded. The trade-off: no authority decides who
belongs to a run, so anybody who knows its name can announce a node; the collective decides who takes part in a round.
"""

from __future__ import annotations

from trainer.network.discovery.announcement import (
    Announcement,
    AnnouncementRefusedError,
    sign_announcement,
    verify_announcement,
)
from trainer.network.discovery.base import Discovery
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht import DhtDiscovery
from trainer.network.discovery.opening import PeerWatchdog, open_discovery
from trainer.network.discovery.seeding import SeedConfig, seed
from trainer.network.discovery.stage_report import StagePartitions, settled_uid, workers_of
from trainer.network.discovery.static import StaticDiscovery

__all__ = [
    "Announcement",
    "AnnouncementRefusedError",
    "DhtDiscovery",
    "Discovery",
    "DiscoveryConfig",
    "PeerWatchdog",
    "SeedConfig",
    "StagePartitions",
    "StaticDiscovery",
    "open_discovery",
    "seed",
    "settled_uid",
    "sign_announcement",
    "verify_announcement",
    "workers_of",
]
