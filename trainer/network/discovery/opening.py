"""Opens the kind of discovery that the initial peers call for, and reports when it finds nobody."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from trainer.network.discovery.base import Discovery
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht import DhtDiscovery
from trainer.network.discovery.stage_report import StagePartitions
from trainer.network.discovery.static import StaticDiscovery
from trainer.network.rpc.endpoint import Endpoint

__all__ = ["PeerWatchdog", "open_discovery"]

logger = logging.getLogger(__name__)

_REPEAT_S = 60.0


def open_discovery(endpoint: Endpoint, config: DiscoveryConfig, stages: tuple[str, ...] = ()) -> Discovery:
    """Opens a DHT if the initial peers are seeds' multiaddresses, else peer exchange; not yet started.

    Without initial peers it is peer exchange that waits to be found.

    Args:
        endpoint: this node's.
        config: initial peers, intervals, bounds.
        stages: all of the run's, in order; none where the model is not cut.

    Raises:
        TrainerUsageError: there are more partitions than stages.
    """
    if config.uses_dht:
        partitions = StagePartitions(stages, config.num_partitions) if config.partition_by_stage else StagePartitions()
        return DhtDiscovery(endpoint, config, partitions, keeps_callers=bool(stages))
    return StaticDiscovery(endpoint, config.initial_peers, config, keeps_callers=bool(stages))


class PeerWatchdog:
    """Logs a warning every minute while no expected peer has been discovered.

    Args:
        discovery: knows which initial peers do not answer.
        whom: the missing peers, for the message.
        after_s: seconds without a peer before the first warning: nodes that start together are not there at once.
        clock: seconds of any clock.
    """

    def __init__(
        self, discovery: Discovery, whom: str, after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._discovery = discovery
        self._whom = whom
        self._after_s = after_s
        self._clock = clock
        self._due_s: float | None = None

    def look(self, num_others: int) -> None:
        """Takes the number of peers known now; to be called every few seconds or more often."""
        now_s = self._clock()
        if num_others or self._due_s is None:
            self._due_s = now_s + self._after_s
        elif now_s >= self._due_s and (reason := self._discovery.no_peers_reason()):
            logger.warning("%s: no %s has been heard of", reason, self._whom)
            self._due_s = now_s + _REPEAT_S
