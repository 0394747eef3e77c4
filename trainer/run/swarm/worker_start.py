"""From a run file to a worker that serves: which stage it takes, with which state it begins."""

from __future__ import annotations

import logging
import time

import torch

from trainer.checkpoint.stages import parse_time, roll_back, time_us
from trainer.errors import TrainerUsageError
from trainer.model.config import stage_names
from trainer.run.config import RunConfig
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.building import build_stage_site
from trainer.run.swarm.choosing import choose_stage
from trainer.run.swarm.keeper import check_keeper
from trainer.run.swarm.shape import SwarmShape, shape_of
from trainer.run.swarm.startup import beginning, only_process
from trainer.run.swarm.worker_node import WorkerNode

__all__ = ["run_worker"]

logger = logging.getLogger(__name__)

_AUTO = "auto"


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
    if stage not in (_AUTO, *names):  # Said before the store is asked.
        raise TrainerUsageError(f"--stage: expected {_AUTO} or one of {', '.join(names)}, found {stage!r}")
    if config.threads:
        torch.set_num_threads(config.threads)
    check_keeper(config)
    with only_process(config), stop.on_signals():
        shape = shape_of(config)
        name = choose_stage(config, shape, stop) if stage == _AUTO else stage
        with beginning():
            if at:
                _roll_back(config, shape, name, at)
            built = build_stage_site(config, shape, name)
        WorkerNode(config, shape, built, stop).run()


def _roll_back(config: RunConfig, shape: SwarmShape, stage: str, at: str) -> None:
    now_us = time_us(time.time())
    done = roll_back(
        config.swarm.checkpoint.directory,
        config.run_id,
        parse_time(at, now_us),
        now_us,
        plan=shape.plan,
        stages=(stage,),
        in_use=True,  # By others of this stage, if there are any: what they know, this one takes up later.
    )
    logger.info("%d newer checkpoints of %s are set aside in %s", len(done.moved), stage, done.folder)
