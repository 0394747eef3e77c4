"""Values that belong to one process: a client with its sockets, a lock, a counter.

Guarantees: each caller gets the value of its own process, which is made at the first call and only once, from
however many threads. After a fork the child makes its own; what the parent made is never touched there, not even
closed, since its locks may have been held by threads that do not exist in the child. The trade-off: the parent's
sockets stay open in the child until that ends (two descriptors a keep-alive connection).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Slot(Generic[T]):
    """One process's value."""

    __slots__ = ("lock", "value")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: T | None = None


class PerProcess(Generic[T]):
    """A value made when a process first asks for it. Safe from many threads, and across forks."""

    def __init__(self, make: Callable[[], T]) -> None:
        """Names how the value is made; nothing is made yet."""
        self._make = make
        self._slots: dict[int, _Slot[T]] = {}

    def get(self) -> T:
        """This process's value."""
        slot = self._own()
        with slot.lock:
            if slot.value is None:
                slot.value = self._make()
            return slot.value

    def peek(self) -> T | None:
        """This process's value, or None if it has none yet."""
        slot = self._slots.get(os.getpid())
        return None if slot is None else slot.value

    def take(self) -> T | None:
        """This process's value, which is then no longer kept: the next `get` makes another."""
        slot = self._own()
        with slot.lock:
            value, slot.value = slot.value, None
            return value

    def _own(self) -> _Slot[T]:
        pid = os.getpid()
        slot = self._slots.get(pid)
        # One step for the interpreter: of two threads that find no slot, both get the first one's.
        return slot if slot is not None else self._slots.setdefault(pid, _Slot())
