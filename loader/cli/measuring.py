"""The measurements of `python -m loader bench`: the stream as training reads it, then reading alone.

Reading is compared with two yardsticks. *Slicing* is what one writes by hand over ``torch.load(mmap=True)``: a loop
that assigns each row to tensors made once, 54 µs for 8 x 1,024 ids and labels. *Copying* is the same over numpy arrays,
13 µs: about what the memory allows, since nothing is allocated, while each batch of the loader is new. The three are
timed in turns on the same mapped shard, over windows in the same order, so that other load slows all of them; the
figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from loader.dataset import GenesisDataset
from loader.options import StoreOptions, StreamOptions
from loader.session import Session
from loader.stream.windows import window_order

Ids = TypeVar("Ids", torch.Tensor, npt.NDArray[np.int64])

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
    copying_tokens_per_s: float

    @property
    def of_slicing(self) -> float:
        """The loader's speed as a share of slicing's."""
        return self.loader_tokens_per_s / self.slicing_tokens_per_s

    @property
    def of_copying(self) -> float:
        """The loader's speed as a share of copying's."""
        return self.loader_tokens_per_s / self.copying_tokens_per_s


def measure(store: StoreOptions, stream: StreamOptions, batches: int) -> tuple[StreamSpeed, ReadingSpeed]:
    """Reads a node's batches, at least 2, without early rotations, and times them.

    Raises:
        LoaderError: the store, or a shard, is unavailable.
    """
    return _stream_speed(store, stream, batches), _reading_speed(store, stream)


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
    session = Session.open(store)
    shard = session.open_shard(shard_id).ids
    session.mirrors.close()

    def read() -> None:
        for _ in range(_ROUND_BATCHES):
            next(iterator)

    inputs, labels = (torch.empty((stream.batch_size, stream.seq_len), dtype=torch.int64) for _ in range(2))
    order = window_order((len(shard) - 1) // stream.seq_len, stream.seed, stream.node_id, 0, shard_id).tolist()
    contenders = (
        read,
        lambda: _copy_rows(torch.from_numpy(shard), order, inputs, labels),
        lambda: _copy_rows(shard, order, inputs.numpy(), labels.numpy()),
    )
    times = [[_timed(contender) for contender in contenders] for _ in range(_ROUNDS)]
    dataset.close()
    tokens = _ROUND_BATCHES * stream.batch_size * stream.seq_len
    return ReadingSpeed(*(tokens / statistics.median(side) for side in zip(*times, strict=True)))


def _copy_rows(shard: Ids, order: list[int], inputs: Ids, labels: Ids) -> None:
    """A round of batches as one writes them by hand, torch tensors or numpy arrays alike."""
    rows, length = inputs.shape
    for first in range(0, _ROUND_BATCHES * rows, rows):
        for row in range(rows):
            start = order[(first + row) % len(order)] * length
            inputs[row] = shard[start : start + length]
            labels[row] = shard[start + 1 : start + length + 1]


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
