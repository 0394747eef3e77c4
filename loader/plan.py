"""Which shards each lane of a node reads, in every epoch, however often the node has taken a store that grew.

A lane is pinned to the number of shards the store had when the lane began: a store only grows at its end, so that
number stands for the same shards in every later manifest, and the digest of the lane's entries proves it. A *pin* says
from which epoch on a lane knew how many shards. The pins of a run, with its options and rotations, are all it takes to
make any of its batches again: 10 bytes for each time the store was taken.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Ge, Le

from loader.errors import LoaderUsageError
from loader.fetch.catalog import Catalog
from loader.options import StreamOptions
from loader.stream.assignment import assign
from loader.stream.schedule import Lane
from loader.stream.windows import num_windows


class Pin(NamedTuple):
    """From an epoch on, a lane reads the node's assignment among this many shards."""

    epoch: Annotated[int, Ge(0), Le(2**62)]
    total_shards: Annotated[int, Ge(1), Le(2**62)]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """A lane, and its origin."""

    pin: Pin
    source: str | None
    shards_sha256: str
    """Over the ids and digests of the lane's shards."""
    lane: Lane


def shard_pool(catalog: Catalog, options: StreamOptions, source: str | None, total_shards: int) -> Sequence[int]:
    """The shards from which those of a lane are chosen, ascending.

    The first ``holdout`` shards of every source are held out of training. They stay the same as a store grows, so all
    nodes agree on them, whenever their runs began.

    Raises:
        LoaderUsageError: there is none.
    """
    by_source: dict[str, Sequence[int]] | None = None
    if source is not None or options.holdout or options.split == "holdout":
        by_source = catalog.shards_by_source(total_shards)
    if by_source is None:
        pool: Sequence[int] = range(total_shards)
    else:
        if source is not None and source not in by_source:
            raise LoaderUsageError(
                f"expected a source the store has shards of ({', '.join(sorted(by_source)) or 'none'}), "
                f"found {source!r}"
            )
        chosen = [by_source[source]] if source is not None else list(by_source.values())
        held_out = options.split == "holdout"
        parts = [ids[: options.holdout] if held_out else ids[options.holdout :] for ids in chosen]
        pool = parts[0] if len(parts) == 1 else sorted(itertools.chain.from_iterable(parts))
    if not len(pool):
        raise LoaderUsageError(
            f"expected shards to read, found none: the store has {total_shards}, {options.holdout} of each source are "
            f"held out, and split is {options.split!r}"
        )
    return pool


def shards_of_node(options: StreamOptions, node_id: str, pool: Sequence[int]) -> tuple[int, ...]:
    """The shards of a pool that a node reads under these options: its share, or all of them where they are held out."""
    if options.split == "holdout":
        return tuple(pool)
    count = len(pool) if options.count is None else options.count
    return assign(node_id, pool, count, options.assignment)


def plan_lane(catalog: Catalog, options: StreamOptions, number: int, pin: Pin) -> LanePlan:
    """Plans one lane of a node.

    Args:
        catalog: the store.
        options: the user's.
        number: index of the lane's source.
        pin: only the first ``pin.total_shards`` shards of the store count.

    Raises:
        LoaderUsageError: the store has fewer, or none to read.
        LoaderError: the index is unavailable.
    """
    if not 1 <= pin.total_shards <= catalog.manifest.total_shards:
        raise LoaderUsageError(
            f"expected 1 to {catalog.manifest.total_shards} shards, which the store has, found {pin.total_shards}"
        )
    source, weight = options.sources[number] if options.sources else (None, 1.0)
    shards = shards_of_node(options, options.node_id, shard_pool(catalog, options, source, pin.total_shards))
    windows = num_windows(catalog.manifest.shard_tokens, options.seq_len)
    if not windows:
        raise LoaderUsageError(
            f"expected seq_len to be at most {catalog.manifest.shard_tokens - 1}, which a shard holds, found "
            f"{options.seq_len}"
        )
    digest = hashlib.sha256()
    for shard_id in shards:
        digest.update(f"{shard_id}:{catalog.entry(shard_id).sha256}\n".encode())
    return LanePlan(pin, source, digest.hexdigest(), Lane(shards, windows, weight))


@dataclass(frozen=True, slots=True)
class PinnedLane:
    """A lane through the growth of its store."""

    past: tuple[Pin, ...]
    """Pins of epochs that are over; their shards are not read again."""
    plans: tuple[LanePlan, ...]
    """In the order of their first epochs; never empty."""

    @property
    def pins(self) -> tuple[Pin, ...]:
        """All pins since the run began, and one that is yet to come."""
        return (*self.past, *(plan.pin for plan in self.plans))

    def at(self, epoch: int) -> LanePlan:
        """The plan of an epoch."""
        return next(plan for plan in reversed(self.plans) if plan.pin.epoch <= epoch)

    def after(self, epoch: int) -> tuple[LanePlan, ...]:
        """The plans of later epochs."""
        return tuple(plan for plan in self.plans if plan.pin.epoch > epoch)

    def grown(self, epoch: int, plan: LanePlan) -> PinnedLane:
        """The lane that stands in ``epoch`` and follows ``plan`` from the next epoch on."""
        kept = [each for each in self.plans if each.pin.epoch <= epoch]
        return PinnedLane((*self.past, *(each.pin for each in kept[:-1])), (kept[-1], plan))


def check_pins(pins: Sequence[Pin]) -> None:
    """Checks that a lane can have had these pins.

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


def parse_pins(given: Sequence[Sequence[Sequence[int]]], num_lanes: int) -> tuple[tuple[Pin, ...], ...]:
    """Parses the pins that a peer states: for each lane, pairs of an epoch and a number of shards.

    Raises:
        LoaderUsageError: they are malformed, or no ``num_lanes`` lanes can have had them.
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
