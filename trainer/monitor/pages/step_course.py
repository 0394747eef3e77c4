"""A node's own steps over its whole life, coarser the older they are: what its curves are drawn from.

Level 0 has a bucket a step, each level above one for eight of the level below; of each the latest 4,096 are kept. A
million steps are thus 14,000 buckets, 2 MB in memory and on the disk, with the lowest and highest loss of each: a spike
of one step stays visible for good. The trade-off: beyond the latest 4,096 steps single ones cannot be told apart.

Adding a step takes 8 µs, in the thread that keeps the history. The file is sqlite, written in one transaction: a kill
leaves it as of the latest one. A step that comes again, after an older checkpoint, takes the place of what it did
before.
"""

from __future__ import annotations

import math
import sqlite3
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

FACTOR: Final = 8
KEPT: Final = 4_096
_LEVELS: Final = 8  # The highest has a bucket for two million steps.
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS step (
  level INTEGER NOT NULL, first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, at REAL NOT NULL,
  tokens INTEGER NOT NULL, num_losses INTEGER NOT NULL, loss_sum REAL NOT NULL, low REAL, high REAL,
  num_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
  PRIMARY KEY (level, first_step)) WITHOUT ROWID
"""


class Bucket(NamedTuple):
    """One step or several; ``at`` (seconds since 1970) and ``tokens`` (of the run so far) are those at their end."""

    first_step: int
    last_step: int
    at: float
    tokens: int
    num_losses: int  # Those that are finite.
    loss_sum: float
    low: float
    high: float
    num_tokens: int
    seconds: float


def bucket_of(step: int, at: float, loss: float, tokens: int, num_tokens: int, seconds: float) -> Bucket:
    """Returns a bucket of one step."""
    if not math.isfinite(loss):
        return Bucket(step, step, at, tokens, 0, 0.0, math.inf, -math.inf, num_tokens, seconds)
    return Bucket(step, step, at, tokens, 1, loss, loss, loss, num_tokens, seconds)


def _merged(parts: Sequence[Bucket]) -> Bucket:
    last = parts[-1]
    return Bucket(
        parts[0].first_step,
        last.last_step,
        last.at,
        last.tokens,
        sum(it.num_losses for it in parts),
        math.fsum(it.loss_sum for it in parts),
        min(it.low for it in parts),
        max(it.high for it in parts),
        sum(it.num_tokens for it in parts),
        math.fsum(it.seconds for it in parts),
    )


class StepCourse:
    """The buckets of all levels; for one thread at a time."""

    def __init__(self, *, is_saved: bool = True) -> None:
        """``is_saved`` False: `save` is never called, and nothing is kept for it."""
        self._is_saved = is_saved
        self._levels: list[deque[Bucket]] = [deque(maxlen=KEPT) for _ in range(_LEVELS)]
        self._open: list[list[Bucket]] = [[] for _ in range(_LEVELS)]
        """Of each level the buckets that are not in one of the level above yet."""
        self._unsaved: list[tuple[int, Bucket]] = []
        self._cut_from: int | None = None

    @property
    def last_step(self) -> int | None:
        """The latest step; None: there is none."""
        return self._levels[0][-1].last_step if self._levels[0] else None

    @property
    def last_tokens(self) -> int:
        """Tokens of the run at the latest step."""
        return self._levels[0][-1].tokens if self._levels[0] else 0

    def latest(self, count: int) -> list[Bucket]:
        """Returns the latest single steps, the newest last."""
        kept = self._levels[0]
        return [kept[index] for index in range(max(0, len(kept) - count), len(kept))]

    def add(self, bucket: Bucket) -> None:
        """Adds a step; what is known of it and of later ones is forgotten."""
        if self.last_step is not None and bucket.first_step <= self.last_step:
            self._cut(bucket.first_step)
        self._put(0, bucket)

    def between(self, begin: float, end: float, limit: int) -> list[Bucket]:
        """Returns the buckets of steps from ``begin`` to ``end``, of the finest level that has them all in ``limit``.

        Where no level has them all in so many, the coarsest does.
        """
        firsts = [kept[0].first_step for kept in self._levels if kept]
        found: list[Bucket] = []
        for level in range(len(firsts)):
            found = self._from(level, begin, end)
            if firsts[level] <= max(begin, min(firsts)) and len(found) <= limit:
                break
        return found

    def _from(self, level: int, begin: float, end: float) -> list[Bucket]:
        """A level's buckets, and behind them those of finer levels that are not in one of it yet."""
        found = list(self._levels[level])
        for finer in range(level - 1, -1, -1):
            found += self._open[finer]
        return [it for it in found if it.last_step >= begin and it.first_step <= end]

    def _put(self, level: int, bucket: Bucket) -> None:
        self._levels[level].append(bucket)
        if self._is_saved:
            self._unsaved.append((level, bucket))
        if level + 1 < _LEVELS:
            waiting = self._open[level]
            waiting.append(bucket)
            if len(waiting) == FACTOR:
                self._open[level] = []
                self._put(level + 1, _merged(waiting))

    def _cut(self, step: int) -> None:
        """Forgets ``step`` and all after it; a bucket across it goes with it, and finer ones take its place."""
        self._cut_from = step if self._cut_from is None else min(step, self._cut_from)
        for level, kept in enumerate(self._levels):
            while kept and kept[-1].last_step >= step:
                kept.pop()
            self._unsaved = [(at, it) for at, it in self._unsaved if at != level or it.last_step < step]
        self._reopen()

    def _reopen(self) -> None:
        """Works out which buckets are in none of the level above."""
        for level in range(_LEVELS - 1):
            above = self._levels[level + 1]
            covered = above[-1].last_step if above else -1
            tail = [it for it in self._levels[level] if it.last_step > covered]
            self._open[level] = tail[-(FACTOR - 1) :]

    # -- the file ------------------------------------------------------------------------------------------------------

    def load(self, file: sqlite3.Connection) -> None:
        """Reads what `save` has written. Raises `sqlite3.Error`."""
        file.execute(_SCHEMA)
        rows = file.execute("SELECT * FROM step ORDER BY level, first_step")
        for level, first, last, at, tokens, num_losses, loss_sum, low, high, num_tokens, seconds in rows:
            if 0 <= level < _LEVELS:
                low, high = (math.inf, -math.inf) if low is None or high is None else (low, high)
                figures = (num_losses, loss_sum, low, high, num_tokens, seconds)
                self._levels[level].append(Bucket(first, last, at, tokens, *figures))
        self._reopen()

    def save(self, file: sqlite3.Connection) -> None:
        """Writes what is new, within the caller's transaction. Raises `sqlite3.Error`."""
        if self._cut_from is not None:
            file.execute("DELETE FROM step WHERE last_step >= ?", (self._cut_from,))
        file.executemany("INSERT OR REPLACE INTO step VALUES (?,?,?,?,?,?,?,?,?,?,?)", _rows(self._unsaved))
        for level in {level for level, _ in self._unsaved}:
            oldest = self._levels[level][0].first_step
            file.execute("DELETE FROM step WHERE level = ? AND first_step < ?", (level, oldest))
        self._unsaved.clear()
        self._cut_from = None


def _rows(buckets: Iterable[tuple[int, Bucket]]) -> Iterable[tuple[object, ...]]:
    for level, it in buckets:
        low, high = (it.low, it.high) if it.num_losses else (None, None)
        yield (level, *it[:6], low, high, *it[8:])
