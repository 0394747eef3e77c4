"""Counts by address, identity or host in bounded memory: token buckets, tables that forget, counters without zeros."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

_MIN_PRUNED = 4096


class TokenBuckets:
    """A token bucket for each key: full with ``capacity`` tokens (at least 1) at first, it gets back ``per_s``.

    Full buckets are dropped in one pass for each doubling of the table, so what is held is bounded by the keys that
    were active within ``capacity / per_s`` seconds. A clock that is set back gives nothing back meanwhile.
    """

    def __init__(self, capacity: float, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = max(1.0, capacity)
        self._per_s = per_s
        self._clock = clock
        self._tokens: dict[str, tuple[float, float]] = {}
        self._prune_at = _MIN_PRUNED

    def __len__(self) -> int:
        return len(self._tokens)

    def left(self, key: str) -> float:
        """Returns the tokens in ``key``'s bucket now."""
        return self._left(key, self._clock())

    def wait_s(self, key: str) -> float:
        """Returns the seconds until `take` would find a token; 0: it would now."""
        return max(0.0, 1.0 - self._left(key, self._clock())) / self._per_s

    def take(self, key: str, amount: float = 1.0) -> bool:
        """Takes so many of ``key``'s tokens; returns whether they were there, and takes none if not."""
        now_s = self._clock()
        tokens = self._left(key, now_s)
        if tokens < amount:
            return False
        self._tokens[key] = (tokens - amount, now_s)
        if len(self._tokens) > self._prune_at:
            self._tokens = {key: kept for key, kept in self._tokens.items() if self._left(key, now_s) < self._capacity}
            self._prune_at = max(_MIN_PRUNED, 2 * len(self._tokens))
        return True

    def give_back(self, key: str) -> None:
        """Returns a token that was taken for an event that cost nothing after all."""
        now_s = self._clock()
        if key in self._tokens:
            self._tokens[key] = (min(self._capacity, self._left(key, now_s) + 1.0), now_s)

    def _left(self, key: str, now_s: float) -> float:
        tokens, at_s = self._tokens.get(key, (self._capacity, now_s))
        return min(self._capacity, tokens + max(0.0, now_s - at_s) * self._per_s)


def remember(table: OrderedDict[K, V], key: K, value: V, max_entries: int) -> None:
    """Sets an entry of ``table`` as its newest, and drops the oldest beyond ``max_entries``."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > max_entries:
        table.popitem(last=False)


def count_down(counter: Counter[K], key: K, amount: int = 1) -> None:
    """Subtracts ``amount``; an entry of 0 goes, because one for each identity that ever called would be a leak."""
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
