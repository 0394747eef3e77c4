"""The ranks of a torchrun job as nodes of one run (the torch engine): who is there, and what they agree on.

Ranks agree on what they have found over a process group of its own (gloo), apart from the one that carries tensors: 8
bytes a rank. A process that belongs to no job is a cluster of one, and agrees with itself without a message.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from trainer.compression.vectors import codec_named
from trainer.errors import TrainerUsageError
from trainer.inner import use_device
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.outer.engine.torch_collective import RankedBytes, TorchCollective
from trainer.outer.engine.torch_sparse import SparseTorchCollective
from trainer.run.config import RunConfig
from trainer.run.node.process_group import join_process_group

_NUMBER = struct.Struct("<q")
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a torchrun job; by default one that belongs to none."""

    rank: int = 0
    local_rank: int = 0
    local_size: int = 1  # Ranks on this machine: they share its memory.
    control: RankedBytes | None = None  # For what the ranks decide; None outside a cluster.

    @property
    def in_cluster(self) -> bool:
        """Whether there are other ranks."""
        return self.control is not None

    @property
    def instance(self) -> str:
        """Distinguishes the ranks' checkpoints."""
        return f"rank-{self.rank}" if self.in_cluster else ""

    def own(self, config: RunConfig) -> RunConfig:
        """Returns the configuration of this rank: data, log and HTTP port of its own."""
        if not self.in_cluster:
            return config
        port = config.api.port + self.local_rank if config.api.port else 0
        return replace(config, node_id=f"{config.node_id}-{self.rank}", api=replace(config.api, port=port))

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values; all have to call it. Raises `PeerUnavailableError` if one is gone."""
        if self.control is None:
            return value
        found = self.control.gather(_NUMBER.pack(value), _NUMBER.size)
        return min(int(_NUMBER.unpack(number)[0]) for number in found)

    def any(self, flag: bool) -> bool:
        """Returns whether a flag is set at any rank; see `least`."""
        return not self.least(not flag)


def num_processes() -> int:
    """Returns how many processes torchrun has started with this one; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def joined_cluster(config: RunConfig) -> Iterator[Ranks]:
    """Joins the process group of the torch engine for as long as the node runs; with the other engine, none."""
    if config.engine != "torch":
        yield Ranks()
        return
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise TrainerUsageError(
            f"engine torch: expected to be started by torchrun, found no {', '.join(missing)}; run "
            "`torchrun --nproc-per-node 8 -m trainer --engine torch ...`"
        )
    device = use_device(config.device)
    timeout = timedelta(seconds=config.collective.round_timeout_s)
    try:
        join_process_group(device, timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise TrainerUsageError(f"engine torch: the process group cannot be joined: {error}") from error
    try:
        yield Ranks(
            rank=dist.get_rank(),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            control=RankedBytes(control),
        )
    finally:
        dist.destroy_process_group()


def cluster_collective(config: RunConfig) -> Collective:
    """Returns how ranks make their outer steps; under DDP they make none."""
    if config.strategy == "ddp":
        return LocalCollective(config.node_id)
    if config.strategy == "sparseloco":
        ratio = config.collective.max_weight_ratio
        return SparseTorchCollective(config.rule, config.sparseloco.averaging, max_weight_ratio=ratio)
    codec = codec_named(config.collective.compression)
    return TorchCollective(codec, config.rule, max_weight_ratio=config.collective.max_weight_ratio)
