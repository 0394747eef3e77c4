"""Under which keys of the DHT a run's announcements are filed: one for all, or one for the workers of some stages.

Whoever looks a key up gets every record of it. With 32 stages of 30 workers that is 1.7 MB every two seconds for each
node, of which a worker needs the 30 of its own stage (54 kB). So a run may deal its stages over several keys, of which
a node asks for those it needs; hivemind keeps each where its hash says, at different nodes of the DHT.

A key is named by the first of its stages, in the form of the beginning of a worker's name (spec P-7: ``head.0``,
``body8.0``). The name is a signed part of the announcement, so that nodes of the DHT, which know nothing of the run's
stages, can tell whether a record belongs where it is filed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trainer.errors import DiscoveryError, TrainerUsageError

__all__ = ["StagePartitions", "dht_key", "partition_of"]


def dht_key(run_id: str, filed_under: str = "") -> str:
    """The DHT key of a run's announcements: of those that are filed under no stage, or of those of a partition."""
    return f"{run_id}.{filed_under or 'peers'}"


def partition_of(stage_index: int, num_stages: int, num_partitions: int) -> int:
    """Which partition a stage belongs to: each has neighbouring stages, as many as any other or one more or less."""
    return stage_index * num_partitions // num_stages


@dataclass(frozen=True, slots=True)
class StagePartitions:
    """How a run's stages are dealt over keys; without stages there is nothing to deal, and one key.

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
        """Under what the workers of a stage are filed.

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
        """Under what to look for the workers of these stages, None: of all, and for nodes that hold none.

        Raises:
            DiscoveryError: the run has no such stage.
        """
        wanted = self.stages if stages is None else stages
        return tuple(dict.fromkeys(["", *(self.label(stage) for stage in wanted)]))
