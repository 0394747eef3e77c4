"""One rank of a cluster, under torchrun: process group, names and checkpoints of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.codec import codec_named
from trainer.config import RunConfig
from trainer.engine.collective import Collective
from trainer.engine.local import LocalCollective
from trainer.engine.torch_collective import TorchCollective
from trainer.errors import TrainerUsageError
from trainer.inner import choose_device

__all__ = ["ClusterRank", "cluster_collective", "joined_cluster"]


@dataclass(frozen=True, slots=True)
class ClusterRank:
    """Which of how many."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def instance(self) -> str:
        """Tells apart the ranks' checkpoints."""
        return f"rank-{self.rank}"

    def own(self, config: RunConfig) -> RunConfig:
        """The configuration of this rank: data, log, device and HTTP port of its own."""
        device = f"cuda:{self.local_rank}" if config.device == "auto" and torch.cuda.is_available() else config.device
        port = config.api.port + self.local_rank if config.api.port else 0
        return replace(
            config, node_id=f"{config.node_id}-{self.rank}", device=device, api=replace(config.api, port=port)
        )


@contextmanager
def joined_cluster(config: RunConfig) -> Iterator[ClusterRank | None]:
    """The process group of the torch engine, for as long as the node runs; None with the other engine.

    Raises:
        TrainerUsageError: not started by torchrun, or the group cannot be joined.
    """
    if config.engine != "torch":
        yield None
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise TrainerUsageError(
            f"engine torch: expected to be started by torchrun, found no {', '.join(missing)}; run "
            "`torchrun --nproc-per-node 8 -m trainer --engine torch ...`"
        )
    backend = "nccl" if choose_device(config.device).type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.collective.round_timeout_s)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise TrainerUsageError(f"engine torch: the process group cannot be joined: {error}") from error
    try:
        yield ClusterRank(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    finally:
        dist.destroy_process_group()


def cluster_collective(config: RunConfig) -> Collective:
    """How ranks make their outer steps; under DDP they make none."""
    if config.strategy == "ddp":
        return LocalCollective(config.node_id)
    return TorchCollective.of(codec_named(config.collective.compression), config.rule)
