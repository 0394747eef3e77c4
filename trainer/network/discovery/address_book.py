"""When to try which address again: at once if it answered, after a growing pause if it did not."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AddressBook"]


@dataclass(slots=True)
class _Entry:
    since_s: float
    next_try_s: float = 0.0
    pause_s: float = 0.0


class AddressBook:
    """Failures by address, each doubling its pause. Times are seconds of any one clock.

    Args:
        first_pause_s: the pause after the first failure.
        max_pause_s: the longest.
        max_addresses: most that are remembered; beyond that the one due first is forgotten.
    """

    def __init__(self, *, first_pause_s: float, max_pause_s: float, max_addresses: int = 4096) -> None:
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._max_addresses = max_addresses
        self._failed: dict[str, _Entry] = {}

    def is_due(self, address: str, now: float) -> bool:
        """Whether it may be tried now."""
        entry = self._failed.get(address)
        return entry is None or entry.next_try_s <= now

    def has_failed(self, address: str) -> bool:
        """Whether it did not answer when last tried."""
        return address in self._failed

    def silent_s(self, address: str, now: float) -> float:
        """For how long it has not answered; 0 if it did when last tried, or was never tried."""
        entry = self._failed.get(address)
        return 0.0 if entry is None else now - entry.since_s

    def failed(self, address: str, now: float) -> float:
        """Notes that it did not answer; the pause until it may be tried again, in seconds."""
        entry = self._failed.get(address)
        if entry is None:
            if len(self._failed) >= self._max_addresses:
                del self._failed[min(self._failed, key=lambda known: self._failed[known].next_try_s)]
            entry = self._failed[address] = _Entry(now)
        entry.pause_s = min(max(2 * entry.pause_s, self._first_pause_s), self._max_pause_s)
        entry.next_try_s = now + entry.pause_s
        return entry.pause_s

    def answered(self, address: str) -> None:
        """Notes that it answered."""
        self._failed.pop(address, None)
