"""From a run file to a worker that serves: which stage it holds, and the state it begins with."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable

import torch

from trainer.checkpoint.stages import parse_time, roll_back, time_us
from trainer.errors import TrainerUsageError
from trainer.model.config import stage_names
from trainer.model.plan import StagePlan
from trainer.network.discovery import open_discovery
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint
from trainer.run.config import RunConfig
from trainer.run.node.identity import identity_of
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.building import build_stage_site
from trainer.run.swarm.keeper import check_keeper
from trainer.run.swarm.shape import SwarmShape, shape_of, stage_of
from trainer.run.swarm.startup import as_usage_errors, only_process
from trainer.run.swarm.worker_node import WorkerNode

__all__ = ["neediest_stage", "run_worker"]

logger = logging.getLogger(__name__)

_AUTO = "auto"
_LOOK_S = 0.5
_DHT_START_S = 20.0
"""Time for a DHT to start on a busy machine."""
_SETTLE_S = 3.0
"""After the first peer was discovered, for the rest to be."""


def run_worker(config: RunConfig, stage: str, stop: StopRequest, *, at: str = "") -> None:
    """Holds a stage until it is asked to stop.

    Args:
        config: of the run.
        stage: which; ``auto``: the one that needs help most.
        stop: asks it to.
        at: a time, as `trainer.checkpoint.stages.parse_time` reads it: begin with the stage's checkpoint of then.

    Raises:
        TrainerUsageError: it cannot begin with what it was given, and could not the next time either.
        TrainerError: it cannot begin, or not go on.
        LoaderError: the store's vocabulary cannot be read.
    """
    if config.strategy not in ("diloco", "async_sparta"):
        raise TrainerUsageError(f"strategy: expected diloco or async_sparta in a swarm, found {config.strategy}")
    names = stage_names(config.swarm.num_stages)
    if stage not in (_AUTO, *names):  # Before the store is asked.
        raise TrainerUsageError(f"--stage: expected {_AUTO} or one of {', '.join(names)}, found {stage!r}")
    if config.threads:
        torch.set_num_threads(config.threads)
    check_keeper(config)
    with only_process(config), stop.on_signals():
        shape = shape_of(config)
        name = _choose_stage(config, shape, stop) if stage == _AUTO else stage
        with as_usage_errors():
            if at:
                _roll_back(config, shape, name, at)
            built = build_stage_site(config, shape, name)
        WorkerNode(config, shape, built, stop).run()


def neediest_stage(plan: StagePlan, reports: Iterable[StageReport], own_number: int = 0) -> str:
    """The stage a newcomer helps most: one without workers, else the one with the lowest rate.

    A stage's rate is the sum of its workers' rates; a worker that reports none yet counts as the slowest that does. Of
    equally needy stages ``own_number`` picks one, so that newcomers that come together spread. Two that choose at the
    same moment may choose the same stage; the next one makes up for it.

    Args:
        plan: of the run.
        reports: of its workers, joining ones included: they are on their way to help.
        own_number: any number of the newcomer's own.
    """
    by_stage: dict[str, list[float]] = {name: [] for name in plan.names}
    for report in reports:
        stage = stage_of(report)
        if report.status != "leaving" and stage in by_stage:
            by_stage[stage].append(report.rows_per_s)
    neediest = [name for name, rates in by_stage.items() if not rates]
    if not neediest:
        slowest = min((rate for rates in by_stage.values() for rate in rates if rate > 0), default=1.0)
        totals = {name: sum(rate or slowest for rate in rates) for name, rates in by_stage.items()}
        least = min(totals.values())
        neediest = [name for name, total in totals.items() if total <= least * (1 + 1e-9)]
    return neediest[own_number % len(neediest)]


def _choose_stage(config: RunConfig, shape: SwarmShape, stop: StopRequest) -> str:
    reports = asyncio.run(_announced_reports(config, shape, stop))
    own_number = int(identity_of(config).peer_id[:8], 16)
    chosen = neediest_stage(shape.plan, reports, own_number)
    logger.info("%d workers are there; %s needs help most", len(reports), chosen)
    return chosen


async def _announced_reports(config: RunConfig, shape: SwarmShape, stop: StopRequest) -> list[StageReport]:
    """What all workers announce of their stages, after a while for discovery."""
    endpoint = Endpoint(identity_of(config), config.run_id, config.rpc)
    discovery = open_discovery(endpoint, config.discovery, shape.plan.names)
    await endpoint.start()
    await discovery.start()
    try:
        deadline_s = time.monotonic() + config.swarm.join.first_peers_s + _DHT_START_S
        settled_s = math.inf
        while time.monotonic() < min(deadline_s, settled_s) and not stop():
            await asyncio.sleep(_LOOK_S)
            if settled_s == math.inf and await discovery.peers():
                settled_s = time.monotonic() + _SETTLE_S
        return [said.stage for said in await discovery.peers() if said.stage is not None]
    finally:
        await discovery.close()
        await endpoint.stop()


def _roll_back(config: RunConfig, shape: SwarmShape, stage: str, at: str) -> None:
    now_us = time_us(time.time())
    done = roll_back(
        config.swarm.checkpoint.directory,
        config.run_id,
        parse_time(at, now_us),
        now_us,
        plan=shape.plan,
        stages=(stage,),
        in_use=True,  # By others of this stage, if there are any; this worker takes up their state later.
    )
    logger.info("%d newer checkpoints of %s are set aside in %s", len(done.moved), stage, done.folder)
