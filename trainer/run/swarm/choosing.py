"""``--stage auto``: looks at who is there before a stage is built, and takes the one that needs help most."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from trainer.network.discovery import open_discovery
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint
from trainer.run.config import RunConfig
from trainer.run.node.identity import identity_of
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.joining import neediest_stage
from trainer.run.swarm.shape import SwarmShape

__all__ = ["choose_stage"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_BEGIN_S = 20.0
"""What a DHT may take to begin, on a busy machine."""
_SETTLE_S = 3.0
"""Behind the first of the others, for the rest of them to be heard of."""


def choose_stage(config: RunConfig, shape: SwarmShape, stop: StopRequest) -> str:
    """The stage to take, by what the others announce.

    Two that choose at the same moment may choose the same; the next one makes up for it.
    """
    reports = asyncio.run(_reports(config, shape, stop))
    own_number = int(identity_of(config).peer_id[:8], 16)
    chosen = neediest_stage(shape.plan, reports, own_number)
    logger.info("%d workers are there; %s needs help most", len(reports), chosen)
    return chosen


async def _reports(config: RunConfig, shape: SwarmShape, stop: StopRequest) -> list[StageReport]:
    """What all workers say of their stages, once there has been time to hear it."""
    endpoint = Endpoint(identity_of(config), config.run_id, config.rpc)
    discovery = open_discovery(endpoint, config.discovery, shape.plan.names)
    await endpoint.start()
    await discovery.start()
    try:
        deadline_s = time.monotonic() + config.swarm.join.first_peers_s + _BEGIN_S
        settled_s = math.inf
        while time.monotonic() < min(deadline_s, settled_s) and not stop():
            await asyncio.sleep(_LOOK_S)
            if settled_s == math.inf and await discovery.peers():
                settled_s = time.monotonic() + _SETTLE_S
        return [said.stage for said in await discovery.peers() if said.stage is not None]
    finally:
        await discovery.close()
        await endpoint.stop()
