"""A blocking call in a daemon thread: it holds up neither its caller, nor an event loop, nor the end of the process.

`asyncio.to_thread` is not that: its threads are joined when the loop ends, and a store that does not answer keeps one
for up to twenty minutes. The trade-off: a thread is made for each call, 0.1 ms of a read of a millisecond or more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_daemon_thread", "start_daemon"]

T = TypeVar("T")


def start_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """Begins a call that nobody has to wait for.

    Args:
        function: what to call.
        name: of the thread.

    Returns:
        What it gives, or raises.
    """
    future: Future[T] = Future()
    threading.Thread(target=_fill, args=(future, function), name=name, daemon=True).start()
    return future


async def in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """What ``function`` gives; cancelled, it is left to end by itself, and what comes of it goes nowhere.

    Args:
        function: what to call.
        name: of the thread.

    Raises:
        BaseException: what it raised.
    """
    return await asyncio.wrap_future(start_daemon(function, name))


def _fill(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        found = function()
    except BaseException as error:  # noqa: BLE001 - carried to whoever waits for the result
        future.set_exception(error)
    else:
        future.set_result(found)
