"""The DHT keys of a run's announcements: one for all, or one for the workers of some stages.

A look-up returns every record of a key. With 32 stages of 30 workers that is 1.7 MB every two seconds for each node, of
which a worker needs the 30 of its own stage (54 kB). So a run may deal its stages over several keys, of which a node
looks up those it needs; hivemind keeps them at different DHT nodes, by their hashes.

A key is named after the first of its stages, in the form of the beginning of a worker's name (spec P-7: ``head.0``,
``body8.0``). The name is a signed part of the announcement, so that DHT nodes, which do not know the run's stages, can
check that a record belongs to the key it is stored under.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trainer.errors import DiscoveryError, TrainerUsageError

__all__ = ["StagePartitions", "dht_key", "partition_of"]


def dht_key(run_id: str, filed_under: str = "") -> str:
    """Returns the DHT key of a run's announcements: of a partition, or of nodes outside partitions."""
    return f"{run_id}.{filed_under or 'peers'}"


def partition_of(stage_index: int, num_stages: int, num_partitions: int) -> int:
    """Returns the partition of a stage; each has neighbouring stages, and their numbers differ by at most one."""
    return stage_index * num_partitions // num_stages


@dataclass(frozen=True, slots=True)
class StagePartitions:
    """How a run's stages are dealt over keys; without stages there is one key.

    Raises:
        TrainerUsageError: there are more partitions than stages.
    """

    stages: tuple[str, ...] = ()
    """All of the run, in order."""
    num_partitions: int = 0
    """0: each stage has its own."""

    def __post_init__(self) -> None:
        if self.stages and self.num_partitions > len(self.stages):
            raise TrainerUsageError(
                f"discovery.num_partitions: expected at most the number of stages, {len(self.stages)}, "
                f"found {self.num_partitions}; 0 gives each stage one"
            )

    def label(self, stage: str) -> str:
        """Returns the label of the partition of a stage.

        Raises:
            DiscoveryError: the run has no such stage.
        """
        if not self.stages:
            return ""
        if stage not in self.stages:
            raise DiscoveryError(f"expected one of the run's stages {', '.join(self.stages)}, found {stage!r}")
        count = len(self.stages)
        partitions = self.num_partitions or count
        partition = partition_of(self.stages.index(stage), count, partitions)
        first = next(index for index in range(count) if partition_of(index, count, partitions) == partition)
        return f"{self.stages[first].replace('-', '')}.0"

    def labels(self, stages: Collection[str] | None = None) -> tuple[str, ...]:
        """Returns the labels to look up for these stages, None: for all, and for nodes without a stage.

        Raises:
            DiscoveryError: the run has no such stage.
        """
        wanted = self.stages if stages is None else stages
        return tuple(dict.fromkeys(["", *(self.label(stage) for stage in wanted)]))
