"""Spreads bytes over time, so that serving a newcomer leaves the uplink to the rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["RateLimiter"]


class RateLimiter:
    """Lets bytes through at a rate; who asks waits his turn.

    Args:
        bytes_per_s: the rate; 0 lets everything through.
        clock: seconds, monotonic.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0

    def reserve(self, size_bytes: int) -> float:
        """Takes the next place for so many bytes; seconds until it comes."""
        if self._bytes_per_s <= 0:
            return 0.0
        now = self._clock()
        start = max(now, self._free_at)
        self._free_at = start + size_bytes / self._bytes_per_s
        return start - now

    async def wait(self, size_bytes: int) -> None:
        """Until so many bytes may go."""
        pause_s = self.reserve(size_bytes)
        if pause_s > 0:
            await asyncio.sleep(pause_s)
