"""Fetches the next piece while this one is used.

Only for the one reader of a compressed file on the Hub, whose decompression would otherwise wait for every range: with
ranges of 16 MiB at most three of them are in memory. The thread is a daemon, so a process that ends in the middle of a
wait for a rate limit is not held by it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["read_ahead"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Piece(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def read_ahead(pieces: Iterable[T]) -> Iterator[T]:
    """The same pieces in the same order, one fetched ahead by a thread; its error is raised where it occurred."""
    fetched: queue.Queue[_Piece[T] | _End] = queue.Queue(1)
    stopped = threading.Event()
    threading.Thread(target=_fetch, args=(pieces, fetched, stopped), name="read-ahead", daemon=True).start()
    try:
        while isinstance(item := fetched.get(), _Piece):
            yield item.value
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        while not fetched.empty():  # Frees the one place a fetch may be waiting for; it then sees that it is to stop.
            fetched.get_nowait()


def _fetch(pieces: Iterable[T], fetched: queue.Queue[_Piece[T] | _End], stopped: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for piece in pieces:
            fetched.put(_Piece(piece))
            if stopped.is_set():
                return
    except BaseException as failure:  # noqa: BLE001  raised again in the thread that reads
        error = failure
    fetched.put(_End(error))
