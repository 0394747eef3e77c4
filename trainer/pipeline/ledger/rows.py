"""The store as the ledger sees it: lanes of shards to lease, and the rows of any micro-batch by its name alone.

Lanes are the loader's: one per source with its weight, or one of all shards; they belong to all drivers of the run
together. The order of a shard's windows in an epoch depends on the run's seed, the epoch and the shard, not on the
reader, so any driver can do any micro-batch. A few shards stay mapped, the next ones are opened in threads. The
trade-off: rows of one micro-batch are of one shard; sources mix from unit to unit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from loader.fetch.catalog import Catalog
from loader.fetch.shards import OpenShard, Prefetcher
from loader.options import StreamOptions
from loader.plan import shard_pool
from loader.session import Session
from loader.stream.assignment import Assignment, assign
from loader.stream.windows import WindowView, num_windows, window_order
from trainer.errors import TrainerUsageError
from trainer.pipeline.ledger.config import LedgerConfig
from trainer.pipeline.ledger.messages import MAX_PREFERRED
from trainer.pipeline.ledger.units import LaneSpec, Layout, LedgerSpec
from trainer.pipeline.protocol.work import MicroBatchId

_MOST_OPEN = 8
_MOST_AHEAD = 2


@dataclass(frozen=True, slots=True)
class LedgerLane:
    """A lane and its shards, ascending."""

    spec: LaneSpec
    shards: Sequence[int]


def lanes_of(catalog: Catalog, sources: Mapping[str, float], holdout: int) -> tuple[LedgerLane, ...]:
    """Returns the lanes of a run, as the store is now, without the first ``holdout`` shards of every source.

    With no ``sources`` (weights by source), one lane has all shards alike. Raises LoaderError if there is no shard to
    train on, or the index cannot be had.
    """
    options = StreamOptions("ledger", sources=tuple(sources.items()), holdout=holdout)
    chosen: list[tuple[str | None, float]] = [*sources.items()] or [(None, 1.0)]
    lanes = []
    for source, weight in chosen:
        shards = shard_pool(catalog, options, source, catalog.manifest.total_shards)
        first = catalog.entry(shards[0]).sha256
        lanes.append(LedgerLane(LaneSpec(source=source, weight=float(weight), first_shard_sha256=first), shards))
    return tuple(lanes)


def spec_of(
    catalog: Catalog,
    lanes: Sequence[LedgerLane],
    *,
    stages: Sequence[str],
    seed: int,
    seq_len: int,
    micro_batch_rows: int,
    config: LedgerConfig,
) -> LedgerSpec:
    """Returns what the account of a run is of, with all of its stages.

    Raises TrainerUsageError if a shard holds no window, or units are no multiple of micro-batches.
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


def preferred_shards(node_id: str, lanes: Sequence[LedgerLane], count: int, assignment: Assignment) -> tuple[int, ...]:
    """Returns the shards of every lane that a driver is assigned, and asks for first."""
    shards = [shard for lane in lanes for shard in assign(node_id, lane.shards, count, assignment)]
    return tuple(shards[:MAX_PREFERRED])


class MicroBatches:
    """Reads micro-batches; safe to use from several threads, which wait for each other."""

    def __init__(self, session: Session, seed: int, layout: Layout) -> None:
        self._session = session
        self._seed = seed
        self._layout = layout
        self._prefetcher = Prefetcher(self._open, session.options.timeout_s)
        self._views: OrderedDict[int, WindowView] = OrderedDict()
        self._order = lru_cache(_MOST_OPEN)(window_order)
        self._lock = threading.Lock()

    def read(self, micro_batch: MicroBatchId) -> tuple[Tensor, Tensor]:
        """Returns inputs and labels of a micro-batch, int64[B, T] each; B is smaller than the others' at a shard's end.

        Raises TrainerUsageError if there is none of that name, LoaderError if the shard cannot be had.
        """
        layout, epoch, shard = self._layout, micro_batch.epoch, micro_batch.shard
        count = layout.rows_of(micro_batch)
        with self._lock:
            order = self._order(layout.num_windows, self._seed, epoch, shard)
            view = self._views.pop(shard, None)
            if view is None:
                view = WindowView.of(self._prefetcher.take(shard).ids, layout.seq_len)
            self._views[shard] = view
            if len(self._views) > _MOST_OPEN:
                self._views.popitem(last=False)
            inputs, labels = view.gather(order[micro_batch.row : micro_batch.row + count])
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def want(self, shards: Iterable[int]) -> None:
        """Opens the first few of these in the background, if they are not open."""
        with self._lock:
            fresh = [shard for shard in dict.fromkeys(shards) if shard not in self._views]
            self._prefetcher.want(set(fresh[:_MOST_AHEAD]))

    def _open(self, shard: int) -> OpenShard:
        if shard >= self._session.catalog.manifest.total_shards:
            self._session = replace(self._session, catalog=self._session.newest_catalog())
        return self._session.open_shard(shard)
