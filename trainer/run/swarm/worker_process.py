"""The process of a worker: which stage it holds, from which checkpoint, and the next one if it is of more use there.

A worker that may choose takes the stage that the run's authority says, else the one of which the workers' announcements
say that it needs help most. One that moves ends as a worker of its stage and begins as one of the other, in the same
process: nothing of the stage before is left in memory.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from contextlib import AsyncExitStack
from typing import Final

import torch

from trainer.checkpoint.stages import parse_time, roll_back, time_us
from trainer.errors import TrainerUsageError
from trainer.model.config import stage_names
from trainer.network.discovery import open_discovery
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint
from trainer.run.config import RunConfig
from trainer.run.node.admission import admission_client, join_reachably, reach_of
from trainer.run.node.identity import identity_of
from trainer.run.node.stopping import StopRequest
from trainer.run.signed import SignedRun
from trainer.run.swarm.building import build_stage_site
from trainer.run.swarm.keeper import check_keeper
from trainer.run.swarm.lifecycle import neediest_stage
from trainer.run.swarm.shape import as_usage_errors, only_process, shape_of
from trainer.run.swarm.worker_node import WorkerNode

logger = logging.getLogger(__name__)

_AUTO: Final = "auto"
_LOOK_S: Final = 0.5
_DHT_START_S: Final = 20.0  # Time for a DHT to start on a busy machine.
_SETTLE_S: Final = 3.0  # After the first peer was discovered, for the rest to be.


def run_worker(config: RunConfig, stage: str, stop: StopRequest, *, at: str = "") -> None:
    """Holds a stage until it is asked to stop; ``auto``: the one that needs help most.

    With ``at``, a time as `trainer.checkpoint.stages.parse_time` reads it, it begins with the checkpoint of then. What
    it could not begin with the next time either is a `TrainerUsageError`.
    """
    if config.strategy not in ("diloco", "sparseloco", "async_sparta", "grad"):
        raise TrainerUsageError(
            f"strategy: expected diloco, sparseloco, async_sparta or grad in a swarm, found {config.strategy}"
        )
    names = stage_names(config.swarm.num_stages)
    if stage not in (_AUTO, *names):  # Before the store is asked.
        raise TrainerUsageError(f"--stage: expected {_AUTO} or one of {', '.join(names)}, found {stage!r}")
    if config.threads:
        torch.set_num_threads(config.threads)
    check_keeper(config)
    with only_process(config), stop.on_signals():
        shape, may_move = shape_of(config), stage == _AUTO and config.swarm.rebalance.enabled
        if stage == _AUTO:
            stage = asyncio.run(_stage_by_need(config, names, stop))
        with as_usage_errors():
            if at:
                now_us, folder = time_us(time.time()), config.swarm.checkpoint.directory
                # In use by others of this stage, if there are any; this worker takes up their state later.
                until_us = parse_time(at, now_us)
                done = roll_back(folder, config.run_id, until_us, now_us, plan=shape.plan, stages=(stage,), in_use=True)
                logger.info("%d newer checkpoints of %s are set aside in %s", len(done.moved), stage, done.folder)
            built = build_stage_site(config, shape, stage)
        run = SignedRun.open(config)
        node = WorkerNode(config, shape, built, stop, run, may_move=may_move)
        node.run()
        while node.moves_to and not stop():
            stage = node.moves_to
            del node, built  # Before the next stage takes their memory.
            gc.collect()
            built = build_stage_site(config, shape, stage)
            node = WorkerNode(config, shape, built, stop, SignedRun.open(config), may_move=True)
            node.run()


async def _stage_by_need(config: RunConfig, names: tuple[str, ...], stop: StopRequest) -> str:
    """The stage that needs help most: as the run's authority says, or as the workers announce."""
    identity = identity_of(config)
    client = admission_client(config, identity, "worker", _AUTO)
    async with AsyncExitStack() as stack:
        admission, reach = None if client is None else client.admission, reach_of(config, client)
        endpoint = Endpoint(identity, config.run_id, config.rpc, admission, reach)
        if client is not None:
            client.register(endpoint)
        await endpoint.start()
        stack.push_async_callback(endpoint.stop)
        if client is not None:
            assigned = (await join_reachably(client, endpoint, reach, config, stop)).stage
            if assigned in names:
                logger.info("the run's authority has put this worker into %s", assigned)
                return str(assigned)
        reports = await _announced_reports(config, endpoint, stop)
        stage = neediest_stage(names, reports, int(identity.peer_id[:8], 16))
        logger.info("%d workers are there; %s needs help most", len(reports), stage)
        return stage


async def _announced_reports(config: RunConfig, endpoint: Endpoint, stop: StopRequest) -> list[StageReport]:
    """What all workers announce of their stages, after a while for discovery."""
    async with AsyncExitStack() as stack:
        discovery = open_discovery(endpoint, config.discovery_options, stage_names(config.swarm.num_stages))
        await discovery.start()
        stack.push_async_callback(discovery.close)
        ends_s, is_settling = time.monotonic() + config.swarm.join.first_peers_s + _DHT_START_S, False
        while time.monotonic() < ends_s and not stop():
            await asyncio.sleep(_LOOK_S)
            if not is_settling and await discovery.peers():
                ends_s, is_settling = min(ends_s, time.monotonic() + _SETTLE_S), True
        return [said.stage for said in await discovery.peers() if said.stage is not None]
