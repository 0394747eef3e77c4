"""Which rows of windows make up batch k: pure arithmetic over integers.

A *lane* is the shards a node reads of one source (or of the whole store), one after the other, epoch after epoch; its
position is (epoch, window), the window counted over all shards of the lane. A batch takes rows from the lanes by their
weights. Which lane a row comes from depends on the row's number alone (`mixture`), so a position needs no memory of how
it was reached: lanes, rows taken, and for rotations the step.

Leaving a shard early (*rotation*) moves every lane to the beginning of its next shard, between two batches; it is known
by the step before which it takes place. Batches run on across the end of a shard: no window is dropped or repeated.

Data-parallel ranks go through one schedule, whose batch is that of all of them together; `rows_of_rank` deals its rows
out. So no row number, position or step depends on how many ranks there are, and a run goes on with another number.
A pass of several ranks ends with two batches of like size rather than with one of fewer rows than ranks, since a
rank that has a step less than the others would leave them waiting.

Going to any step of an endless stream is arithmetic, on the counts that `mixture` has of any number of rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from loader.errors import LoaderUsageError
from loader.stream.mixture import Mixture, row_order

_MAX_PASSES: Final = 1_000_000
"""Passes that `Schedule.seek_through` goes through at most: each is arithmetic, but a million of them take 15 s."""


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


class LanePosition(NamedTuple):
    """The next window of a lane."""

    epoch: int = 0
    window: int = 0
    """Over all shards of the lane, ``0 … lane.windows − 1``."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a batch that come from one shard: windows ``first``, ``first + stride``, … of its order."""

    epoch: int
    shard_id: int
    first: int
    count: int
    stride: int = 1


def rows_of_rank(rows: Sequence[Rows], rank: int, world_size: int) -> list[Rows]:
    """The rows of a batch that a rank is given: every ``world_size``-th, so that each has its part of every lane.

    Args:
        rows: consecutive ones (of stride 1), the batch of all ranks.
        rank: 0 to ``world_size - 1``.
        world_size: ranks.
    """
    if world_size == 1:
        return list(rows)
    found: list[Rows] = []
    before = 0
    for part in rows:
        skipped = (rank - before) % world_size
        count = len(range(skipped, part.count, world_size))
        if count:
            found.append(Rows(part.epoch, part.shard_id, part.first + skipped, count, world_size))
        before += part.count
    return found


class _Queued(NamedTuple):
    """What a lane reads from an epoch on."""

    epoch: int
    lane: Lane


class ScheduleMark(NamedTuple):
    """A position to come back to."""

    step: int
    row: int
    positions: tuple[LanePosition, ...]
    lanes: tuple[Lane, ...]
    queued: tuple[tuple[_Queued, ...], ...]
    num_applied: int


class Schedule:
    """Where every lane stands, and what the next batch is made of.

    Args:
        lanes: one or more, none empty.
        batch_size: rows per batch, of all ranks together.
        mixture: which order the lanes take turns in.
        world_size: ranks that share each batch.
        epochs: epochs per pass, for `begin_pass`; None for an endless pass.
        end_epoch: the pass ends when a lane would begin this epoch; None for never.
        step: batches that have been made.
        row: rows that have been taken; by default those of ``step`` whole batches.
        positions: positions of the lanes, by default at their beginning.
        rotations: steps before which the current shards were, or will be, left early.
        resumes_pass: the first `begin_pass` continues the pass that ends with ``end_epoch``.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        batch_size: int,
        *,
        mixture: Mixture = "exact",
        world_size: int = 1,
        epochs: int | None = None,
        end_epoch: int | None = None,
        step: int = 0,
        row: int | None = None,
        positions: Sequence[LanePosition] | None = None,
        rotations: Sequence[int] = (),
        resumes_pass: bool = False,
    ) -> None:
        self._lanes = list(lanes)
        self._batch_size = batch_size
        self._epochs = epochs
        self._resumes_pass = resumes_pass
        self._rotations = sorted(rotations)
        self._num_applied = bisect.bisect_left(self._rotations, step)
        self.end_epoch = end_epoch
        self.pass_is_over = not resumes_pass
        """Whether `next_rows` has come to the end of the pass, or no pass was begun."""
        self._shares = _shares([lane.weight for lane in lanes])
        self._order = row_order([lane.weight for lane in lanes], mixture)
        # Taken beyond a batch, to see whether fewer rows than ranks would be left of the pass.
        self._more_rows = world_size if world_size > 1 else 0
        self._queued: list[tuple[_Queued, ...]] = [() for _ in lanes]
        self.mixture = mixture
        """Which order the lanes take turns in."""
        self.step = step
        self.row = step * batch_size if row is None else row
        """Rows taken, on which the mixture goes on; of one lane it is not kept."""
        self.positions = list(positions) if positions is not None else [LanePosition() for _ in lanes]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes as they are read now."""
        return tuple(self._lanes)

    @property
    def rotations(self) -> tuple[int, ...]:
        """The steps before which the current shards were, or will be, left early."""
        return tuple(self._rotations)

    @property
    def has_applied_rotations(self) -> bool:
        """Whether no rotation is still to come."""
        return self._num_applied == len(self._rotations)

    @property
    def is_exhausted(self) -> bool:
        """Whether a lane has come to the end epoch, so that `next_rows` returns nothing."""
        return not all(self._left(lane) for lane in range(len(self._lanes)))

    @property
    def shards(self) -> tuple[tuple[int, int], ...]:
        """Epoch and ordinal of the shard in which each lane stands."""
        return tuple(
            (position.epoch, position.window // lane.windows_per_shard)
            for position, lane in zip(self.positions, self._lanes, strict=True)
        )

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

    def begin_pass(self) -> None:
        """Lets the schedule run to the end of the current pass, or of the next one if the current pass is over.

        A pass in which a state was taken is continued even if only its end is left.
        """
        resumes, self._resumes_pass = self._resumes_pass, False
        self.pass_is_over = False
        if self._epochs is not None and not resumes:
            furthest = max(position.epoch for position in self.positions)
            self.end_epoch = (furthest // self._epochs + 1) * self._epochs

    def next_rows(self) -> list[Rows]:
        """Takes the next batch.

        Returns:
            Its rows, in order; fewer than a batch at the end of the pass, and none after it.
        """
        while self._num_applied < len(self._rotations) and self._rotations[self._num_applied] <= self.step:
            self.rotate()
            self._num_applied += 1
        rows = self._take_batch()
        self.pass_is_over = not rows
        return rows

    def seek(self, step: int) -> None:
        """Passes over batches up to ``step``, or to the end of the pass, as if they had been taken."""
        while self._num_applied < len(self._rotations) and self._rotations[self._num_applied] < step:
            rotation = self._rotations[self._num_applied]
            self._skip_to(rotation)
            if self.step < rotation:
                return  # The pass is over; the rotation belongs to a later one.
            self.rotate()
            self._num_applied += 1
        self._skip_to(step)

    def seek_through(self, step: int) -> None:
        """Passes over batches up to ``step``, from pass to pass.

        Raises:
            LoaderUsageError: the step is absurdly far for passes as short as these.
        """
        for _ in range(_MAX_PASSES):
            if self.step >= step:
                return
            self.begin_pass()
            self.seek(step)
        raise LoaderUsageError(
            f"expected a step within {_MAX_PASSES:,} passes, found {step}, which is further than step {self.step}"
        )

    def add_rotation(self, step: int) -> None:
        """Lets the current shards be left before batch ``step``, which was not taken yet; adding it twice is once."""
        position = bisect.bisect_left(self._rotations, step)
        if self._rotations[position : position + 1] != [step]:
            self._rotations.insert(position, step)

    def mark(self) -> ScheduleMark:
        """The position, to come back to."""
        return ScheduleMark(
            self.step, self.row, tuple(self.positions), tuple(self._lanes), tuple(self._queued), self._num_applied
        )

    def rewind(self, mark: ScheduleMark) -> None:
        """Goes back to a position."""
        self.step, self.row, self.positions = mark.step, mark.row, list(mark.positions)
        self._lanes, self._queued = list(mark.lanes), list(mark.queued)
        self._num_applied = mark.num_applied

    def queue_lane(self, lane: int, successor: Lane, epoch: int | None = None) -> None:
        """Lets lane number ``lane`` read other shards from an epoch it has not begun (by default its next) on.

        What was queued for that and later epochs is dropped.
        """
        begins = self.positions[lane].epoch + 1 if epoch is None else epoch
        before = tuple(queued for queued in self._queued[lane] if queued.epoch < begins)
        self._queued[lane] = (*before, _Queued(begins, successor))

    def batch_left_shard(self) -> bool:
        """Whether the latest batch took the last window of a shard."""
        if not self.step:
            return False
        counts = self._rows_of_last_batch()
        return any(
            position.window % lane.windows_per_shard < count
            for position, lane, count in zip(self.positions, self._lanes, counts, strict=True)
        )

    def _take_batch(self) -> list[Rows]:
        if self.end_epoch is None and len(self._lanes) == 1 and (inside := self._inside_of_shard()) is not None:
            return [inside]
        rows: list[Rows] = []
        counts = self._rows_by_lane()
        for lane, count in enumerate(counts):
            if count:
                rows += self._take(lane, count)
        if rows:
            # The older order is one of whole batches, also behind the end of a pass.
            self.row += sum(counts) if self.mixture == "exact" else self._batch_size
            self.step += 1
        return rows

    def _skip_to(self, step: int) -> None:
        while self.step < step:
            batches = min(step - self.step, self._whole_batches(step - self.step))
            if batches:
                end = self.row + batches * self._batch_size
                for lane, count in enumerate(self._counts(self.row, end)):
                    self._advance(lane, count)
                self.step += batches
                self.row = end
            elif not self._take_batch():
                return

    def rotate(self) -> None:
        """Moves every lane to the beginning of its next shard; one that stands at a beginning stays."""
        for lane, position in enumerate(self.positions):
            self._advance(lane, -position.window % self._lanes[lane].windows_per_shard)

    def _inside_of_shard(self) -> Rows | None:
        """The next batch in the common case: of one lane, and not of a shard's last windows."""
        lane, (epoch, window), size = self._lanes[0], self.positions[0], self._batch_size
        ordinal, first = divmod(window, lane.windows_per_shard)
        if first + size >= lane.windows_per_shard:
            return None
        self.positions[0] = LanePosition(epoch, window + size)
        self.step += 1
        return Rows(epoch, lane.shards[ordinal], first, size)

    def _lane_steps(self, lane: int) -> int:
        windows = self.positions[lane].window % self._lanes[lane].windows_per_shard
        return int(windows / (self._shares[lane] * self._batch_size)) if windows else 0

    def _rows_by_lane(self) -> list[int]:
        """How many rows of the next batch each lane gives, the end of the last epoch respected."""
        left = [self._left(lane) for lane in range(len(self._lanes))]
        if len(left) == 1 or not all(left):
            # A mixture ends with the first lane that does: what is left of the others would be no mixture.
            return [self._rows_of(min(left))]
        most_rows = self._batch_size if self.end_epoch is None else self._batch_size + self._more_rows
        lanes = self._order.lanes(self.row, most_rows)
        for lane, most in enumerate(left):
            beyond = np.flatnonzero(lanes == lane)[most:]
            if len(beyond):
                lanes = lanes[: beyond[0]]
        return self._by_lane(lanes[: self._rows_of(len(lanes))])

    def _rows_of(self, left: int) -> int:
        """How many of the rows that are left make the next batch."""
        if self._batch_size < left < self._batch_size + self._more_rows and left // 2 >= self._more_rows:
            return left // 2
        return min(left, self._batch_size)

    def _rows_of_last_batch(self) -> list[int]:
        """How many rows each lane gave to it, if it was whole."""
        if len(self._lanes) == 1:
            return [self._batch_size]
        return self._by_lane(self._order.lanes(max(0, self.row - self._batch_size), self._batch_size))

    def _by_lane(self, lanes: npt.NDArray[np.int64]) -> list[int]:
        return [int(count) for count in np.bincount(lanes, minlength=len(self._lanes))]

    def _counts(self, first: int, end: int) -> list[int]:
        """How many of the rows ``first … end − 1`` come from each lane."""
        return [end - first] if len(self._lanes) == 1 else self._order.counts(first, end)

    def _whole_batches(self, most: int) -> int:
        """So many batches, ``most`` at most, are whole whichever lanes their rows come from."""
        if self.end_epoch is None:
            return most
        left = min(self._windows_left(lane, self.end_epoch) for lane in range(len(self._lanes)))
        return max(0, left - self._more_rows) // self._batch_size

    def _left(self, lane: int) -> int:
        """Windows until the end of the last epoch, but no more than decide on the next batch."""
        if self.end_epoch is None:
            return self._batch_size
        return min(self._batch_size + self._more_rows, self._windows_left(lane, self.end_epoch))

    def _windows_left(self, lane: int, end_epoch: int) -> int:
        """Windows until the lane would begin an epoch."""
        position, current = self.positions[lane], self._lanes[lane]
        epoch, windows = position.epoch, -position.window
        for begins, successor in self._queued[lane]:
            if begins >= end_epoch:
                break
            windows += (begins - epoch) * current.windows
            epoch, current = begins, successor
        return max(0, windows + (end_epoch - epoch) * current.windows)

    def _successor(self, lane: int) -> Lane:
        """What the lane reads in its next epoch."""
        queued = self._queued[lane]
        begins = bool(queued) and queued[0].epoch == self.positions[lane].epoch + 1
        return queued[0].lane if begins else self._lanes[lane]

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
        epoch, window = self.positions[lane].epoch, self.positions[lane].window + windows
        while self._queued[lane]:
            begins, successor = self._queued[lane][0]
            before = (begins - epoch) * self._lanes[lane].windows
            if window < before:
                break
            epoch, window = begins, window - before
            self._lanes[lane], self._queued[lane] = successor, self._queued[lane][1:]
        epochs, window = divmod(window, self._lanes[lane].windows)
        self.positions[lane] = LanePosition(epoch + epochs, window)


def _shares(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """The part of all rows that each lane gives."""
    relative = np.asarray(weights, dtype=np.float64) / max(weights)
    shares: npt.NDArray[np.float64] = relative / relative.sum()
    return shares
