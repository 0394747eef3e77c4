"""Which lane each row of a mixture comes from: exact to within one row of the shares, at any length.

`exact` is the order of new runs. Lane i has the share ``s_i = p_i / P``, p_i whole, P their sum; after any n rows it
has given ``c_i(n)`` rows with ``|c_i(n) - s_i · n| < 1``. With W windows a shard, any run of n shards is therefore
within ``1 / W`` of a shard of the shares; all ranks together as well, since they take their rows from one order.

The order. The j-th row of lane i (j = 1, 2, …) must come at one of the rows

    r = floor((j - 1) · P / p_i) + 1   …   d = ceil(j · P / p_i)

and of all that may come now the one with the earliest d does (ties: the first lane). That is the earliest deadline
first of scheduling theory; the bound is that of Tijdeman (*The chairman assignment problem*, 1980). Taking the lane
that is furthest behind would be simpler, but comes without this proof.

Proof that every row keeps its deadline and none stays empty.

1. *Deadlines.* For jobs of unit length on one machine, with whole release times and deadlines, earliest deadline first
   meets them all if in every stretch of rows a … b no more jobs have both r ≥ a and d ≤ b than the stretch has rows
   (Jackson 1955; Hall's condition for intervals). Of lane i these are the j with (j - 1) · P / p_i ≥ a - 1 and
   j · P / p_i ≤ b, so s_i (a - 1) + 1 ≤ j ≤ s_i b: floor(s_i b) - ceil(s_i (a - 1)) ≤ s_i (b - a + 1) of them.
   Summed over the lanes that is at most b - a + 1.
2. *No gap.* Of lane i, job j may have come by row n if (j - 1) · P / p_i < n, that is j < s_i n + 1: ceil(s_i n) of
   them. Over the lanes these are n or more, and only n - 1 rows were given before row n.
3. *The bound.* By r, every job done by row n has j < s_i n + 1, so c_i(n) < s_i n + 1. By d, every j ≤ s_i n is done
   by row n, so c_i(n) ≥ floor(s_i n) > s_i n - 1. ∎

After P rows every lane has given p_i, and the order begins again; so going to any row costs at most the P rows of one
period. Weights are read as the decimals that they print as (0.8 is 4/5). Those whose period would be above 1,000,000
are rounded to millionths, one at least; the bound then holds for the rounded shares (`MixtureOrder.parts`). The
trade-off: a row costs about 1 µs when its place in the period is first reached, and two bytes of memory.

`weyl` is the order of runs that began before there was `exact`, kept for their states and for whoever replays them:
multiples of the golden ratio (Weyl 1916), right to within a few rows at any length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Mixture = Literal["exact", "weyl"]

MAX_PERIOD: Final = 1_000_000
_EXTENDED_BY: Final = 4_096
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_WORDS: Final = 1 << 64


class RowOrder(Protocol):
    """From which lane each row comes; a pure function of the row's number."""

    def lanes(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """int64[count], the lanes of the rows ``first … first + count − 1``."""

    def counts(self, first: int, end: int) -> list[int]:
        """How many of the rows ``first … end − 1`` come from each lane."""


def row_order(weights: Sequence[float], mixture: Mixture) -> RowOrder:
    """The order of lanes with these weights, all above 0; those of equal shares share their memory."""
    return _exact_order(shares_of(weights)) if mixture == "exact" else WeylOrder(weights)


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """The shares of the weights as whole parts of their sum, which is at most `MAX_PERIOD`.

    Args:
        weights: finite, above 0; each is taken as the decimal that it prints as.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    parts = _reduced([int(weight * scale) for weight in exact])
    return tuple(parts if sum(parts) <= MAX_PERIOD else _reduced(_rounded(parts)))


def _reduced(parts: Sequence[int]) -> list[int]:
    divisor = math.gcd(*parts)
    return [part // divisor for part in parts]


def _rounded(parts: Sequence[int]) -> list[int]:
    """The nearest shares of `MAX_PERIOD` parts, one at least, by largest remainders."""
    total = sum(parts)
    found = [max(1, part * MAX_PERIOD // total) for part in parts]
    # Behind, in parts of a part; lanes that were given their one part are not taken from.
    behind = sorted(range(len(parts)), key=lambda lane: found[lane] * total - parts[lane] * MAX_PERIOD)
    for lane in behind[: max(0, MAX_PERIOD - sum(found))]:
        found[lane] += 1
    found[max(range(len(parts)), key=parts.__getitem__)] -= max(0, sum(found) - MAX_PERIOD)
    return found


class _Known(NamedTuple):
    """The beginning of a period."""

    order: npt.NDArray[np.uint16]
    """The lane of each row."""
    given: tuple[int, ...]
    """Rows of each lane in it."""


class MixtureOrder:
    """The `exact` order.

    Args:
        parts: of each lane, above 0; their sum is the period.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self.parts = tuple(parts)
        """The shares, as whole parts of their sum."""
        self.period = sum(parts)
        """Rows after which the order begins again."""
        # Replaced as a whole: two threads that extend it at once find the same.
        self._known = _Known(np.empty(0, dtype=np.uint16), (0,) * len(parts))

    def lanes(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """int64[count], the lanes of the rows ``first … first + count − 1``."""
        begin = first % self.period
        order = self._first(min(begin + count, self.period))
        if begin + count <= self.period:
            return order[begin : begin + count].astype(np.int64)
        return order[np.arange(begin, begin + count) % self.period].astype(np.int64)

    def counts(self, first: int, end: int) -> list[int]:
        """How many of the rows ``first … end − 1`` come from each lane."""
        return [after - before for before, after in zip(self._below(first), self._below(end), strict=True)]

    def _below(self, rows: int) -> list[int]:
        periods, rest = divmod(rows, self.period)
        within = np.bincount(self._first(rest)[:rest], minlength=len(self.parts))
        return [periods * part + int(count) for part, count in zip(self.parts, within, strict=True)]

    def _first(self, rows: int) -> npt.NDArray[np.uint16]:
        """The period's first ``rows`` rows, or more."""
        known = self._known
        if rows > len(known.order):
            # Twice as many each time: appending to an array copies it.
            known = self._extended(known, min(self.period, max(rows, 2 * len(known.order), _EXTENDED_BY)))
            self._known = known
        return known.order

    def _extended(self, known: _Known, rows: int) -> _Known:
        parts, period, given = self.parts, self.period, list(known.given)
        releases = [each * period // part + 1 for each, part in zip(given, parts, strict=True)]
        deadlines = [-(-(each + 1) * period // part) for each, part in zip(given, parts, strict=True)]
        lanes = range(len(parts))
        found = []
        for row in range(len(known.order) + 1, rows + 1):
            chosen = min((lane for lane in lanes if releases[lane] <= row), key=deadlines.__getitem__)
            found.append(chosen)
            given[chosen] += 1
            releases[chosen] = given[chosen] * period // parts[chosen] + 1
            deadlines[chosen] = -(-(given[chosen] + 1) * period // parts[chosen])
        return _Known(np.append(known.order, np.array(found, dtype=np.uint16)), tuple(given))


@functools.lru_cache(maxsize=16)
def _exact_order(parts: tuple[int, ...]) -> MixtureOrder:
    return MixtureOrder(parts)


class WeylOrder:
    """The `weyl` order: row n comes from the lane in whose part of 2⁶⁴ lies (n + 1) · golden mod 2⁶⁴."""

    def __init__(self, weights: Sequence[float]) -> None:
        relative = np.asarray(weights, dtype=np.float64) / max(weights)
        shares = relative / relative.sum()
        # Shares that add up to 1 in all but name would end at 2**64, which no word can say.
        ends = np.minimum(np.cumsum(shares)[:-1] * 2.0**53, 2.0**53 - 1).astype(np.uint64) << np.uint64(11)
        self._ends: npt.NDArray[np.uint64] = ends

    def lanes(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """int64[count], the lanes of the rows ``first … first + count − 1``."""
        words = (np.arange(first + 1, first + count + 1, dtype=np.uint64)) * _GOLDEN
        return np.searchsorted(self._ends, words, side="right")

    def counts(self, first: int, end: int) -> list[int]:
        """How many of the rows ``first … end − 1`` come from each lane."""
        below = [_rows_below(end, int(each)) - _rows_below(first, int(each)) for each in self._ends]
        return [each - before for before, each in zip([0, *below], [*below, end - first], strict=True)]


def _rows_below(rows: int, end: int) -> int:
    """Of the first ``rows`` rows, how many have a word below ``end``.

    With m = 2⁶⁴, the word of row n − 1 is x mod m for x = n · golden, and [x mod m < end] = ⌊x/m⌋ − ⌊(x − end)/m⌋.
    """
    golden = int(_GOLDEN)
    beyond = _floor_sum(rows + 1, golden, _WORDS - end) - (_WORDS - end) // _WORDS - rows
    return _floor_sum(rows + 1, golden, 0) - beyond


def _floor_sum(count: int, factor: int, offset: int) -> int:
    """The sum of ⌊(factor · i + offset) / 2⁶⁴⌋ over i = 0 … count − 1, for numbers of 0 or more; exact.

    Euclid's algorithm adds it up in some 40 rounds: 2⁴⁰ batches of three lanes in 0.15 ms.
    """
    total, divisor = 0, _WORDS
    while True:
        total += (count - 1) * count // 2 * (factor // divisor) + count * (offset // divisor)
        factor, offset = factor % divisor, offset % divisor
        last = factor * count + offset
        if last < divisor:
            return total
        # The points under the line, counted along the other axis.
        count, offset = divmod(last, divisor)
        divisor, factor = factor, divisor
