"""Which stage a newcomer is put in: the one with the fewest workers that are there now.

Workers of unknown speed count alike. The trade-off: a stage of few fast workers gets help before one of many slow ones;
moving running workers by their measured speed mends that later. A newcomer's key decides between equals, so that any
authority on the same records decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.network.rpc.messages import PeerId


def stage_by_need(stages: Sequence[str], replicas: Mapping[str, int], peer_id: PeerId) -> str:
    """Returns the stage that needs a worker most.

    Args:
        stages: all of the run's, in order; at least one.
        replicas: number of workers by stage; a stage that is missing has none.
        peer_id: the newcomer's.
    """
    fewest = min(replicas.get(stage, 0) for stage in stages)
    neediest = [stage for stage in stages if replicas.get(stage, 0) == fewest]
    return neediest[int(peer_id[:8], 16) % len(neediest)]
