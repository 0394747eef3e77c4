"""One node's stream as rows of windows: where it stands, and when it left a shard early.

Everything that decides the batches, and nothing that makes them: `Feed` does that. A rotation is remembered by the step
it came before, a store that grew by the epoch that first read it, so the whole stream is a function of the options, the
store and those two lists.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from loader.errors import LoaderUsageError, StateMismatchError
from loader.fetch.catalog import Catalog
from loader.options import StreamOptions
from loader.pins import Pin, PinnedLane, PinnedPlan, schedule_of
from loader.plan import LanePlan, plan_lane, plan_lanes
from loader.state import LaneState, StreamIdentity, StreamState
from loader.stream.plateau import LossHistory, Plateau
from loader.stream.schedule import LanePosition, Rows, Schedule, ScheduleMark

__all__ = ["NodeStream"]

logger = logging.getLogger(__name__)

_MOST_PASSES: Final = 1_000_000
"""That are gone through for a step: each is arithmetic, but a million of them take 15 s."""


class _Mark(NamedTuple):
    """A position to come back to."""

    schedule: ScheduleMark
    applied: int


class NodeStream:
    """The rows of batch after batch. Use `begin` or `resume`."""

    def __init__(
        self,
        options: StreamOptions,
        lanes: Sequence[PinnedLane],
        schedule: Schedule,
        rotations: Sequence[int] = (),
        losses: Sequence[float] = (),
    ) -> None:
        self._options = options
        self._lanes = list(lanes)
        self._rotations = list(rotations)
        self._applied = bisect.bisect_left(self._rotations, schedule.step)
        self._history = LossHistory(options.plateau.history, losses)
        self._shard_of_losses = _shards(schedule)
        self._resumes_pass = False
        self._pass_is_over = True
        self.schedule = schedule

    @classmethod
    def begin(
        cls,
        options: StreamOptions,
        catalog: Catalog,
        pins: Sequence[Sequence[Pin]] | None = None,
        rotations: Sequence[int] = (),
    ) -> NodeStream:
        """A stream at its beginning.

        Args:
            options: the user's.
            catalog: the store.
            pins: of every lane; by default each is pinned to the shards there are.
            rotations: the steps before which a shard will be left early.

        Raises:
            LoaderError: the node has no shards, or the index cannot be had.
        """
        if pins is None:
            pins = [[Pin(0, catalog.manifest.total_shards)]] * options.num_lanes
        lanes = [PinnedLane.of(catalog, options, number, each) for number, each in enumerate(pins)]
        return cls(options, lanes, schedule_of(lanes, options.batch_size), sorted(rotations))

    @classmethod
    def resume(cls, options: StreamOptions, catalog: Catalog, state: StreamState) -> NodeStream:
        """A stream where a state says it stood.

        Raises:
            StateMismatchError: the state is of another stream or store.
            LoaderError: the index cannot be had.
        """
        state.check_identity(StreamIdentity.of(options))
        lanes = _lanes_of(state, options, catalog)
        positions = [LanePosition(lane.epoch, lane.window) for lane in state.lanes]
        for lane, position in zip(lanes, positions, strict=True):
            windows = lane.at(position.epoch).lane.windows
            if position.window >= windows:
                raise StateMismatchError(
                    f"expected a lane to stand at a window below {windows}, found {position.window}"
                )
        schedule = schedule_of(lanes, options.batch_size, step=state.step, positions=positions)
        stream = cls(options, lanes, schedule, sorted(state.rotations), state.losses)
        if options.epochs is not None and state.end_epoch is not None:
            schedule.end_epoch = state.end_epoch
            stream._resumes_pass, stream._pass_is_over = True, False
        return stream

    @property
    def step(self) -> int:
        """Batches taken or passed over."""
        return self.schedule.step

    @property
    def rotations(self) -> tuple[int, ...]:
        """The steps before which a shard was, or will be, left early."""
        return tuple(self._rotations)

    @property
    def plans(self) -> tuple[LanePlan, ...]:
        """The lanes as they are read now."""
        positions = self.schedule.positions
        return tuple(lane.at(position.epoch) for lane, position in zip(self._lanes, positions, strict=True))

    @property
    def pins(self) -> tuple[tuple[Pin, ...], ...]:
        """Of every lane: from which epoch on it reads, or will read, what is assigned of how many shards."""
        return tuple(lane.pins for lane in self._lanes)

    def begin_pass(self) -> None:
        """Lets the stream run to the end of the pass it is in; of the next one if that is over.

        A pass that a state was taken in is gone on with even if only its end is left: that is what came next.
        """
        resumes, self._resumes_pass = self._resumes_pass, False
        self._pass_is_over = False
        epochs = self._options.epochs
        if epochs is not None and not resumes:
            furthest = max(position.epoch for position in self.schedule.positions)
            self.schedule.end_epoch = (furthest // epochs + 1) * epochs

    def next_rows(self) -> list[Rows]:
        """Takes the next batch; empty at the end of a pass."""
        while self._applied < len(self._rotations) and self._rotations[self._applied] <= self.schedule.step:
            self.schedule.rotate()
            self._applied += 1
        rows = self.schedule.next_rows()
        self._pass_is_over = not rows
        return rows

    def seek(self, step: int) -> None:
        """Passes over batches up to ``step``, or to the end of the pass, leaving shards early where that is known."""
        while self._applied < len(self._rotations) and self._rotations[self._applied] < step:
            self.schedule.skip_to(self._rotations[self._applied])
            if self.step < self._rotations[self._applied]:
                return  # The pass is over; the rotation is one of the next.
            self.schedule.rotate()
            self._applied += 1
        self.schedule.skip_to(step)

    def seek_through(self, step: int) -> None:
        """Passes over batches up to ``step``, from pass to pass.

        Raises:
            LoaderUsageError: the step is absurdly far, for passes as short as these.
        """
        for _ in range(_MOST_PASSES):
            if self.step >= step:
                return
            self.begin_pass()
            self.seek(step)
        raise LoaderUsageError(
            f"expected a step within {_MOST_PASSES:,} passes, found {step}, which is further than step {self.step}"
        )

    def add_rotation(self, step: int) -> None:
        """Lets the current shards be left before batch ``step``, which was not taken yet; twice is once."""
        position = bisect.bisect_left(self._rotations, step)
        if self._rotations[position : position + 1] != [step]:
            self._rotations.insert(position, step)

    def report_loss(self, loss: float) -> Plateau | None:
        """Remembers the loss of the latest batch; what the plateau rule makes of those on its shards, if it fires.

        With its last batch a shard is left anyway, so nothing follows from that loss.
        """
        if self.schedule.batch_left_shard():
            return None
        shards = _shards(self.schedule)
        if shards != self._shard_of_losses:
            self._history.clear()
            self._shard_of_losses = shards
        self._history.add(loss)
        rule = self._options.plateau
        plateau = rule.plateau(self._history.losses())
        if plateau is None or self._applied < len(self._rotations):
            return None
        if self.schedule.steps_on_shard() < rule.min_steps:
            return None
        self._history.clear()
        logger.info("[GENESIS] Loss plateau detected: avg=%.4f, variance=%.6f", plateau.mean, plateau.variance)
        logger.info("[GENESIS] Rotating to fresh data for continued learning")
        return plateau

    def adopt(self, catalog: Catalog) -> int:
        """Lets each lane read, from its next epoch on, what the node is assigned of a newer store.

        Returns:
            How many shards the store has now.

        Raises:
            StateMismatchError: it is not the same store, grown.
            LoaderError: the index cannot be had.
        """
        _lanes_of(self.state(), self._options, catalog)
        for number, plan in enumerate(plan_lanes(catalog, self._options)):
            lane, epoch = self._lanes[number], self.schedule.positions[number].epoch
            if plan.total_shards != lane.pins[-1].total_shards:
                self._lanes[number] = lane.grown(epoch, plan)
                self.schedule.queue_lane(number, plan.lane)
        return catalog.manifest.total_shards

    def mark(self) -> _Mark:
        """The position, to come back to."""
        return _Mark(self.schedule.mark(), self._applied)

    def rewind(self, mark: _Mark) -> None:
        """Goes back to a position."""
        self.schedule.rewind(mark.schedule)
        self._applied = mark.applied

    def state(self, *, in_worker: bool = False) -> StreamState:
        """Where the stream stands.

        Args:
            in_worker: one of several that make a pass: that this one has nothing left to do does not end the pass.
        """
        # Losses of a shard that was left are forgotten at the next report, which a resumed stream could not know.
        losses = self._history.losses() if _shards(self.schedule) == self._shard_of_losses else []
        lanes = zip(self._lanes, self.schedule.positions, strict=True)
        return StreamState(
            identity=StreamIdentity.of(self._options),
            step=self.schedule.step,
            lanes=tuple(_lane_state(lane, position) for lane, position in lanes),
            rotations=tuple(self._rotations),
            losses=tuple(losses),
            end_epoch=None if self._pass_is_over and not in_worker else self.schedule.end_epoch,
        )


def _lane_state(lane: PinnedLane, position: LanePosition) -> LaneState:
    plan, later = lane.at(position.epoch), lane.after(position.epoch)
    pins = lane.pins[: -len(later)] if later else lane.pins
    return LaneState(
        source=plan.source,
        total_shards=plan.total_shards,
        shards_sha256=plan.shards_sha256,
        epoch=position.epoch,
        window=position.window,
        next_total_shards=later[0].plan.total_shards if later else None,
        pins=pins if len(pins) > 1 else None,
    )


def _lanes_of(state: StreamState, options: StreamOptions, catalog: Catalog) -> list[PinnedLane]:
    """The lanes a state speaks of, found again in a store that may have grown since."""
    if len(state.lanes) != options.num_lanes:
        raise StateMismatchError(f"expected a state of {options.num_lanes} lanes, found {len(state.lanes)}")
    most = max(lane.next_total_shards or lane.total_shards for lane in state.lanes)
    if most > catalog.manifest.total_shards:
        raise StateMismatchError(
            f"expected a store of at least {most} shards, as the run had, found {catalog.manifest.total_shards}"
        )
    try:
        return [_lane_of(lane, options, catalog, number) for number, lane in enumerate(state.lanes)]
    except LoaderUsageError as error:
        raise StateMismatchError(f"the state of step {state.step} does not fit the store: {error}") from None


def _lane_of(lane: LaneState, options: StreamOptions, catalog: Catalog, number: int) -> PinnedLane:
    plan = plan_lane(catalog, options, number, lane.total_shards)
    if lane.shards_sha256 != plan.shards_sha256:
        raise StateMismatchError(
            f"expected the shards {list(plan.lane.shards)} that the run read, found others under the same ids: "
            "this is another store, or it was made anew"
        )
    pins = lane.pins or (Pin(0, lane.total_shards),)
    plans = [PinnedPlan(pins[-1].epoch, plan)]
    if lane.next_total_shards is not None:
        later = plan_lane(catalog, options, number, lane.next_total_shards)
        plans.append(PinnedPlan(lane.epoch + 1, later))
    return PinnedLane(pins[:-1], tuple(plans))


def _shards(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    return tuple(
        (position.epoch, position.window // lane.windows_per_shard)
        for position, lane in zip(schedule.positions, schedule.lanes, strict=True)
    )
