"""How the data of a run are cut into units and micro-batches, and how runs of these are written.

The rows of a shard in an epoch are its windows in that epoch's order. Micro-batches lie on a grid of
`micro_batch_rows` from row 0 on, units on a grid of `unit_rows`; where a shard's windows do not fill the last of them,
it is shorter. So every window is in one micro-batch, and a micro-batch's name says in which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from trainer.errors import TrainerUsageError
from trainer.network.rpc.messages import Message
from trainer.pipeline.protocol.work import MicroBatchId

__all__ = ["LaneSpec", "Layout", "LedgerSpec", "Run", "Unit", "runs_of"]


class Run(Message):
    """Consecutive rows of one shard's order in one epoch."""

    epoch: Annotated[int, Field(ge=0, lt=10**9)]
    shard: Annotated[int, Field(ge=0, lt=10**10)]
    row: Annotated[int, Field(ge=0, lt=10**10)]
    """The first; on the grid of micro-batches."""
    num_rows: Annotated[int, Field(ge=1, lt=10**10)]


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """The least that is leased anew."""

    epoch: int
    shard: int
    index: int


class Layout(Message):
    """How each shard is cut."""

    num_windows: Annotated[int, Field(ge=1)]
    """Of a shard: its rows in an epoch."""
    seq_len: Annotated[int, Field(ge=1)]
    micro_batch_rows: Annotated[int, Field(ge=1)]
    unit_rows: Annotated[int, Field(ge=1)]
    """A multiple of `micro_batch_rows`."""

    @property
    def units_per_shard(self) -> int:
        """The last may be shorter."""
        return -(-self.num_windows // self.unit_rows)

    @property
    def micro_batches_per_unit(self) -> int:
        """Of a unit of full length."""
        return self.unit_rows // self.micro_batch_rows

    def run_of(self, unit: Unit) -> Run:
        """Returns a unit's rows."""
        row = unit.index * self.unit_rows
        num_rows = min(self.unit_rows, self.num_windows - row)
        return Run(epoch=unit.epoch, shard=unit.shard, row=row, num_rows=num_rows)

    def rows_of(self, micro_batch: MicroBatchId) -> int:
        """Returns how many rows a micro-batch has.

        Raises:
            TrainerUsageError: there is none of that name.
        """
        row = micro_batch.row
        if not 0 <= row < self.num_windows or row % self.micro_batch_rows:
            raise TrainerUsageError(
                f"expected a micro-batch that begins at a multiple of {self.micro_batch_rows} below "
                f"{self.num_windows}, found {micro_batch}"
            )
        return min(self.micro_batch_rows, self.num_windows - row)

    def micro_batches(self, *runs: Run) -> Iterator[MicroBatchId]:
        """Yields the micro-batches of runs, in order."""
        for run in runs:
            for row in range(run.row, run.row + run.num_rows, self.micro_batch_rows):
                yield MicroBatchId(run.epoch, run.shard, row)


def runs_of(micro_batches: Iterable[MicroBatchId], layout: Layout) -> tuple[Run, ...]:
    """Returns the fewest runs that hold these micro-batches, each different; sorted."""
    runs: list[list[int]] = []
    for each in sorted(micro_batches):
        rows = layout.rows_of(each)
        if runs and runs[-1][:2] == [each.epoch, each.shard] and runs[-1][2] + runs[-1][3] == each.row:
            runs[-1][3] += rows
        else:
            runs.append([each.epoch, each.shard, each.row, rows])
    return tuple(Run(epoch=epoch, shard=shard, row=row, num_rows=rows) for epoch, shard, row, rows in runs)


class LaneSpec(Message):
    """A lane: shards that are read together, epoch after epoch; a source's, or all of the store's."""

    source: str | None
    """None: all shards of the store alike."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the rows, relative to the other lanes."""
    first_shard_sha256: str
    """Of its first shard, which stays the same when a store grows: tells one store from another."""


class LedgerSpec(Message):
    """What an account is of. A journal of another one is refused, and so are its drivers."""

    seed: int
    """Of the data's order."""
    layout: Layout
    lanes: Annotated[tuple[LaneSpec, ...], Field(min_length=1)]
    stages: Annotated[tuple[str, ...], Field(min_length=1)]
    """All that have to count a micro-batch."""

    def digest(self) -> str:
        """Returns 16 hexadecimal digits of its SHA-256."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]
