"""Which kind of discovery the initial peers ask for."""

from __future__ import annotations

from trainer.discovery.config import DiscoveryConfig
from trainer.discovery.dht import DhtDiscovery
from trainer.discovery.protocol import Discovery
from trainer.discovery.static import StaticDiscovery
from trainer.rpc.endpoint import Endpoint

__all__ = ["open_discovery"]


def open_discovery(endpoint: Endpoint, config: DiscoveryConfig) -> Discovery:
    """The DHT if the initial peers are seeds' multiaddresses, else peer exchange; not yet started.

    With no initial peers at all it is peer exchange that waits to be found.
    """
    if config.uses_dht:
        return DhtDiscovery(endpoint.identity, endpoint.run_id, config)
    return StaticDiscovery(endpoint, config.initial_peers, config)
