"""Several shards opened at once, so that each ends up in the cache, verified.

Daemon threads, so that a process that is told to stop ends at once, whatever they wait for; what they leave behind is
what a kill -9 leaves, which the cache is made for. A shard that fails costs the others nothing. One that was fetched
and could not be kept ends the whole, for what comes after it could not be kept either and would be fetched for nothing.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loader.errors import LoaderError
from loader.session import Session

__all__ = ["Outcome", "open_shards"]

_TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a shard."""

    shard_id: int
    from_cache: bool = False
    """It was there already, and sound."""
    cached: bool = False
    """It is there now."""
    error: str | None = None


def open_shards(session: Session, shard_ids: Sequence[int], jobs: int) -> Iterator[Outcome | None]:
    """Opens shards, the first ones first.

    Args:
        session: the store.
        shard_ids: which.
        jobs: how many at once.

    Yields:
        Outcomes as they come, and None now and then while there is none. Fewer outcomes than shards if one could not be
        kept.
    """
    waiting = deque(shard_ids)
    results: queue.SimpleQueue[Outcome | Exception | None] = queue.SimpleQueue()
    running = min(jobs, len(waiting))
    for number in range(running):
        threading.Thread(target=_work, args=(session, waiting, results), name=f"fetch-{number}", daemon=True).start()
    try:
        while running:
            try:
                result = results.get(timeout=_TICK_S)
            except queue.Empty:
                yield None
                continue
            if isinstance(result, Exception):
                raise result
            if result is None:
                running -= 1
            else:
                yield result
    finally:
        waiting.clear()


def _work(session: Session, waiting: deque[int], results: queue.SimpleQueue[Outcome | Exception | None]) -> None:
    """Opens what waits until nothing does; puts an outcome for each, and None at the end."""
    while True:
        try:
            shard_id = waiting.popleft()
        except IndexError:
            results.put(None)
            return
        try:
            outcome = _opened(session, shard_id)
        except Exception as error:  # noqa: BLE001  raised in the thread that waits
            results.put(error)
            return
        if outcome.error is None and not outcome.cached:
            waiting.clear()
        results.put(outcome)


def _opened(session: Session, shard_id: int) -> Outcome:
    """Opens a shard and lets go of it at once: while it is open it may not leave the cache."""
    try:
        shard = session.open_shard(shard_id)
    except LoaderError as error:
        return Outcome(shard_id, error=str(error))
    return Outcome(shard_id, from_cache=shard.from_cache, cached=shard.cached)
