"""What a store has received, counted and paced: one meter a store, shared by its threads."""

from __future__ import annotations

import threading

from genesis.store.per_process import PerProcess
from genesis.store.throttle import Throttle

__all__ = ["Meter"]


class _Count:
    """Bytes received by one process."""

    __slots__ = ("lock", "total")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total = 0


class Meter:
    """Counts bytes as they come, and slows their coming down to a throttle's cap. Safe from many threads."""

    def __init__(self, throttle: Throttle | None = None) -> None:
        """Takes the throttle, if there is to be one."""
        self._throttle = throttle
        self._count = PerProcess(_Count)

    @property
    def received_bytes(self) -> int:
        """Bytes received by this process so far."""
        count = self._count.peek()
        return 0 if count is None else count.total

    @property
    def cap_bytes_per_s(self) -> float | None:
        """The throttle's cap."""
        return None if self._throttle is None else self._throttle.bytes_per_s

    def received(self, size_bytes: int) -> float:
        """Notes that ``size_bytes`` came; returns the seconds it made the caller wait for them."""
        count = self._count.get()
        with count.lock:
            count.total += size_bytes
        return 0.0 if self._throttle is None else self._throttle.pay(size_bytes)
