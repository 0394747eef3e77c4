"""`SharedThrough`: how many of the micro-batches that a worker counted would outlive it.

A micro-batch outlives its worker when the weights it changed are part of a committed round, of every fragment where a
model is synchronised in parts, or on disk. A round commits what the weights were when it began, and in the background
any number of steps are taken meanwhile; so each round says how many. What is said here is never more than what is true.
"""

from __future__ import annotations

from collections import deque

__all__ = ["SharedThrough"]

_KEPT_STEPS = 65_536


class SharedThrough:
    """Written by the compute thread; `count` may be read from any.

    Args:
        num_fragments: parts that are synchronised one by one.
    """

    def __init__(self, num_fragments: int = 1) -> None:
        self._stepped: deque[tuple[int, int]] = deque(maxlen=_KEPT_STEPS)
        self._by_fragment = [0] * num_fragments
        self._saved = 0
        self._former_version = -1
        """The highest of any incarnation before this one: a checkpoint up to there may be of that one's weights."""

    @property
    def count(self) -> int:
        """The first so many would."""
        return max(self._saved, min(self._by_fragment))

    @property
    def in_weights(self) -> int:
        """The first so many are in the weights now."""
        return self._stepped[-1][1] if self._stepped else 0

    def stepped(self, version: int, applied: int) -> None:
        """A step was taken, after so many micro-batches."""
        self._stepped.append((version, applied))

    def committed(self, fragment: int, steps_ago: int) -> None:
        """A round was committed, with this worker's weights of so many steps ago in it."""
        past = len(self._stepped) - 1 - steps_ago
        if past >= 0 and fragment < len(self._by_fragment):
            self._by_fragment[fragment] = max(self._by_fragment[fragment], self._stepped[past][1])

    def saved(self, version: int) -> None:
        """The weights of a version are on disk: the newest that are."""
        if version <= self._former_version:
            return
        for stepped_version, applied in reversed(self._stepped):
            if stepped_version <= version:
                self._saved = max(self._saved, applied)
                return

    def start_over(self) -> None:
        """Micro-batches are counted from 0 again, by another incarnation."""
        if self._stepped:
            self._former_version = max(self._former_version, self._stepped[-1][0])
        self._stepped.clear()
        self._by_fragment = [0] * len(self._by_fragment)
        self._saved = 0
