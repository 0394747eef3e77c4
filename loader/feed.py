"""From rows of windows to arrays of ids, with the next shard fetched ahead.

A feed holds the shards in which the lanes stand, mapped. Whenever a lane moves on, the next shard is opened in the
background, so moving on waits only if the network was slower than the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader.fetch.shards import OpenShard, Prefetcher
from loader.options import StreamOptions
from loader.session import Session
from loader.stream.schedule import Rows, Schedule
from loader.stream.windows import WindowView, cumulative_lengths, document_ids, positions, window_order

logger = logging.getLogger(__name__)

Array = npt.NDArray[np.int64] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FeedStats:
    """Counts of a feed in this process."""

    shards_opened: int
    shards_from_cache: int
    stalled_s: float
    """Time for which batches waited for a shard, the opening of the first one included."""


@dataclass(frozen=True, slots=True)
class _Reading:
    epoch: int
    view: WindowView
    order: npt.NDArray[np.int64]


class Feed:
    """Makes batches of one node's stream."""

    def __init__(self, options: StreamOptions, session: Session) -> None:
        self._options = options
        self._session = session
        self._prefetcher = Prefetcher(self._open_shard, session.options.timeout_s)
        self._readings: dict[int, _Reading] = {}
        self._opened = self._from_cache = 0
        self._stalled_s = 0.0

    @property
    def stats(self) -> FeedStats:
        """The counts so far."""
        return FeedStats(self._opened, self._from_cache, self._stalled_s)

    def adopt(self, session: Session) -> None:
        """Takes the shards of a grown store into account."""
        self._session = session

    def batch(self, rows: Sequence[Rows], schedule: Schedule | None = None) -> dict[str, Array]:
        """Makes a batch.

        Args:
            rows: its rows, at least one.
            schedule: the source of the rows, which tells which shards to hold and to fetch ahead; None for neither.

        Returns:
            ``input_ids`` and ``labels``, int64[B, T] each, and the extras that the options ask for: ``positions`` and
            ``document_ids``, int64[B, T], ``cu_seqlens``, int32[D + 1].

        Raises:
            LoaderError: a shard is unavailable.
        """
        inputs, labels = self._gather(rows[0], schedule)
        if len(rows) > 1:
            rest = [self._gather(part, schedule) for part in rows[1:]]
            inputs = np.concatenate([inputs, *(part for part, _ in rest)])
            labels = np.concatenate([labels, *(part for _, part in rest)])
        if self._options.labels == "input_ids":
            labels = inputs.copy()  # Of its own: models that mask labels do so in place.
        batch: dict[str, Array] = {"input_ids": inputs, "labels": labels}
        for extra in self._options.extras:
            batch[extra] = _EXTRAS[extra](inputs, self._session.catalog.manifest.eos_id)
        return batch

    def _open_shard(self, shard_id: int) -> OpenShard:
        return self._session.open_shard(shard_id)

    def _gather(self, rows: Rows, schedule: Schedule | None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        reading = self._readings.get(rows.shard_id)
        if reading is None:
            reading = self._open(rows, schedule)
        elif reading.epoch != rows.epoch:
            reading = _Reading(rows.epoch, reading.view, self._order(rows, len(reading.view.inputs)))
            self._readings[rows.shard_id] = reading
        return reading.view.gather(reading.order[rows.first :: rows.stride][: rows.count])

    def _open(self, rows: Rows, schedule: Schedule | None) -> _Reading:
        began = time.monotonic()
        shard = self._prefetcher.take(rows.shard_id)
        self._stalled_s += time.monotonic() - began
        self._opened += 1
        self._from_cache += shard.from_cache
        logger.debug("reading shard %d in epoch %d", rows.shard_id, rows.epoch)
        view = WindowView.of(shard.ids, self._options.seq_len)
        reading = _Reading(rows.epoch, view, self._order(rows, len(view.inputs)))
        self._readings[rows.shard_id] = reading
        if schedule is not None:
            self._look_ahead(rows.shard_id, schedule)
        return reading

    def _look_ahead(self, opened: int, schedule: Schedule) -> None:
        lanes = range(len(schedule.lanes))
        current = {opened, *(schedule.current_shard(lane) for lane in lanes)}
        for shard_id in self._readings.keys() - current:
            del self._readings[shard_id]
        ahead = {schedule.current_shard(lane) for lane in lanes} | {schedule.next_shard(lane) for lane in lanes}
        self._prefetcher.want(ahead - self._readings.keys())

    def _order(self, rows: Rows, windows: int) -> npt.NDArray[np.int64]:
        return window_order(windows, self._options.seed, self._options.node_id, rows.epoch, rows.shard_id)


_EXTRAS: dict[str, Callable[[npt.NDArray[np.int64], int], Array]] = {
    "positions": positions,
    "document_ids": document_ids,
    "cu_seqlens": cumulative_lengths,
}
