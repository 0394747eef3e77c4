"""Waiting for the network, and stopping when asked to.

A request to the Hub may wait for minutes, in a connection, in a read, or for a rate limit to pass, and nothing inside
looks at the event that a signal sets. So a thread does such work while the caller waits for it or for the event. A
thread that is left behind is a daemon and holds nothing of the store; it ends with the process.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from genesis.errors import InterruptedRunError

T = TypeVar("T")

_LOOK_EVERY_S = 0.2


def unless_stopped(call: Callable[[], T], stop: threading.Event | None, doing: str) -> T:
    """The result of ``call``, or its exception.

    Args:
        call: what may wait; it is not told of a stop and may go on in its thread.
        stop: asks to stop.
        doing: what is interrupted, for the message: "listing the input".

    Raises:
        InterruptedRunError: ``stop`` was set first.
    """
    return next(iterate_unless_stopped((call() for _ in range(1)), stop, doing))


def iterate_unless_stopped(items: Iterable[T], stop: threading.Event | None, doing: str) -> Iterator[T]:
    """The same items, fetched by a thread, one ahead.

    Raises:
        InterruptedRunError: ``stop`` was set.
    """
    if stop is None:
        yield from items
        return
    fetched: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(1)
    abandoned = threading.Event()
    threading.Thread(target=_fetch, args=(items, fetched, abandoned), name="input", daemon=True).start()
    try:
        while True:
            if stop.is_set():
                raise InterruptedRunError(f"stopped while {doing}; nothing was written")
            try:
                is_item, value = fetched.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                continue
            if is_item:
                yield value  # type: ignore[misc]  # an item is a T
            elif isinstance(value, BaseException):
                raise value
            else:
                return
    finally:
        abandoned.set()


def _fetch(
    items: Iterable[T], fetched: queue.Queue[tuple[bool, T | BaseException | None]], abandoned: threading.Event
) -> None:
    last: BaseException | None = None
    try:
        for item in items:
            _put(fetched, (True, item), abandoned)
            if abandoned.is_set():
                return
    except BaseException as error:  # noqa: BLE001  raised again in the thread that asked
        last = error
    _put(fetched, (False, last), abandoned)


def _put(
    fetched: queue.Queue[tuple[bool, T | BaseException | None]],
    item: tuple[bool, T | BaseException | None],
    abandoned: threading.Event,
) -> None:
    while not abandoned.is_set():
        try:
            fetched.put(item, timeout=_LOOK_EVERY_S)
            return
        except queue.Full:
            continue
