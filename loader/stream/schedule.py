"""Batch k, as rows of windows: pure arithmetic over integers.

A *lane* is the shards a node reads of one source (or of the whole store), one after the other, epoch after epoch; its
position is (epoch, window), the window counted over all shards of the lane. A batch takes rows from the lanes by their
weights. Which lane a row comes from depends on the row's number alone (multiples of the golden ratio, Weyl 1916, whose
share of every lane is right to within a few rows at any length), so a position needs no memory of how it was reached.

Leaving a shard early (*rotation*) moves every lane to the beginning of its next shard, between two batches. Batches run
on across the end of a shard: no window is dropped or repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Lane", "LanePosition", "Rows", "Schedule", "ScheduleMark"]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_ROWS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Lane:
    """The shards that are read one after the other."""

    shards: tuple[int, ...]
    windows_per_shard: int
    weight: float = 1.0

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        return len(self.shards) * self.windows_per_shard


@dataclass(frozen=True, slots=True)
class LanePosition:
    """The next window of a lane."""

    epoch: int = 0
    window: int = 0
    """Over all shards of the lane, ``0 … lane.windows − 1``."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a batch that come from one shard: windows ``first … first + count − 1`` of its order."""

    epoch: int
    shard_id: int
    first: int
    count: int


class ScheduleMark(NamedTuple):
    """A position to come back to."""

    step: int
    positions: tuple[LanePosition, ...]
    lanes: tuple[Lane, ...]
    queued: tuple[tuple[int, Lane], ...]


class Schedule:
    """Where every lane stands, and what the next batch is made of.

    Args:
        lanes: one or more, none empty.
        batch_size: rows a batch.
        end_epoch: end when a lane would begin this epoch; None for never.
        step: batches that have been made.
        positions: of the lanes, by default at their beginning.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        batch_size: int,
        *,
        end_epoch: int | None = None,
        step: int = 0,
        positions: Sequence[LanePosition] | None = None,
    ) -> None:
        self._lanes = list(lanes)
        self._batch_size = batch_size
        self.end_epoch = end_epoch
        self._shares = _shares([lane.weight for lane in lanes])
        self._thresholds = _thresholds(self._shares)
        self._queued: dict[int, Lane] = {}
        self.step = step
        self.positions = list(positions) if positions is not None else [LanePosition() for _ in lanes]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes as they are read now."""
        return tuple(self._lanes)

    @property
    def is_over(self) -> bool:
        """Whether the last epoch is at its end."""
        return not all(self._left(lane) for lane in range(len(self._lanes)))

    def current_shard(self, lane: int = 0) -> int:
        """The shard that the lane's next row comes from."""
        return self._lanes[lane].shards[self.positions[lane].window // self._lanes[lane].windows_per_shard]

    def next_shard(self, lane: int = 0) -> int:
        """The shard after that one."""
        shards = self._lanes[lane].shards
        ordinal = self.positions[lane].window // self._lanes[lane].windows_per_shard + 1
        return shards[ordinal] if ordinal < len(shards) else self._successor(lane).shards[0]

    def steps_on_shard(self) -> int:
        """Batches made of the current shards; where lanes moved at different times, of the one that moved last."""
        return min(self._lane_steps(lane) for lane in range(len(self._lanes)))

    def next_rows(self) -> list[Rows]:
        """Takes the next batch.

        Returns:
            Its rows, in order; fewer than a batch at the end of the last epoch, and none behind it.
        """
        rows: list[Rows] = []
        for lane, count in enumerate(self._rows_by_lane()):
            if count:
                rows += self._take(lane, count)
        self.step += bool(rows)
        return rows

    def skip_to(self, step: int) -> None:
        """Passes over batches without making them, as if they had been taken."""
        if self.end_epoch is None and step > self.step:
            for lane, count in enumerate(self._rows_until(step)):
                self._advance(lane, count)
            self.step = step
        while self.step < step and self.next_rows():
            pass

    def rotate(self) -> None:
        """Moves every lane to the beginning of its next shard; one that stands at a beginning stays."""
        for lane, position in enumerate(self.positions):
            self._advance(lane, -position.window % self._lanes[lane].windows_per_shard)

    def mark(self) -> ScheduleMark:
        """The position, to come back to."""
        return ScheduleMark(self.step, tuple(self.positions), tuple(self._lanes), tuple(self._queued.items()))

    def rewind(self, mark: ScheduleMark) -> None:
        """Goes back to a position."""
        self.step, self.positions = mark.step, list(mark.positions)
        self._lanes, self._queued = list(mark.lanes), dict(mark.queued)

    def queue_lane(self, lane: int, successor: Lane) -> None:
        """Lets the lane read other shards from its next epoch on."""
        self._queued[lane] = successor

    def _lane_steps(self, lane: int) -> int:
        windows = self.positions[lane].window % self._lanes[lane].windows_per_shard
        return int(windows / (self._shares[lane] * self._batch_size)) if windows else 0

    def _rows_by_lane(self) -> list[int]:
        """How many rows of the next batch each lane gives, the end of the last epoch respected."""
        left = [self._left(lane) for lane in range(len(self._lanes))]
        if len(left) == 1 or not all(left):
            # A mixture ends with the first lane that does: what is left of the others would be no mixture.
            return [min(left)]
        first = self.step * self._batch_size
        lanes = _lanes_of_rows(first, self._batch_size, self._thresholds)
        for lane, most in enumerate(left):
            beyond = np.flatnonzero(lanes == lane)[most:]
            if len(beyond):
                lanes = lanes[: beyond[0]]
        return [int(count) for count in np.bincount(lanes, minlength=len(self._lanes))]

    def _rows_until(self, step: int) -> list[int]:
        """How many rows of all the batches before ``step`` each lane gives, where there is no end."""
        first, end = self.step * self._batch_size, step * self._batch_size
        if len(self._lanes) == 1:
            return [end - first]
        counts = np.zeros(len(self._lanes), dtype=np.int64)
        for begin in range(first, end, _CHUNK_ROWS):
            rows = min(_CHUNK_ROWS, end - begin)
            counts += np.bincount(_lanes_of_rows(begin, rows, self._thresholds), minlength=len(counts))
        return [int(count) for count in counts]

    def _left(self, lane: int) -> int:
        """Windows until the end of the last epoch, but no more than a batch."""
        if self.end_epoch is None:
            return self._batch_size
        position = self.positions[lane]
        epochs = self.end_epoch - position.epoch
        if epochs <= 0:
            return 0
        left = self._lanes[lane].windows - position.window + (epochs - 1) * self._successor(lane).windows
        return min(self._batch_size, left)

    def _successor(self, lane: int) -> Lane:
        """What the lane reads in its next epoch."""
        return self._queued.get(lane, self._lanes[lane])

    def _take(self, lane: int, count: int) -> list[Rows]:
        rows: list[Rows] = []
        while count:
            # Looked up anew for each part: an epoch may end within a batch, and a queued lane begin.
            current, position = self._lanes[lane], self.positions[lane]
            ordinal, first = divmod(position.window, current.windows_per_shard)
            take = min(count, current.windows_per_shard - first)
            rows.append(Rows(position.epoch, current.shards[ordinal], first, take))
            self._advance(lane, take)
            count -= take
        return rows

    def _advance(self, lane: int, windows: int) -> None:
        position = self.positions[lane]
        left = self._lanes[lane].windows - position.window
        if windows >= left and lane in self._queued:
            self._lanes[lane] = self._queued.pop(lane)
            self.positions[lane] = LanePosition(position.epoch + 1, 0)
            self._advance(lane, windows - left)
            return
        epochs, window = divmod(position.window + windows, self._lanes[lane].windows)
        self.positions[lane] = LanePosition(position.epoch + epochs, window)


def _shares(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """The part of all rows that each lane gives."""
    relative = np.asarray(weights, dtype=np.float64) / max(weights)
    shares: npt.NDArray[np.float64] = relative / relative.sum()
    return shares


def _thresholds(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    """Where, in the range of a 64-bit word, each lane's part ends; the last has no end."""
    # Shares that add up to 1 in all but name would end at 2**64, which no word can say.
    return np.minimum(np.cumsum(shares)[:-1] * 2.0**53, 2.0**53 - 1).astype(np.uint64) << np.uint64(11)


def _lanes_of_rows(first: int, count: int, thresholds: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    words = (np.arange(first + 1, first + count + 1, dtype=np.uint64)) * _GOLDEN
    return np.searchsorted(thresholds, words, side="right")
