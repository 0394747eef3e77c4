"""Which index segments in a store are of the past, and since when: told from their names and times alone.

A segment counts as replaced from the moment the next one of its number was written, not from when it was itself: a
reader may have got the manifest that names it a second before. The newest of a number belongs to the manifest, or to a
commit that was not completed; it counts from its own time, and the caller keeps what the manifest names.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from genesis.store.base import ObjectInfo

__all__ = ["replaced_at"]


def replaced_at(segments: Iterable[ObjectInfo], now: float) -> dict[str, float]:
    """When each segment was replaced, in seconds since the epoch, by key.

    Args:
        segments: what lies under ``index/``.
        now: taken for the time of an object whose store does not say.
    """
    by_number: dict[str, list[tuple[float, str]]] = {}
    for info in segments:
        written_at = info.modified_at.timestamp() if info.modified_at else now
        by_number.setdefault(info.key.partition("-")[0], []).append((written_at, info.key))
    times: dict[str, float] = {}
    for written in by_number.values():
        written.sort()
        for (_, key), (next_written_at, _) in pairwise([*written, written[-1]]):
            times[key] = next_written_at
    return times
