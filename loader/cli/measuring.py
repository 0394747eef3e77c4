"""What `python -m loader bench` measures: the stream as training reads it, then reading alone against plain slicing.

The two are timed in turns on the same mapped shard, in the same order of windows, so that whatever else the machine
does slows both; the ratio is that of the medians. Plain slicing is what one writes by hand over
``torch.load(mmap=True)``: a loop that copies each row into tensors made once, which spares it the allocation that the
loader's new batches need.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from loader.dataset import GenesisDataset
from loader.options import StoreOptions, StreamOptions
from loader.session import Session
from loader.stream.permutation import window_order

__all__ = ["Measured", "ReadingSpeed", "StreamSpeed", "measure"]

_ROUNDS: Final = 9
_ROUND_BATCHES: Final = 256
"""Some 5 ms a side, of 8 x 1,024 ids."""


@dataclass(frozen=True, slots=True)
class StreamSpeed:
    """The stream from its first batch on, the network and the cache included."""

    opened_s: float
    """To find the store and pin the shards."""
    first_batch_s: float
    """From then to the first batch."""
    batches: int
    tokens: int
    seconds: float
    """For the batches after the first."""
    tokens_per_s: float
    stalled_s: float
    """Time the batches after the first waited for shards."""
    shards_opened: int
    shards_from_cache: int
    received_bytes: int
    """Over the network, manifest and index included; a folder sends none."""


@dataclass(frozen=True, slots=True)
class ReadingSpeed:
    """Batches of one shard that is mapped already."""

    loader_tokens_per_s: float
    slicing_tokens_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Both."""

    stream: StreamSpeed
    reading: ReadingSpeed


def measure(store: StoreOptions, stream: StreamOptions, batches: int) -> Measured:
    """Reads a node's batches and times them.

    Args:
        store: where from.
        stream: which; it never rotates early.
        batches: how many, at least 2.

    Raises:
        LoaderError: the store, or a shard, cannot be had.
    """
    return Measured(_stream_speed(store, stream, batches), _reading_speed(store, stream))


def _stream_speed(store: StoreOptions, stream: StreamOptions, batches: int) -> StreamSpeed:
    began = time.perf_counter()
    dataset = _dataset(store, stream)
    opened = time.perf_counter()
    iterator = iter(dataset)
    next(iterator)
    first = time.perf_counter()
    stalled_s = dataset.stats.stalled_s
    for _ in range(batches - 1):
        next(iterator)
    seconds = time.perf_counter() - first
    stats, received_bytes = dataset.stats, dataset.received_bytes
    dataset.close()
    batch_tokens = stream.batch_size * stream.seq_len
    return StreamSpeed(
        opened_s=opened - began,
        first_batch_s=first - opened,
        batches=batches,
        tokens=batches * batch_tokens,
        seconds=seconds,
        tokens_per_s=(batches - 1) * batch_tokens / seconds,
        stalled_s=stats.stalled_s - stalled_s,
        shards_opened=stats.shards_opened,
        shards_from_cache=stats.shards_from_cache,
        received_bytes=received_bytes,
    )


def _reading_speed(store: StoreOptions, stream: StreamOptions) -> ReadingSpeed:
    """Of the node's first shard alone, which the dataset then reads epoch after epoch."""
    alone = replace(stream, count=1, sources=stream.sources[:1])
    dataset = _dataset(store, alone)
    iterator = iter(dataset)
    next(iterator)
    [shard_id] = dataset.shards
    shard = torch.from_numpy(Session.open(store).open_shard(shard_id).ids)

    def read() -> None:
        for _ in range(_ROUND_BATCHES):
            next(iterator)

    slice_windows = _slicing(shard, alone, shard_id)
    times = [(_timed(read), _timed(slice_windows)) for _ in range(_ROUNDS)]
    dataset.close()
    tokens = _ROUND_BATCHES * stream.batch_size * stream.seq_len
    loader_s, slicing_s = (statistics.median(side) for side in zip(*times, strict=True))
    return ReadingSpeed(tokens / loader_s, tokens / slicing_s, slicing_s / loader_s)


def _slicing(shard: torch.Tensor, stream: StreamOptions, shard_id: int) -> Callable[[], None]:
    """A loop over windows of a shard as one writes it by hand."""
    rows, length = stream.batch_size, stream.seq_len
    windows = (len(shard) - 1) // length
    order = window_order(windows, stream.seed, stream.node_id, 0, shard_id).tolist()
    inputs = torch.empty((rows, length), dtype=torch.int64)
    labels = torch.empty_like(inputs)

    def read() -> None:
        for batch in range(_ROUND_BATCHES):
            for row in range(rows):
                start = order[(batch * rows + row) % windows] * length
                inputs[row] = shard[start : start + length]
                labels[row] = shard[start + 1 : start + length + 1]

    return read


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _dataset(store: StoreOptions, stream: StreamOptions) -> GenesisDataset:
    return GenesisDataset(
        store.mirrors[0],
        stream.node_id,
        seq_len=stream.seq_len,
        batch_size=stream.batch_size,
        seed=stream.seed,
        mirrors=store.mirrors[1:],
        public_key=store.public_key,
        cache_dir=store.cache_dir,
        cache_bytes=store.cache_bytes,
        max_bytes_per_s=store.max_bytes_per_s,
        timeout_s=store.timeout_s,
        count=stream.count,
        assignment=stream.assignment,
        sources=dict(stream.sources),
        holdout=stream.holdout,
        plateau="off",
    )
