"""From a trusted store and a user's options to the lanes of shards a node reads, and what identifies them.

A lane is pinned to the number of shards the store had when the lane began: a store only grows at its end, so that
number stands for the same shards in every later manifest, and the digest of the lane's entries proves it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from loader.errors import LoaderUsageError
from loader.fetch.catalog import Catalog
from loader.options import StreamOptions
from loader.stream.assignment import assign
from loader.stream.schedule import Lane
from loader.stream.windows import num_windows

__all__ = ["LanePlan", "plan_lane", "plan_lanes", "shard_pool"]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """A lane, and what it was made from."""

    source: str | None
    total_shards: int
    """How many shards the store had."""
    shards_sha256: str
    """Over the ids and digests of the lane's shards."""
    lane: Lane


def plan_lanes(catalog: Catalog, options: StreamOptions) -> list[LanePlan]:
    """The lanes of a node, as it would read the store today.

    Raises:
        LoaderUsageError: there is no shard to read, or none of a source that is asked for.
        LoaderError: the index cannot be had.
    """
    total = catalog.manifest.total_shards
    return [plan_lane(catalog, options, number, total) for number in range(options.num_lanes)]


def shard_pool(catalog: Catalog, options: StreamOptions, source: str | None, total_shards: int) -> Sequence[int]:
    """The shards that a lane's are chosen from, ascending: what is held out of training, or what is not.

    The first ``holdout`` shards of every source are held out: which these are never changes as a store grows, so that
    all nodes agree on them, whenever their runs began.

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


def plan_lane(catalog: Catalog, options: StreamOptions, number: int, total_shards: int) -> LanePlan:
    """One lane of a node.

    Args:
        catalog: the store.
        options: the user's.
        number: the lane's: which of the sources.
        total_shards: how many shards of the store it may know.

    Raises:
        LoaderUsageError: the store has fewer, or none to read.
        LoaderError: the index cannot be had.
    """
    if not 1 <= total_shards <= catalog.manifest.total_shards:
        raise LoaderUsageError(
            f"expected 1 to {catalog.manifest.total_shards} shards, which the store has, found {total_shards}"
        )
    source, weight = options.sources[number] if options.sources else (None, 1.0)
    pool = shard_pool(catalog, options, source, total_shards)
    if options.split == "holdout":
        shards = tuple(pool)
    else:
        shards = assign(options.node_id, pool, options.count, options.assignment)
    windows = num_windows(catalog.manifest.shard_tokens, options.seq_len)
    if not windows:
        raise LoaderUsageError(
            f"expected seq_len to be at most {catalog.manifest.shard_tokens - 1}, which a shard holds, found "
            f"{options.seq_len}"
        )
    digest = hashlib.sha256()
    for shard_id in shards:
        digest.update(f"{shard_id}:{catalog.entry(shard_id).sha256}\n".encode())
    return LanePlan(source, total_shards, digest.hexdigest(), Lane(shards, windows, weight))
