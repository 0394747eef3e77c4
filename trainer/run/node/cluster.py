"""One rank of a cluster, under torchrun: the process group, and what its ranks have to decide alike.

Memory, the store's newest vocabulary and the checkpoints that survived may differ between ranks. What they decide is
agreed first, as the least of what the ranks found, over a process group of its own (gloo): the exchange must not meet
the tensors of a round in the background.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.compression.vectors import codec_named
from trainer.errors import TrainerUsageError
from trainer.inner import choose_device
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.outer.engine.process_group import RankedBytes
from trainer.outer.engine.torch_collective import TorchCollective
from trainer.run.config import RunConfig

__all__ = ["Ranks", "cluster_collective", "joined_cluster"]

_NUMBER = struct.Struct("<q")
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a torchrun job; by default one that belongs to none."""

    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    """Ranks on this machine: they share its memory."""
    control: RankedBytes | None = None
    """For what the ranks decide; None outside a cluster."""

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


@contextmanager
def joined_cluster(config: RunConfig) -> Iterator[Ranks]:
    """Joins the process group of the torch engine for as long as the node runs; with the other engine, none."""
    if config.engine != "torch":
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise TrainerUsageError(
                "engine p2p: expected one process a node, found this one to be one of torchrun's; add --engine torch, "
                "or start `python -m trainer`"
            )
        yield Ranks()
        return
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise TrainerUsageError(
            f"engine torch: expected to be started by torchrun, found no {', '.join(missing)}; run "
            "`torchrun --nproc-per-node 8 -m trainer --engine torch ...`"
        )
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.collective.round_timeout_s)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
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
    codec = codec_named(config.collective.compression)
    return TorchCollective(codec, config.rule, max_weight_ratio=config.collective.max_weight_ratio)
