"""Any micro-batch by its name alone: the rows it stands for, from whichever shard and epoch.

The order of a shard's windows in an epoch depends on the run's seed, the epoch and the shard, not on who reads it, so
any driver can do any micro-batch. A few shards stay mapped (20 MB each, of which the kernel keeps what it likes), the
next ones are opened in threads. The trade-off: rows of one micro-batch are neighbours in an order of one shard, where
the loader's streams mix sources within a batch; sources mix from unit to unit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loader.fetch.shards import OpenShard, Prefetcher
from loader.session import Session
from loader.stream.permutation import window_order
from loader.stream.windows import WindowView
from trainer.pipeline.ledger.units import Layout
from trainer.pipeline.protocol.micro_batch import MicroBatchId

__all__ = ["MicroBatches"]

_MOST_OPEN = 8
_MOST_AHEAD = 2


class MicroBatches:
    """Reads micro-batches; safe to use from several threads, which wait for each other.

    Args:
        session: the store.
        seed: of the run.
        layout: how its shards are cut.
    """

    def __init__(self, session: Session, seed: int, layout: Layout) -> None:
        self._session = session
        self._seed = seed
        self._layout = layout
        self._prefetcher = Prefetcher(self._open, session.options.timeout_s)
        self._views: OrderedDict[int, WindowView] = OrderedDict()
        self._orders: OrderedDict[tuple[int, int], npt.NDArray[np.int64]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, micro_batch: MicroBatchId) -> tuple[Tensor, Tensor]:
        """The rows of one.

        Args:
            micro_batch: which.

        Returns:
            Inputs and labels, int64[B, T] each; B is smaller than the others' where a shard ends.

        Raises:
            TrainerUsageError: there is none of that name.
            LoaderError: the shard cannot be had.
        """
        count = self._layout.rows_of(micro_batch)
        with self._lock:
            order = self._order(micro_batch.epoch, micro_batch.shard)
            view = self._view(micro_batch.shard)
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

    def _view(self, shard: int) -> WindowView:
        view = self._views.pop(shard, None)
        if view is None:
            view = WindowView.of(self._prefetcher.take(shard).ids, self._layout.seq_len)
        self._views[shard] = view
        if len(self._views) > _MOST_OPEN:
            self._views.popitem(last=False)
        return view

    def _order(self, epoch: int, shard: int) -> npt.NDArray[np.int64]:
        order = self._orders.pop((epoch, shard), None)
        if order is None:
            order = window_order(self._layout.num_windows, self._seed, epoch, shard)
        self._orders[epoch, shard] = order
        if len(self._orders) > _MOST_OPEN:
            self._orders.popitem(last=False)
        return order
