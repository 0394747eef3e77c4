"""Which units of a lane's shards are leased in its current epoch, and which comes next.

A shard's units are leased in order, so one number describes a shard that has been begun; shards that are through are
intervals of positions. 600,000 shards of which ten are being read take a few hundred bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from trainer.errors import LedgerError
from trainer.pipeline.ledger.records import LaneSnapshot
from trainer.pipeline.ledger.units import Unit

__all__ = ["Intervals", "LaneLeases", "new_lane"]


class Intervals:
    """A set of whole numbers, 0 or more, kept as first and last of each run, ascending, with gaps between."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            self._firsts.append(first)
            self._lasts.append(last)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields first and last of each run."""
        return zip(self._firsts, self._lasts, strict=True)

    def __len__(self) -> int:
        """Returns how many numbers it holds."""
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


def new_lane(num_shards: int) -> LaneSnapshot:
    """Returns a lane at the beginning of epoch 0, with so many of its shards."""
    return LaneSnapshot(
        epoch=0, num_shards=num_shards, next_num_shards=num_shards, begun=(), cursors=(), units_leased=0
    )


class LaneLeases:
    """One lane's epochs."""

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
            next_epoch = LaneLeases(self.shards, self._units_per_shard, new_lane(self.next_num_shards))
            unit = None if next_epoch.is_through else next_epoch.next_unit(preferred)
            return None if unit is None else Unit(self.epoch + 1, unit.shard, unit.index)
        for shard in preferred:
            position = self._position(shard)
            if position is not None and position < self.num_shards and self._has_units(position):
                return self._unit_at(position)
        position = self._begun.first_gap()
        if position < self.num_shards:
            return self._unit_at(position)
        return self._unit_at(min(self._cursors, key=lambda each: (self._cursors[each], each)))

    def lease(self, unit: Unit) -> None:
        """Counts a unit as leased; begins the next epoch if it is the first of that.

        Raises:
            LedgerError: it is not the next one of its shard.
        """
        if unit.epoch == self.epoch + 1 and self.is_through:
            self.epoch, self.num_shards = unit.epoch, self.next_num_shards
            self._begun, self._cursors = Intervals(), {}
        position = self._position(unit.shard)
        if (
            unit.epoch != self.epoch
            or position is None
            or position >= self.num_shards
            or not self._has_units(position)
            or self._unit_at(position) != unit
        ):
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

    def _has_units(self, position: int) -> bool:
        return position in self._cursors or position not in self._begun

    def _unit_at(self, position: int) -> Unit:
        return Unit(self.epoch, self.shards[position], self._cursors.get(position, 0))
