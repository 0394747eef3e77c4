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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
