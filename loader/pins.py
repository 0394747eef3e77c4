"""Which shards a lane reads in which epoch, however often the node has taken a store that grew.

A *pin* says from which epoch on a lane knew how many shards. The pins of a run, with its options and the steps at which
it left shards early, are all it takes to make any of its batches again: 10 bytes for each time the store was taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self

from annotated_types import Ge, Le

from loader.errors import LoaderUsageError
from loader.fetch.catalog import Catalog
from loader.options import StreamOptions
from loader.plan import LanePlan, plan_lane
from loader.stream.schedule import LanePosition, Schedule

__all__ = ["Pin", "PinnedLane", "PinnedPlan", "check_pins", "pins_of", "schedule_of"]


class Pin(NamedTuple):
    """From an epoch on, a lane reads what its node is assigned of so many shards."""

    epoch: Annotated[int, Ge(0), Le(2**62)]
    total_shards: Annotated[int, Ge(1), Le(2**62)]


class PinnedPlan(NamedTuple):
    """What a lane reads from an epoch on."""

    epoch: int
    plan: LanePlan


@dataclass(frozen=True, slots=True)
class PinnedLane:
    """A lane through the growth of its store."""

    past: tuple[Pin, ...]
    """Of epochs that are over; their shards are not read again."""
    plans: tuple[PinnedPlan, ...]
    """By the epoch they begin with; never empty."""

    @classmethod
    def of(cls, catalog: Catalog, options: StreamOptions, number: int, pins: Sequence[Pin]) -> Self:
        """A lane from its beginning.

        Args:
            catalog: the store.
            options: the user's.
            number: the lane's: which of the sources.
            pins: the lane's.

        Raises:
            LoaderUsageError: the store has fewer shards.
            LoaderError: the index cannot be had.
        """
        return cls(
            (), tuple(PinnedPlan(pin.epoch, plan_lane(catalog, options, number, pin.total_shards)) for pin in pins)
        )

    @property
    def pins(self) -> tuple[Pin, ...]:
        """All of them since the run began, and one that is yet to come."""
        return (*self.past, *(Pin(epoch, plan.total_shards) for epoch, plan in self.plans))

    def at(self, epoch: int) -> LanePlan:
        """What the lane reads in an epoch."""
        return next(pinned.plan for pinned in reversed(self.plans) if pinned.epoch <= epoch)

    def after(self, epoch: int) -> tuple[PinnedPlan, ...]:
        """What it will read later."""
        return tuple(pinned for pinned in self.plans if pinned.epoch > epoch)

    def grown(self, epoch: int, plan: LanePlan) -> PinnedLane:
        """The lane as it is once it has been told, in an epoch, what it reads from the next one on."""
        kept = [pinned for pinned in self.plans if pinned.epoch <= epoch]
        over = [Pin(each.epoch, each.plan.total_shards) for each in kept[:-1]]
        return PinnedLane((*self.past, *over), (kept[-1], PinnedPlan(epoch + 1, plan)))


def check_pins(pins: Sequence[Pin]) -> None:
    """Refuses pins that no lane can have had.

    Raises:
        ValueError: they do not begin with epoch 0, or do not ascend.
    """
    if not pins or pins[0].epoch != 0 or any(pin.total_shards < 1 for pin in pins):
        raise ValueError(f"expected pins from epoch 0 on, of 1 shard or more, found {[tuple(pin) for pin in pins]}")
    for before, pin in itertools.pairwise(pins):
        if pin.epoch <= before.epoch or pin.total_shards <= before.total_shards:
            raise ValueError(
                f"expected pins of ever later epochs and more shards, found {[tuple(pin) for pin in pins]}"
            )


def pins_of(given: Sequence[Sequence[Sequence[int]]], num_lanes: int) -> tuple[tuple[Pin, ...], ...]:
    """Every lane's pins, from what a peer says.

    Args:
        given: for each lane, pairs of an epoch and a number of shards.
        num_lanes: how many lanes the options ask for.

    Raises:
        LoaderUsageError: they are of another form, or no lane can have had them.
    """
    try:
        found = tuple(tuple(Pin(*map(int, pair)) for pair in lane) for lane in given)
        for lane in found:
            check_pins(lane)
    except (TypeError, ValueError) as error:
        raise LoaderUsageError(
            f"pins: for each lane [[epoch, shards], …] as `GenesisDataset.pins` has it: {error}"
        ) from None
    if len(found) != num_lanes:
        raise LoaderUsageError(f"pins: expected those of {num_lanes} lanes, one a source, found {len(found)}")
    return found


def schedule_of(
    lanes: Sequence[PinnedLane],
    batch_size: int,
    *,
    step: int = 0,
    positions: Sequence[LanePosition] | None = None,
) -> Schedule:
    """The schedule of some lanes; `Schedule` has the arguments."""
    epochs = [position.epoch for position in positions] if positions is not None else [0] * len(lanes)
    current = [lane.at(epoch).lane for lane, epoch in zip(lanes, epochs, strict=True)]
    schedule = Schedule(current, batch_size, step=step, positions=positions)
    for number, (lane, epoch) in enumerate(zip(lanes, epochs, strict=True)):
        for pinned in lane.after(epoch):
            schedule.queue_lane(number, pinned.plan.lane, pinned.epoch)
    return schedule
