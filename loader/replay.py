"""Recomputes any batch of any node from the store and a few integers.

A peer that knows a node's id, step, rotations and pins finds the very batch, byte for byte, without asking the node for
data. It reads at most the two shards the batch lies in, and the distance from the beginning hardly matters: step 2⁴⁰ of
an endless stream takes 1 ms, every finite pass 15 µs. Peers compare batches by `batch_sha256`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from loader.errors import LoaderUsageError
from loader.feed import Feed
from loader.node_stream import NodeStream
from loader.options import StreamOptions
from loader.plan import Pin
from loader.session import Session
from loader.stream.schedule import Rows, rows_of_rank

MAX_STEPS: Final = 2**40
"""Steps of a run that can be replayed: a batch every microsecond for 13 days."""

_DIGESTED = ("input_ids", "labels")


def batch_sha256(batch: Mapping[str, torch.Tensor]) -> str:
    """The sha256 over a batch's ``input_ids``, then its ``labels``, row after row as little-endian int64.

    Args:
        batch: both, integers of any type on any device. Extras do not count, since they follow from the ids.

    Returns:
        64 hexadecimal digits.

    Raises:
        LoaderUsageError: one of them is missing, or holds no integers.
    """
    digest = hashlib.sha256()
    for name in _DIGESTED:
        ids = batch.get(name)
        if ids is None or ids.is_floating_point() or ids.is_complex():
            found = "none" if ids is None else str(ids.dtype)
            raise LoaderUsageError(f"expected a batch with integers as {name}, found {found}")
        words = ids.detach().to(device="cpu", dtype=torch.int64).contiguous().numpy()
        digest.update(words.astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


def replay_batch(
    session: Session,
    options: StreamOptions,
    step: int,
    rotations: Sequence[int],
    pins: Sequence[Sequence[Pin]],
) -> dict[str, torch.Tensor]:
    """The batch of a step.

    Args:
        session: the store.
        options: the node's.
        step: counts its batches from 0.
        rotations: the steps before which the node left a shard early.
        pins: for each lane (one per source), from which epoch on it knew how many shards.

    Raises:
        LoaderUsageError: a step is negative or not below `MAX_STEPS`, the store has fewer shards, or the batch is the
            last of a pass and has no row for this rank.
        LoaderError: a shard is unavailable.
    """
    for name, found in (("step", [step]), ("rotations", rotations)):
        if not all(0 <= each < MAX_STEPS for each in found):
            raise LoaderUsageError(f"{name}: expected steps of 0 to 2**40 - 1, found {list(found)}")
    schedule = NodeStream.begin(options, session.catalog, pins, rotations).schedule
    schedule.seek_through(step)
    rows: list[Rows] = []
    while not rows:  # At the end of a pass the batch is the first of the next one.
        schedule.begin_pass()
        rows = schedule.next_rows()
    rows = rows_of_rank(rows, options.rank, options.world_size)
    if not rows:
        raise LoaderUsageError(f"expected a step in which rank {options.rank} has rows, found {step}, which has fewer")
    feed = Feed(options, session)
    return {name: torch.from_numpy(array) for name, array in feed.batch(rows).items()}
