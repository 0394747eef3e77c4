"""Sets of whole numbers that are mostly runs: kept as their runs, so that a million in order take one pair."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Intervals"]


class Intervals:
    """A set of whole numbers, 0 or more.

    Args:
        runs: first and last of each run, ascending, with gaps between.
    """

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            self._firsts.append(first)
            self._lasts.append(last)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """First and last of each run."""
        return zip(self._firsts, self._lasts, strict=True)

    def __len__(self) -> int:
        """How many numbers."""
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    @property
    def num_runs(self) -> int:
        """What it takes to keep them."""
        return len(self._firsts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def add(self, number: int) -> None:
        """Adds a number; again is once."""
        if number in self:
            return
        at = bisect_left(self._firsts, number)
        joins_before = at > 0 and self._lasts[at - 1] == number - 1
        joins_after = at < len(self._firsts) and self._firsts[at] == number + 1
        if joins_before and joins_after:
            self._lasts[at - 1] = self._lasts.pop(at)
            del self._firsts[at]
        elif joins_before:
            self._lasts[at - 1] = number
        elif joins_after:
            self._firsts[at] = number
        else:
            self._firsts.insert(at, number)
            self._lasts.insert(at, number)

    def drop_through(self, number: int) -> None:
        """Takes out all numbers up to this one."""
        at = bisect_right(self._lasts, number)
        del self._firsts[:at], self._lasts[:at]
        if self._firsts and self._firsts[0] <= number:
            self._firsts[0] = number + 1

    def first_gap(self) -> int:
        """The least number that is not in it."""
        return self._lasts[0] + 1 if self._firsts and self._firsts[0] == 0 else 0
