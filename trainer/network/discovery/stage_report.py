"""The workers of a stage in announcements: their state, their names, and the DHT keys they are stored under.

A worker's name (spec P-7) is ``head.0.42``, ``body3.0.55``, ``tail.0.100``: stage, a constant 0, and a number, which
tells replicas apart for people. Nobody assigns numbers: a worker takes a free one, and of two with one number that with
the smaller key keeps it. A look-up returns every record of a key, so a run may deal its stages over several
(`StagePartitions`); the label is a signed part of the announcement. This module imports no torch: seeds read it too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from trainer.errors import DiscoveryError, TrainerUsageError
from trainer.network.rpc.messages import Message

if TYPE_CHECKING:
    from trainer.network.discovery.announcement import Announcement

FIRST_NUMBER = 32
LAST_NUMBER = 1023  # Numbers of workers (spec P-7: ``head.0.[32:1024]``).
_UID = re.compile(r"(head|tail|body([1-9][0-9]{0,3}))\.0\.([1-9][0-9]{0,5})")
MAX_REASON = 80
MAX_PARTS = 32
"""Stages of a model that one node may hold all of: as many as an announcement has room for, which then names
`MOST_SHARDS_BESIDE_PARTS` and no members of a round."""
MOST_SHARDS_BESIDE_PARTS = 64
_NO_WORKER = 1  # Below `FIRST_NUMBER`.

StageName: TypeAlias = Annotated[str, Field(pattern=r"^(head|tail|body-[1-9][0-9]{0,3})$")]
Counted: TypeAlias = Annotated[int, Field(ge=0, lt=2**53)]
Incarnation: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""Drawn by a worker process when it starts: another process at the same address has lost this one's state."""


class StageReport(Message):
    """A worker's state in its stage, for drivers and for nodes that choose a stage."""

    uid: Annotated[str, Field(pattern=r"^(head|tail|body[1-9][0-9]{0,3})\.0\.[1-9][0-9]{0,5}$")]
    incarnation: Incarnation
    status: Literal["joining", "serving", "leaving"]  # Micro-batches are sent only to workers that serve.
    version: Counted = 0
    saved: Counted = 0  # The newest version on this worker's disk, or the one it resumed from; 0: none.
    round_index: Counted = 0
    round_position: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the way to that round: newcomers adopt a state at its beginning (spec P-43)."""
    shared_through: Counted = 0  # As in `StageAnswer`.
    num_tokens: Counted = 0
    queued: Counted = 0
    rows_per_s: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    """Throughput, forward and backward, while it has work; 0: not known yet."""
    busy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of recent time in which it computed: how much its stage needs help."""
    resumed: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    """The incarnation whose checkpoint this process resumed from, as long as that holds."""
    resumed_through: Counted = 0  # The checkpoint contains the first so many micro-batches that incarnation counted.
    began_from: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    """Fingerprint of its first weights (`trainer.checkpoint.stages.fingerprint`), where it started from a model."""
    unsaved_s: Annotated[float, Field(ge=0, lt=1e11)] = 0.0
    """Seconds since its newest checkpoint, or since it started; 0 if it makes none."""
    unsaved_because: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """Why the last due checkpoint is missing; empty: it is there, or none was due."""


class PartReport(Message):
    """Where one stage's part of a whole model is, at a node that holds all stages (`Announcement.parts`)."""

    stage: StageName
    status: Literal["joining", "serving"]  # One that joins fetches the part's state, and takes part in no round.
    outer_step: Counted = 0
    state_digest: Annotated[str, Field(pattern=r"^(|[0-9a-f]{64})$")] = ""
    """The snapshot of the part that the node serves for `outer_step`; empty while it has none worth adopting."""
    round_index: Counted = 0
    round_position: Annotated[float, Field(ge=0, le=1)] = 0.0
    version: Counted = 0  # The node's own steps, which are all stages'.

    def as_worker(self) -> StageReport:
        """Returns what the workers of the stage see of it: one of them that takes no micro-batches of others."""
        return StageReport(
            uid=f"{self.stage.replace('-', '')}.0.{_NO_WORKER}",
            incarnation="0" * 16,
            status=self.status,
            version=self.version,
            round_index=self.round_index,
            round_position=self.round_position,
        )


@dataclass(frozen=True, slots=True)
class StageUid:
    """A worker's name for people: its stage (``head``, ``body-3``, ``tail``) and its number there."""

    stage: str
    number: int

    def __str__(self) -> str:
        return f"{self.stage.replace('-', '')}.0.{self.number}"

    @classmethod
    def parse(cls, text: str) -> StageUid:
        """Parses the result of ``str``; raises `TrainerUsageError` where it is no worker's name."""
        found = _UID.fullmatch(text)
        if found is None:
            raise TrainerUsageError(f"expected a worker's name such as body3.0.55, found {text[:80]!r}")
        name, body, number = found.groups()
        return cls(f"body-{body}" if body else name, int(number))


def free_number(seed: int, taken: Collection[int]) -> int:
    """Returns a number that is not taken, searching from a place by ``seed``; above `LAST_NUMBER` if it must be."""
    count = LAST_NUMBER - FIRST_NUMBER + 1
    usual = (FIRST_NUMBER + (seed + step) % count for step in range(count))
    return next(number for number in itertools.chain(usual, itertools.count(LAST_NUMBER + 1)) if number not in taken)


def workers_of(stage: str, announcements: Iterable[Announcement]) -> dict[str, int]:
    """Returns the numbers of a stage's workers by peer id."""
    uids = {found.peer_id: StageUid.parse(found.stage.uid) for found in announcements if found.stage is not None}
    return {peer_id: uid.number for peer_id, uid in uids.items() if uid.stage == stage}


def settled_uid(stage: str, own_peer_id: str, own: StageUid | None, announcements: Iterable[Announcement]) -> StageUid:
    """Returns a worker's name: its own, unless of another stage, or a worker with a smaller key has that number."""
    others = workers_of(stage, announcements)
    others.pop(own_peer_id, None)
    if own is not None and own.stage == stage:
        rivals = [peer_id for peer_id, number in others.items() if number == own.number]
        if all(own_peer_id < peer_id for peer_id in rivals):
            return own
    return StageUid(stage, free_number(int(own_peer_id[:15], 16), set(others.values())))


def dht_key(run_id: str, filed_under: str = "") -> str:
    """Returns the DHT key of a run's announcements: of a partition, or of nodes outside partitions."""
    return f"{run_id}.{filed_under or 'peers'}"


def partition_of(stage_index: int, num_stages: int, num_partitions: int) -> int:
    """Returns the partition of a stage; each has neighbouring stages, and their numbers differ by at most one."""
    return stage_index * num_partitions // num_stages


@dataclass(frozen=True, slots=True)
class StagePartitions:
    """How a run's stages, all in order, are dealt over keys; without stages there is one key."""

    stages: tuple[str, ...] = ()
    num_partitions: int = 0  # 0: each stage has its own.

    def __post_init__(self) -> None:
        if self.stages and self.num_partitions > len(self.stages):
            raise TrainerUsageError(
                f"discovery.num_partitions: expected at most the number of stages, {len(self.stages)}, "
                f"found {self.num_partitions}; 0 gives each stage one"
            )

    def label(self, stage: str) -> str:
        """Returns the label of a stage's partition; raises `DiscoveryError` where the run has no such stage."""
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
        """Returns the labels to look up for these stages, None: for all, and for nodes without a stage; see `label`."""
        wanted = self.stages if stages is None else stages
        return tuple(dict.fromkeys(["", *(self.label(stage) for stage in wanted)]))
