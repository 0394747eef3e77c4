"""How the nodes of a run find each other: signed announcements that expire, by a DHT or by peer exchange.

    discovery = open_discovery(endpoint, DiscoveryConfig(initial_peers=("10.0.0.5:4100",)))
    await discovery.start()
    await discovery.announce(Announcement(peer_id=..., node_id="gpu-7", run_id="corpus-1", address="10.0.0.7:4100"))
    for other in await discovery.peers(): ...

Guarantees: what is returned was signed by the node it speaks of, for this run, and has not expired; nobody can announce
for another, and what strangers can make this node remember is bounded. The trade-off: there is no authority that says
who belongs to a run, so whoever knows its name can announce himself; who may take part in a round is the collective's
to decide.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.discovery.announcement import (
        Announcement,
        AnnouncementRefusedError,
        sign_announcement,
        verify_announcement,
    )
    from trainer.discovery.config import DiscoveryConfig
    from trainer.discovery.dht import DhtDiscovery
    from trainer.discovery.opening import open_discovery
    from trainer.discovery.partition import StagePartitions
    from trainer.discovery.protocol import Discovery
    from trainer.discovery.seeding import SeedConfig, seed
    from trainer.discovery.static import StaticDiscovery
    from trainer.discovery.uids import settled_uid, workers_of

__all__ = [
    "Announcement",
    "AnnouncementRefusedError",
    "DhtDiscovery",
    "Discovery",
    "DiscoveryConfig",
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

_MODULES = {
    "Announcement": "trainer.discovery.announcement",
    "AnnouncementRefusedError": "trainer.discovery.announcement",
    "DhtDiscovery": "trainer.discovery.dht",
    "Discovery": "trainer.discovery.protocol",
    "DiscoveryConfig": "trainer.discovery.config",
    "SeedConfig": "trainer.discovery.seeding",
    "StagePartitions": "trainer.discovery.partition",
    "StaticDiscovery": "trainer.discovery.static",
    "open_discovery": "trainer.discovery.opening",
    "seed": "trainer.discovery.seeding",
    "settled_uid": "trainer.discovery.uids",
    "sign_announcement": "trainer.discovery.announcement",
    "verify_announcement": "trainer.discovery.announcement",
    "workers_of": "trainer.discovery.uids",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainer.discovery' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
