"""Which shards nodes have, for one node or thousands of them, without reading more of the store than that takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loader.errors import LoaderUsageError
from loader.fetch.catalog import Catalog
from loader.fetch.facts import ShardFacts
from loader.fetch.shards import cache_name
from loader.options import StreamOptions
from loader.plan import shard_pool
from loader.session import Session
from loader.stream.assignment import assign

__all__ = ["PlannedShard", "assigned_lanes", "in_reading_order", "planned_shards", "total_shards_of", "wire_bytes"]


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard that a node is given."""

    id: int
    source: str
    tokens: int
    size_bytes: int
    """In the cache."""
    packed_bytes: int | None
    """As it is transferred; None if the store has it in full size only."""
    cached: bool
    """The cache has a file of that name; whether it is sound is known when it is opened."""


def total_shards_of(catalog: Catalog, asked: int | None) -> int:
    """How many shards of the store count: as many as asked for, or all.

    Raises:
        LoaderUsageError: the store has fewer.
    """
    found = catalog.manifest.total_shards
    if asked is not None and asked > found:
        raise LoaderUsageError(f"--total-shards: expected at most {found}, which the store has, found {asked}")
    return found if asked is None else asked


def assigned_lanes(
    catalog: Catalog, options: StreamOptions, node_ids: Iterable[str], total_shards: int
) -> dict[str, list[tuple[int, ...]]]:
    """For each node its shards, one lane a source, as `loader.plan.plan_lanes` gives them.

    Args:
        catalog: the store.
        options: the run's; its node id does not matter.
        node_ids: the nodes.
        total_shards: how many shards of the store count.

    Raises:
        LoaderUsageError: there is no shard to give.
        LoaderError: the index cannot be had.
    """
    names: list[str | None] = [name for name, _ in options.sources]
    pools = [shard_pool(catalog, options, name, total_shards) for name in names or [None]]
    if options.split == "holdout":
        return {node_id: [tuple(pool) for pool in pools] for node_id in node_ids}
    return {
        node_id: [assign(node_id, pool, options.count, options.assignment) for pool in pools] for node_id in node_ids
    }


def in_reading_order(lanes: Sequence[Sequence[int]], most: int | None = None) -> list[int]:
    """Shards in the order they are wanted: every lane's first, every lane's second, and so on; none twice.

    Args:
        lanes: shards of each lane.
        most: of each lane.
    """
    longest = max((len(lane) for lane in lanes), default=0)
    ordinals = range(longest if most is None else min(longest, most))
    return list(dict.fromkeys(lane[ordinal] for ordinal in ordinals for lane in lanes if ordinal < len(lane)))


def planned_shards(session: Session, shard_ids: Iterable[int]) -> list[PlannedShard]:
    """What the index and the cache say of some shards.

    Raises:
        LoaderError: the index cannot be had.
    """
    return [_planned(session, session.catalog.entry(shard_id)) for shard_id in shard_ids]


def wire_bytes(shard: PlannedShard) -> int:
    """What comes over the network for it."""
    return shard.size_bytes if shard.packed_bytes is None else shard.packed_bytes


def _planned(session: Session, entry: ShardFacts) -> PlannedShard:
    return PlannedShard(
        id=entry.id,
        source=entry.source,
        tokens=entry.tokens,
        size_bytes=entry.size_bytes,
        packed_bytes=entry.packed.size_bytes if entry.packed is not None else None,
        cached=session.cache.contains(cache_name(entry)),
    )
