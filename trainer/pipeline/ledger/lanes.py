"""From a store and a run's options to what an account is of: the lanes of shards that are trained on.

As the loader has it: each source a lane of its own with its weight, or one lane of all shards; the first `holdout`
shards of every source in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loader.fetch.catalog import Catalog
from loader.options import StreamOptions
from loader.plan import shard_pool
from loader.stream.assignment import Assignment, assign
from loader.stream.windows import num_windows
from trainer.errors import TrainerUsageError
from trainer.pipeline.ledger.config import LedgerConfig
from trainer.pipeline.ledger.messages import MAX_PREFERRED
from trainer.pipeline.ledger.units import LaneSpec, Layout, LedgerSpec

__all__ = ["Lane", "lanes_of", "preferred_shards", "spec_of"]


@dataclass(frozen=True, slots=True)
class Lane:
    """Shards that are passed over together."""

    spec: LaneSpec
    shards: Sequence[int]
    """Ascending."""


def lanes_of(catalog: Catalog, sources: Mapping[str, float], holdout: int) -> tuple[Lane, ...]:
    """The lanes of a run, as the store is now.

    Args:
        catalog: the store's.
        sources: weights by source; empty: all shards alike.
        holdout: the first so many shards of every source are left out.

    Raises:
        LoaderError: there is no shard to train on, or the index cannot be had.
    """
    options = StreamOptions("ledger", sources=tuple(sources.items()), holdout=holdout)
    chosen: list[tuple[str | None, float]] = [*sources.items()] or [(None, 1.0)]
    lanes = []
    for source, weight in chosen:
        shards = shard_pool(catalog, options, source, catalog.manifest.total_shards)
        first = catalog.entry(shards[0]).sha256
        lanes.append(Lane(LaneSpec(source=source, weight=float(weight), first_shard_sha256=first), shards))
    return tuple(lanes)


def spec_of(
    catalog: Catalog,
    lanes: Sequence[Lane],
    *,
    stages: Sequence[str],
    seed: int,
    seq_len: int,
    micro_batch_rows: int,
    config: LedgerConfig,
) -> LedgerSpec:
    """What the account of a run is of.

    Args:
        catalog: the store's.
        lanes: of the same store.
        stages: all of the run's.
        seed: of the run.
        seq_len: T.
        micro_batch_rows: B.
        config: how units are cut.

    Raises:
        TrainerUsageError: a shard holds no window, or units are no multiple of micro-batches.
    """
    windows = num_windows(catalog.manifest.shard_tokens, seq_len)
    if windows < 1:
        raise TrainerUsageError(
            f"inner.seq_len: expected at most {catalog.manifest.shard_tokens - 1}, which a shard holds, found {seq_len}"
        )
    layout = Layout(
        num_windows=windows,
        seq_len=seq_len,
        micro_batch_rows=micro_batch_rows,
        unit_rows=config.rows_of_unit(micro_batch_rows),
    )
    return LedgerSpec(seed=seed, layout=layout, lanes=tuple(lane.spec for lane in lanes), stages=tuple(stages))


def preferred_shards(node_id: str, lanes: Sequence[Lane], count: int, assignment: Assignment) -> tuple[int, ...]:
    """The shards a driver is assigned, of every lane: those it asks for first.

    Raises:
        LoaderUsageError: the node has no name.
    """
    shards = [shard for lane in lanes for shard in assign(node_id, lane.shards, count, assignment)]
    return tuple(shards[:MAX_PREFERRED])
