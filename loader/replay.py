"""What a node must have trained on: any batch of any node, from the store and a few integers.

A peer that is told a node's id, step, early rotations and pins (how many shards it knew from which epoch on) finds the
very batch, byte for byte, without asking the node for data. It reads at most the two shards the batch lies in, and how
far that is from the beginning hardly matters: step 2⁴⁰ of an endless stream takes 1 ms, every finite pass 15 µs.

`batch_sha256` makes of a batch what peers can compare without sending it: 64 characters instead of 131,072 bytes.
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
from loader.pins import Pin
from loader.session import Session
from loader.stream.schedule import Rows

__all__ = ["MOST_STEPS", "batch_sha256", "replay_batch"]

MOST_STEPS: Final = 2**40
"""Of a run, for replaying: a batch a microsecond for 13 days."""

_DIGESTED = ("input_ids", "labels")


def batch_sha256(batch: Mapping[str, torch.Tensor]) -> str:
    """What identifies a batch among peers: sha256 over its ``input_ids``, then its ``labels``.

    Args:
        batch: both, integers of any type on any device; each row after row, as little-endian int64. Extras do not
            count, since they follow from the ids.

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
        rotations: the steps before which it left a shard early.
        pins: for each lane (one a source), from which epoch on it knew how many shards.

    Raises:
        LoaderUsageError: steps are never negative, nor as far as `MOST_STEPS`; or the store has fewer shards.
        LoaderError: a shard cannot be had.
    """
    for name, found in (("step", [step]), ("rotations", rotations)):
        if not all(0 <= each < MOST_STEPS for each in found):
            raise LoaderUsageError(f"{name}: expected steps of 0 to 2**40 - 1, found {list(found)}")
    stream = NodeStream.begin(options, session.catalog, pins, rotations)
    stream.seek_through(step)
    rows: list[Rows] = []
    while not rows:  # At the end of a pass the batch is the first of the next one.
        stream.begin_pass()
        rows = stream.next_rows()
    feed = Feed(options, session.catalog, session.opener, session.options.timeout_s)
    return {name: torch.from_numpy(array) for name, array in feed.batch(rows).items()}
