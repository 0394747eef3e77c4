"""One node's stream: its lanes, the schedule over them, the losses of its plateau rule, and its saved form.

The stream is a function of the options, the store, the steps of its rotations and the epochs in which it took a store
that grew. `Schedule` alone decides which rows come next; `Feed` makes batches of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from loader.errors import LoaderUsageError, StateMismatchError
from loader.fetch.catalog import Catalog
from loader.options import StreamOptions
from loader.plan import LanePlan, Pin, PinnedLane, plan_lane
from loader.state import LaneState, StreamIdentity, StreamState
from loader.stream.plateau import LossHistory, Plateau
from loader.stream.schedule import LanePosition, Schedule

logger = logging.getLogger(__name__)


class NodeStream:
    """The stream of a node. Use `begin` or `resume`.

    Attributes:
        schedule: gives the rows of batch after batch.
    """

    def __init__(
        self, options: StreamOptions, lanes: Sequence[PinnedLane], schedule: Schedule, losses: Sequence[float] = ()
    ) -> None:
        self._options = options
        self._lanes = list(lanes)
        self._history = LossHistory(options.plateau.history, losses)
        self._shards_of_losses = schedule.shards
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
            pins: pins of every lane; by default each is pinned to the shards there are.
            rotations: the steps before which a shard will be left early.

        Raises:
            LoaderError: the node has no shards, or the index is unavailable.
        """
        if pins is None:
            pins = [[Pin(0, options.total_shards or catalog.manifest.total_shards)]] * options.num_lanes
        lanes = [
            PinnedLane((), tuple(plan_lane(catalog, options, number, pin) for pin in of_lane))
            for number, of_lane in enumerate(pins)
        ]
        schedule = Schedule(
            [lane.at(0).lane for lane in lanes],
            options.rows_per_step,
            mixture=options.mixture,
            world_size=options.world_size,
            epochs=options.epochs,
            rotations=rotations,
        )
        _queue_later_plans(schedule, lanes)
        return cls(options, lanes, schedule)

    @classmethod
    def resume(cls, options: StreamOptions, catalog: Catalog, state: StreamState) -> NodeStream:
        """A stream at a saved state.

        Raises:
            StateMismatchError: the state belongs to another stream or store.
            LoaderError: the index is unavailable.
        """
        is_resized = (state.world_size or 1) != options.world_size
        state.check_identity(StreamIdentity.of(options), is_resized=is_resized)
        if is_resized:
            _check_resizing(options, state)
        lanes = _lanes_of(state, options, catalog)
        for lane, saved in zip(lanes, state.lanes, strict=True):
            windows = lane.at(saved.epoch).lane.windows
            if saved.window >= windows:
                raise StateMismatchError(f"expected a lane to stand at a window below {windows}, found {saved.window}")
        resumes_pass = options.epochs is not None and state.end_epoch is not None
        schedule = Schedule(
            [lane.at(saved.epoch).lane for lane, saved in zip(lanes, state.lanes, strict=True)],
            options.rows_per_step,
            mixture=state.mixture or ("weyl" if len(lanes) > 1 else options.mixture),
            world_size=options.world_size,
            epochs=options.epochs,
            end_epoch=state.end_epoch if resumes_pass else None,
            step=state.step,
            row=state.row,
            positions=[LanePosition(saved.epoch, saved.window) for saved in state.lanes],
            rotations=state.rotations,
            resumes_pass=resumes_pass,
        )
        _queue_later_plans(schedule, lanes)
        return cls(options, lanes, schedule, state.losses)

    @property
    def plans(self) -> tuple[LanePlan, ...]:
        """The plans of the epochs in which the lanes stand."""
        positions = self.schedule.positions
        return tuple(lane.at(position.epoch) for lane, position in zip(self._lanes, positions, strict=True))

    @property
    def pins(self) -> tuple[tuple[Pin, ...], ...]:
        """For every lane, from which epoch on it reads, or will read, the assignment among how many shards."""
        return tuple(lane.pins for lane in self._lanes)

    def report_loss(self, loss: float) -> Plateau | None:
        """Records the loss of the latest batch.

        With its last batch a shard is left anyway, so that loss is ignored.

        Returns:
            The plateau, if the rule fires for the losses on the current shards.
        """
        if self.schedule.batch_left_shard():
            return None
        shards = self.schedule.shards
        if shards != self._shards_of_losses:
            self._history.clear()
            self._shards_of_losses = shards
        self._history.add(loss)
        rule = self._options.plateau
        plateau = rule.plateau(self._history.losses())
        if plateau is None or not self.schedule.has_applied_rotations:
            return None
        if self.schedule.steps_on_shard() < rule.min_steps:
            return None
        self._history.clear()
        logger.info("[GENESIS] Loss plateau detected: avg=%.4f, variance=%.6f", plateau.mean, plateau.variance)
        logger.info("[GENESIS] Rotating to fresh data for continued learning")
        return plateau

    def adopt(self, catalog: Catalog) -> int:
        """Lets each lane read, from its next epoch on, what the node is assigned in a newer store.

        Returns:
            How many shards the store has now.

        Raises:
            StateMismatchError: the store is not the same store, grown.
            LoaderError: the index is unavailable.
        """
        _lanes_of(self.state(), self._options, catalog)
        total_shards = catalog.manifest.total_shards
        plans = [
            plan_lane(catalog, self._options, number, Pin(position.epoch + 1, total_shards))
            for number, position in enumerate(self.schedule.positions)
        ]
        for number, (lane, plan) in enumerate(zip(self._lanes, plans, strict=True)):
            if total_shards != lane.pins[-1].total_shards:
                self._lanes[number] = lane.grown(plan.pin.epoch - 1, plan)
                self.schedule.queue_lane(number, plan.lane)
        return total_shards

    def state(self, *, in_worker: bool = False) -> StreamState:
        """The state to resume from.

        Args:
            in_worker: several workers make the pass, so it is not over when this one has nothing left to do.
        """
        schedule = self.schedule
        # The next report drops losses of a shard that was left, which a resumed stream could not know.
        losses = self._history.losses() if schedule.shards == self._shards_of_losses else []
        lanes = zip(self._lanes, schedule.positions, strict=True)
        is_exact = len(self._lanes) > 1 and schedule.mixture == "exact"
        several_ranks = self._options.world_size > 1
        return StreamState(
            identity=StreamIdentity.of(self._options),
            version=2 if is_exact or several_ranks else 1,
            mixture="exact" if is_exact else None,
            row=schedule.row if is_exact else None,
            world_size=self._options.world_size if several_ranks else None,
            step=schedule.step,
            lanes=tuple(_lane_state(lane, position) for lane, position in lanes),
            rotations=schedule.rotations,
            losses=tuple(losses),
            end_epoch=None if schedule.pass_is_over and not in_worker else schedule.end_epoch,
        )


def _check_resizing(options: StreamOptions, state: StreamState) -> None:
    """Checks that a state of another number of ranks says where these ranks go on.

    Rows are counted over all ranks, so it does, at any step; but for what is counted in steps.
    """
    found, wanted = state.world_size or 1, options.world_size
    rows = state.identity.batch_size * found
    problem = ""
    if state.worker is not None:
        problem = (
            "was taken in a DataLoader worker, which knows its own batches only; save "
            "dataset.state_dict(step=N), or resume with as many ranks"
        )
    elif any(step >= state.step for step in state.rotations):
        problem = "is to leave a shard at a later step; resume with as many ranks, or save a state one step later"
    elif len(state.lanes) > 1 and state.mixture != "exact" and rows != options.rows_per_step:
        problem = (
            f"has a mixture in the older order ('weyl'), which goes by whole batches; keep batch_size × world_size "
            f"at {rows}"
        )
    if problem:
        raise StateMismatchError(f"expected a state of {wanted} ranks, found one of {found}, which {problem}")


def _queue_later_plans(schedule: Schedule, lanes: Sequence[PinnedLane]) -> None:
    for number, lane in enumerate(lanes):
        for plan in lane.after(schedule.positions[number].epoch):
            schedule.queue_lane(number, plan.lane, plan.pin.epoch)


def _lane_state(lane: PinnedLane, position: LanePosition) -> LaneState:
    plan, later = lane.at(position.epoch), lane.after(position.epoch)
    pins = lane.pins[: -len(later)] if later else lane.pins
    return LaneState(
        source=plan.source,
        total_shards=plan.pin.total_shards,
        shards_sha256=plan.shards_sha256,
        epoch=position.epoch,
        window=position.window,
        next_total_shards=later[0].pin.total_shards if later else None,
        pins=pins if len(pins) > 1 else None,
    )


def _lanes_of(state: StreamState, options: StreamOptions, catalog: Catalog) -> list[PinnedLane]:
    """The lanes of a state, planned again in a store that may have grown since."""
    if len(state.lanes) != options.num_lanes:
        raise StateMismatchError(f"expected a state of {options.num_lanes} lanes, found {len(state.lanes)}")
    if state.total_shards > catalog.manifest.total_shards:
        raise StateMismatchError(
            f"expected a store of at least {state.total_shards} shards, as the run had, found "
            f"{catalog.manifest.total_shards}"
        )
    try:
        return [_lane_of(lane, options, catalog, number) for number, lane in enumerate(state.lanes)]
    except LoaderUsageError as error:
        raise StateMismatchError(f"the state of step {state.step} does not fit the store: {error}") from None


def _lane_of(lane: LaneState, options: StreamOptions, catalog: Catalog, number: int) -> PinnedLane:
    pins = lane.pins or (Pin(0, lane.total_shards),)
    plan = plan_lane(catalog, options, number, pins[-1])
    if lane.shards_sha256 != plan.shards_sha256:
        raise StateMismatchError(
            f"expected the shards {list(plan.lane.shards)} that the run read, found others under the same ids: "
            "this is another store, or it was made anew"
        )
    plans = [plan]
    if lane.next_total_shards is not None:
        plans.append(plan_lane(catalog, options, number, Pin(lane.epoch + 1, lane.next_total_shards)))
    return PinnedLane(pins[:-1], tuple(plans))
