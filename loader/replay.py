"""What a node must have trained on: any batch of any node, from the store and a few integers.

A peer that is told a node's id, step and early rotations finds the very batch, byte for byte, without asking the node
for data. It reads at most the two shards the batch lies in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loader.errors import LoaderUsageError
from loader.feed import Feed
from loader.node_stream import NodeStream
from loader.options import StreamOptions
from loader.plan import plan_lanes
from loader.session import Session
from loader.stream.schedule import Schedule

__all__ = ["replay_batch"]


def replay_batch(
    session: Session, options: StreamOptions, step: int, rotations: Sequence[int], total_shards: int
) -> dict[str, torch.Tensor]:
    """The batch of a step.

    Args:
        session: the store.
        options: the node's.
        step: counts its batches from 0.
        rotations: the steps before which it left a shard early.
        total_shards: how many shards the store had when its run began.

    Raises:
        LoaderUsageError: there is no such batch.
        LoaderError: a shard cannot be had.
    """
    if step < 0 or any(rotation < 0 for rotation in rotations):
        raise LoaderUsageError(f"expected steps of 0 or more, found {step} and rotations {list(rotations)}")
    lanes = max(1, len(options.sources))
    plans = plan_lanes(session.catalog, options, [total_shards] * lanes)
    stream = NodeStream(options, plans, Schedule([plan.lane for plan in plans], options.batch_size), sorted(rotations))
    stream.begin_pass()
    stream.seek(step)
    rows = stream.next_rows()
    if not rows:
        raise LoaderUsageError(f"expected a step before the end of the run, found {step}")
    feed = Feed(options, session.catalog, session.opener, session.options.timeout_s)
    return {name: torch.from_numpy(array) for name, array in feed.batch(rows).items()}
