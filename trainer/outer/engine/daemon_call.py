"""Blocking calls in daemon threads: they hold up neither the caller, nor an event loop, nor the end of the process.

`asyncio.to_thread` joins its threads when the loop ends; a store that does not answer keeps one for twenty minutes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def start_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """Calls ``function`` in a daemon thread of that name; the future has its result or exception."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - re-raised by Future.result
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def release_in_background(retired: list[Any]) -> None:
    """Empties a list in another thread, for values whose memory it takes long to give back: 500 MB take 3 ms.

    The list is to hold their last references. The thread has the interpreter's lock meanwhile; what torch computes for
    the caller goes on.
    """
    start_daemon(retired.clear, "release")


async def in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """Returns or raises what ``function`` does; if cancelled, the call ends by itself and its result is dropped."""
    return await asyncio.wrap_future(start_daemon(function, name))
