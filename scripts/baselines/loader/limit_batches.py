"""The limit: ``torch.load(mmap=True, weights_only=True)`` and plain slicing, over the same shards in the same order.

No digest, no check of ids, no cache, no state. A batch is two arrays, int64[B, T], filled row by row from slices of the
mapped tensor (through its numpy view: a loop of torch slices takes 4 times as long, `torch.stack` of them twice) and
handed out as tensors. A shard is loaded when its turn comes and let go of when the next one's does, so that one is
mapped, as in a node. The order of the windows is worked out before the clock starts. Batches run on across the end of
a shard, as ours do. Two ways to be faster still, each with its price: ``reuse`` fills the same two arrays for every
batch, but what is kept is overwritten; ``keep`` leaves every shard mapped for all later passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from contestant import run

from loader.stream.assignment import get_assigned_shards
from loader.stream.windows import window_order

if TYPE_CHECKING:
    from contestant import Pass

Ids = npt.NDArray[np.int64]


def prepare(options: dict[str, Any]) -> Callable[[], Pass]:
    """A pass goes once through all shards, ``epochs`` times where that is given."""
    folder, seq_len, batch_size = Path(options["data"]), options["seq_len"], options["batch_size"]
    shards = get_assigned_shards(options["node_id"], options["total_shards"], options["count"])
    windows = (options["shard_tokens"] - 1) // seq_len
    mapped: dict[int, Ids] = {}
    epochs = count()

    def opened(shard: int) -> Ids:
        if shard not in mapped:
            if not options["keep"]:
                mapped.clear()
            mapped[shard] = torch.load(folder / f"shard_{shard}.pt", mmap=True, weights_only=True).numpy()
        return mapped[shard]

    def one_pass() -> Pass:
        orders: list[tuple[int, list[int]]] = []
        for _ in range(options.get("epochs", 1)):
            epoch = next(epochs)
            for shard in shards:
                order = window_order(windows, 0, options["node_id"], epoch, shard)
                orders.append((shard, (order * seq_len).tolist()))
        return sliced(orders, opened, seq_len, batch_size, reuse=options["reuse"])

    return one_pass


def sliced(
    orders: list[tuple[int, list[int]]], opened: Callable[[int], Ids], seq_len: int, batch_size: int, *, reuse: bool
) -> Pass:
    """Batches of the windows that begin at the given ids, shard after shard."""
    inputs = np.empty((batch_size, seq_len), np.int64)
    labels = np.empty((batch_size, seq_len), np.int64)
    row = 0
    for ids, starts in chunks(orders, opened, batch_size):
        if not reuse and row == 0:
            inputs = np.empty((batch_size, seq_len), np.int64)
            labels = np.empty((batch_size, seq_len), np.int64)
        for start in starts:
            inputs[row] = ids[start : start + seq_len]
            labels[row] = ids[start + 1 : start + seq_len + 1]
            row += 1
        if row == batch_size:
            yield torch.from_numpy(inputs), torch.from_numpy(labels)
            row = 0


def chunks(
    orders: list[tuple[int, list[int]]], opened: Callable[[int], Ids], batch_size: int
) -> Iterator[tuple[Ids, list[int]]]:
    """The rows of one batch after another; those of a batch that two shards share come in two pieces."""
    missing = 0
    for shard, starts in orders:
        ids = opened(shard)
        if missing:
            yield ids, starts[:missing]
        for position in range(missing, len(starts), batch_size):
            yield ids, starts[position : position + batch_size]
        missing = -(len(starts) - missing) % batch_size


if __name__ == "__main__":
    run(prepare)
