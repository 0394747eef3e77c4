"""What tasks of one event loop wait on while others change it.

`asyncio.Condition` comes with a lock, which state that changes only between two awaits does not need. Without it a
change is a plain call, also while a task is being cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Changes:
    """Wakes the tasks that wait for some state; for one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Lets all who wait look at the state again."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the next change, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._next.wait()

    async def wait_for(self, is_met: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Waits until a condition is met, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_met():
                    await self._next.wait()
