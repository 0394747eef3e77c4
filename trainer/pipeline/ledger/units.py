"""How the data of a run are cut into units and micro-batches, and which units of a lane's shards are leased.

The rows of a shard in an epoch are its windows in that epoch's order. Micro-batches lie on a grid of
`micro_batch_rows` from row 0 on, units on a grid of `unit_rows`; the last of a shard may be shorter. So every window is
in one micro-batch, and a micro-batch's name says in which. A shard's units are leased in order, so one number describes
a shard that is begun: 600,000 shards of which ten are being read take a few hundred bytes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from trainer.errors import LedgerError, TrainerUsageError
from trainer.network.discovery.stage_report import Counted
from trainer.network.rpc.messages import Message
from trainer.pipeline.protocol.work import MicroBatchId

Span: TypeAlias = tuple[Counted, Counted]


class Run(Message):
    """Consecutive rows of one shard's order in one epoch; the first is on the grid of micro-batches."""

    epoch: Annotated[int, Field(ge=0, lt=10**9)]
    shard: Annotated[int, Field(ge=0, lt=10**10)]
    row: Annotated[int, Field(ge=0, lt=10**10)]
    num_rows: Annotated[int, Field(ge=1, lt=10**10)]


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """The least that is leased anew."""

    epoch: int
    shard: int
    index: int


class Layout(Message):
    """How each shard is cut."""

    num_windows: Annotated[int, Field(ge=1)]  # Of a shard: its rows in an epoch.
    seq_len: Annotated[int, Field(ge=1)]
    micro_batch_rows: Annotated[int, Field(ge=1)]
    unit_rows: Annotated[int, Field(ge=1)]  # A multiple of `micro_batch_rows`.

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

    def unit_of(self, micro_batch: MicroBatchId) -> Unit:
        """Returns the unit a micro-batch is in."""
        return Unit(micro_batch.epoch, micro_batch.shard, micro_batch.row // self.unit_rows)

    def rows_of(self, micro_batch: MicroBatchId) -> int:
        """Returns how many rows a micro-batch has; raises TrainerUsageError if there is none of that name."""
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

    source: str | None  # None: all shards of the store alike.
    weight: Annotated[float, Field(gt=0)] = 1.0  # Its share of the rows, relative to the other lanes.
    first_shard_sha256: str
    """Of its first shard, which stays the same when a store grows: tells one store from another."""


class LedgerSpec(Message):
    """What an account is of. A journal of another one is refused, and so are its drivers."""

    seed: int  # Of the data's order.
    layout: Layout
    lanes: Annotated[tuple[LaneSpec, ...], Field(min_length=1)]
    stages: Annotated[tuple[str, ...], Field(min_length=1)]  # All that have to count a micro-batch.

    def digest(self) -> str:
        """Returns 16 hexadecimal digits of its SHA-256."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class Intervals:
    """A set of whole numbers, 0 or more, kept as first and last of each run, ascending, with gaps between."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        pairs = list(runs)
        self._firsts = [first for first, _ in pairs]
        self._lasts = [last for _, last in pairs]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._lasts, strict=True)

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    @property
    def num_runs(self) -> int:
        """Its size in memory."""
        return len(self._firsts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def add(self, number: int) -> None:
        """Adds a number, unless it is there."""
        if number in self:
            return
        at = bisect_left(self._firsts, number)
        joins_before = at > 0 and self._lasts[at - 1] == number - 1
        joins_after = at < len(self._firsts) and self._firsts[at] == number + 1
        if joins_before and joins_after:
            self._lasts[at - 1] = self._lasts.pop(at)
            del self._firsts[at]
        elif joins_before:
            self._lasts[at - 1] = number
        elif joins_after:
            self._firsts[at] = number
        else:
            self._firsts.insert(at, number)
            self._lasts.insert(at, number)

    def drop_through(self, number: int) -> None:
        """Removes all numbers up to this one."""
        at = bisect_right(self._lasts, number)
        del self._firsts[:at], self._lasts[:at]
        if self._firsts and self._firsts[0] <= number:
            self._firsts[0] = number + 1

    def first_gap(self) -> int:
        """Returns the least number that is not in it."""
        return self._lasts[0] + 1 if self._firsts and self._firsts[0] == 0 else 0


class LaneSnapshot(Message):
    """Where a lane stands, with so many shards in this epoch and in the next."""

    epoch: Counted
    num_shards: Counted
    next_num_shards: Counted
    begun: tuple[Span, ...]  # Positions of shards of which units were leased in this epoch: first and last of each run.
    cursors: tuple[Span, ...]  # Of these, those that have more: position and next unit.
    units_leased: Counted  # In all epochs.

    @classmethod
    def new(cls, num_shards: int) -> LaneSnapshot:
        """Returns a lane at the beginning of epoch 0, with so many of its shards."""
        return cls(epoch=0, num_shards=num_shards, next_num_shards=num_shards, begun=(), cursors=(), units_leased=0)


class LaneLeases:
    """One lane's epochs: which units of its shards (ids, ascending) are leased, and which is next."""

    def __init__(self, shards: Sequence[int], units_per_shard: int, snapshot: LaneSnapshot) -> None:
        self.shards = shards
        self._units_per_shard = units_per_shard
        self._begun = Intervals(snapshot.begun)
        self._cursors = dict(snapshot.cursors)
        self.epoch = snapshot.epoch
        self.num_shards = snapshot.num_shards
        self.next_num_shards = snapshot.next_num_shards
        self.units_leased = snapshot.units_leased

    def snapshot(self) -> LaneSnapshot:
        """Returns where the lane stands."""
        return LaneSnapshot(
            epoch=self.epoch,
            num_shards=self.num_shards,
            next_num_shards=self.next_num_shards,
            begun=tuple(self._begun),
            cursors=tuple(sorted(self._cursors.items())),
            units_leased=self.units_leased,
        )

    @property
    def units_of_epoch(self) -> tuple[int, int]:
        """Units of this epoch: leased, and in all."""
        whole = (len(self._begun) - len(self._cursors)) * self._units_per_shard
        return whole + sum(self._cursors.values()), self.num_shards * self._units_per_shard

    @property
    def is_through(self) -> bool:
        """Whether every unit of this epoch is leased."""
        return not self._cursors and self._begun.first_gap() >= self.num_shards

    def has(self, shard: int) -> bool:
        """Whether it is one of this lane's."""
        return self._position(shard) is not None

    def is_leased(self, unit: Unit) -> bool:
        """Whether it was given to a driver already, in this epoch or an earlier one."""
        if unit.epoch != self.epoch:
            return unit.epoch < self.epoch
        position = self._position(unit.shard)
        if position is None or position not in self._begun:
            return False
        return unit.index < self._cursors.get(position, self._units_per_shard)

    def next_unit(self, preferred: Iterable[int]) -> Unit | None:
        """Returns the next unit for a driver, of the next epoch if this one is through; None: that has no shards.

        The first preferred shard with units left comes first, then a shard nobody has begun, then the one with the most
        units left, so that drivers seldom download what others have.
        """
        if self.is_through:
            next_epoch = LaneLeases(self.shards, self._units_per_shard, LaneSnapshot.new(self.next_num_shards))
            unit = None if next_epoch.is_through else next_epoch.next_unit(preferred)
            return None if unit is None else Unit(self.epoch + 1, unit.shard, unit.index)
        for shard in preferred:
            unit = self._next_of(shard)
            if unit is not None:
                return unit
        position = self._begun.first_gap()
        if position >= self.num_shards:
            position = min(self._cursors, key=lambda each: (self._cursors[each], each))
        return self._next_of(self.shards[position])

    def lease(self, unit: Unit) -> None:
        """Counts the next unit of a shard as leased; begins the next epoch if it is the first of that."""
        if unit.epoch == self.epoch + 1 and self.is_through:
            self.epoch, self.num_shards = unit.epoch, self.next_num_shards
            self._begun, self._cursors = Intervals(), {}
        position = self._position(unit.shard)
        if position is None or self._next_of(unit.shard) != unit:
            raise LedgerError(f"expected the next unit of a shard in epoch {self.epoch}, found {unit}")
        self._begun.add(position)
        self._cursors[position] = unit.index + 1
        if unit.index + 1 == self._units_per_shard:
            del self._cursors[position]
        self.units_leased += 1

    def grow(self, num_shards: int) -> None:
        """Reads so many shards from the next epoch on; never fewer than before."""
        self.next_num_shards = max(self.next_num_shards, num_shards)

    def _position(self, shard: int) -> int | None:
        position = bisect_left(self.shards, shard)
        return position if position < len(self.shards) and self.shards[position] == shard else None

    def _next_of(self, shard: int) -> Unit | None:
        """Returns the next unit of a shard; None: it has none left in this epoch, or is not of it."""
        position = self._position(shard)
        if position is None or position >= self.num_shards:
            return None
        if position in self._begun and position not in self._cursors:
            return None
        return Unit(self.epoch, shard, self._cursors.get(position, 0))
