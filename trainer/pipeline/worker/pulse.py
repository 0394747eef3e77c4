"""`Pulse`: when this process was stopped, so that what lay in its sockets meanwhile is not taken for new.

A request counts its time from its receipt, and a process that was stopped for a minute receives what was sent to it
when it goes on. Its event loop beats four times a second; a beat that comes late says from when to when nothing was
read. What is received within a second of that may have been sent at any time within, and is dated to its beginning.
Requests that were indeed sent after it are told that they are late, and come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trainer.pipeline.protocol.work import boottime_s

__all__ = ["Pulse"]

_BEAT_S = 0.25
_STOPPED_S = 1.0
"""A beat so much late is a stop; a loop that computes too long at a time is late by tenths of a second."""
_READING_S = 1.0
"""How long it takes to read what has piled up."""


class Pulse:
    """One process's. For its event loop alone.

    Args:
        clock: seconds; CLOCK_BOOTTIME but in tests.
    """

    def __init__(self, clock: Callable[[], float] = boottime_s) -> None:
        self._clock = clock
        self._beat_s: float | None = None
        self._stopped_s = self._resumed_s = float("-inf")

    async def run(self) -> None:
        """Beats until it is cancelled."""
        try:
            while True:
                self.beat()
                await asyncio.sleep(_BEAT_S)
        finally:
            self._beat_s = None

    def beat(self) -> None:
        """The event loop goes on."""
        now_s = self._clock()
        if self._beat_s is not None and now_s - self._beat_s > _STOPPED_S:
            # Stopped again while it was still reading: what it reads may be from before the first time.
            again = self._beat_s - self._resumed_s < _READING_S
            self._stopped_s = self._stopped_s if again else self._beat_s
            self._resumed_s = now_s
        self._beat_s = now_s

    def sent_by_s(self, received_s: float) -> float:
        """The earliest time at which what was received then may have reached this machine."""
        if self._beat_s is not None:
            self.beat()  # It may be this very request that wakes the loop.
        return self._stopped_s if self._stopped_s <= received_s < self._resumed_s + _READING_S else received_s
