"""Which of a node's processes this is, and how they share its model: arithmetic, without torch's distributed parts.

``auto`` keeps to DDP where weights, gradients and moments fit a rank: it has the fewest exchanges. Else the state is
cut into shards within each machine (FSDP), and machines average the gradients of their shards (HSDP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig
from trainer.model.sizing import memory_bytes

Parallel = Literal["auto", "ddp", "fsdp", "hsdp"]
Wrapped = Literal["ddp", "fsdp", "hsdp"]

_REPLICATED_SHARE: Final = 0.7  # Of a rank's memory, for weights, gradients and moments; the rest is for activations.


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which of a node's processes this is, by the names of torchrun; every machine has equally many."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def num_hosts(self) -> int:
        """Machines of the node."""
        return self.size // self.local_size

    def most_rows(self, num_rows: int) -> int:
        """Returns how many of a batch's rows a rank has at most."""
        return -(-num_rows // self.size)

    @property
    def is_on_first_host(self) -> bool:
        """Whether this process runs on the machine of rank 0, with which it can share memory."""
        return self.rank < self.local_size


def choose_parallel(
    wanted: Parallel, config: ModelConfig, rank_memory_bytes: Callable[[], int], place: RankPlace
) -> Wrapped:
    """Returns how a node's ranks share a model; ``auto``: DDP where the training state fits a rank, else in shards.

    ``rank_memory_bytes`` is called for ``auto`` only. Raises `TrainerUsageError`: ``fsdp`` over several machines, or
    ``hsdp`` on one.
    """
    several = place.num_hosts > 1
    if wanted == "auto":
        fits = memory_bytes(config) <= _REPLICATED_SHARE * rank_memory_bytes()
        return "ddp" if fits else "hsdp" if several else "fsdp"
    if several and wanted == "fsdp":
        raise TrainerUsageError(
            f"parallel fsdp: expected the ranks of one machine, found {place.num_hosts} machines; take hsdp, which "
            "shards within each and averages gradients between them"
        )
    if not several and wanted == "hsdp":
        raise TrainerUsageError("parallel hsdp: expected several machines (torchrun --nnodes), found one; take fsdp")
    return wanted


def rows_memory_bytes(kind: Wrapped, config: ModelConfig, rank_memory_bytes: int, place: RankPlace) -> int:
    """Returns the memory that leaves a rank as much for activations as its shard does, if it held the whole state."""
    held = 1 if kind == "ddp" else place.local_size
    return rank_memory_bytes + memory_bytes(config) - memory_bytes(config) // held
