"""Which units of a lane's shards are leased in the epoch it is in, and which comes next.

A shard's units are leased in order, so a number a shard that is begun and not through says all about it; shards that
are through are runs of positions. 600,000 shards of which ten are being read take a few hundred bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from trainer.errors import LedgerError
from trainer.pipeline.ledger.intervals import Intervals
from trainer.pipeline.ledger.records import LaneState
from trainer.pipeline.ledger.units import Unit

__all__ = ["LaneBook"]


class LaneBook:
    """One lane's epochs.

    Args:
        shards: ascending; an epoch reads the first so many.
        units_per_shard: the same for all.
        state: where it stands.
    """

    def __init__(self, shards: Sequence[int], units_per_shard: int, state: LaneState) -> None:
        self._shards = shards
        self._units_per_shard = units_per_shard
        self._begun = Intervals(state.begun)
        self._cursors = dict(state.cursors)
        self.epoch = state.epoch
        self.num_shards = state.num_shards
        self.next_num_shards = state.next_num_shards
        self.units_leased = state.units_leased

    @classmethod
    def new(cls, shards: Sequence[int], units_per_shard: int, num_shards: int) -> LaneBook:
        """At the beginning of epoch 0, with so many of the shards."""
        state = LaneState(
            epoch=0, num_shards=num_shards, next_num_shards=num_shards, begun=(), cursors=(), units_leased=0
        )
        return cls(shards, units_per_shard, state)

    @property
    def state(self) -> LaneState:
        """Where it stands."""
        return LaneState(
            epoch=self.epoch,
            num_shards=self.num_shards,
            next_num_shards=self.next_num_shards,
            begun=tuple(self._begun),
            cursors=tuple(sorted(self._cursors.items())),
            units_leased=self.units_leased,
        )

    @property
    def units_of_epoch(self) -> tuple[int, int]:
        """Leased, and in all, of this epoch."""
        whole = (len(self._begun) - len(self._cursors)) * self._units_per_shard
        return whole + sum(self._cursors.values()), self.num_shards * self._units_per_shard

    @property
    def is_through(self) -> bool:
        """Every unit of this epoch is leased."""
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
        """What comes next for whoever prefers these shards, the first most; None: this epoch is through.

        Where none of them has units left it is a shard nobody has begun, else the one with the most units left, so that
        drivers seldom download what others have.
        """
        for shard in preferred:
            position = self._position(shard)
            if position is not None and position < self.num_shards and self._has_units(position):
                return self._unit_at(position)
        position = self._begun.first_gap()
        if position < self.num_shards:
            return self._unit_at(position)
        if not self._cursors:
            return None
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

    def first_of_next_epoch(self, preferred: Iterable[int]) -> Unit | None:
        """What the next epoch would begin with; None: it would have no shards."""
        fresh = LaneBook.new(self._shards, self._units_per_shard, self.next_num_shards)
        unit = fresh.next_unit(preferred)
        return None if unit is None else Unit(self.epoch + 1, unit.shard, unit.index)

    def grow(self, num_shards: int) -> None:
        """Reads so many shards from the next epoch on; never fewer than before."""
        self.next_num_shards = max(self.next_num_shards, num_shards)

    def know(self, shards: Sequence[int]) -> None:
        """Learns the ids of further shards."""
        self._shards = shards

    def _position(self, shard: int) -> int | None:
        position = bisect_left(self._shards, shard)
        return position if position < len(self._shards) and self._shards[position] == shard else None

    def _has_units(self, position: int) -> bool:
        return position in self._cursors or position not in self._begun

    def _unit_at(self, position: int) -> Unit:
        return Unit(self.epoch, self._shards[position], self._cursors.get(position, 0))
