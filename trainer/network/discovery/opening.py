"""Which kind of discovery the initial peers ask for."""

from __future__ import annotations

from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht import DhtDiscovery
from trainer.network.discovery.partition import StagePartitions
from trainer.network.discovery.protocol import Discovery
from trainer.network.discovery.static import StaticDiscovery
from trainer.network.rpc.endpoint import Endpoint

__all__ = ["open_discovery"]


def open_discovery(endpoint: Endpoint, config: DiscoveryConfig, stages: tuple[str, ...] = ()) -> Discovery:
    """The DHT if the initial peers are seeds' multiaddresses, else peer exchange; not yet started.

    With no initial peers at all it is peer exchange that waits to be found.

    Args:
        endpoint: this node's.
        config: where to begin, intervals, bounds.
        stages: all of the run's, in order; none where the model is not cut.

    Raises:
        TrainerUsageError: there are more partitions than stages.
    """
    if config.uses_dht:
        partitions = StagePartitions(stages, config.num_partitions) if config.partition_by_stage else StagePartitions()
        return DhtDiscovery(endpoint, config, partitions, keeps_callers=bool(stages))
    return StaticDiscovery(endpoint, config.initial_peers, config, keeps_callers=bool(stages))
