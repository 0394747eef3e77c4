"""Averages over a few long rows: weighted, and of the middle values of every coordinate.

Worked on in chunks that stay in cache, by elementwise fp32 operations in a fixed order. Sums are divided once, at the
end; where fp32 sums overflow although every value is finite, those coordinates are done again in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainer.aggregation.order_statistics import Network, network

__all__ = ["middle_mean", "weighted_mean"]

_Values = NDArray[np.float32]
_Weight = np.float32 | _Values
_Terms = Sequence[tuple[_Values, _Weight]]

# Values of each row worked on at once: of 8,192 to 262,144 the fastest for most rules and numbers of rows.
_CHUNK_VALUES: Final = 65_536


def weighted_mean(rows: Sequence[_Values], weights: Sequence[float], out: _Values) -> None:
    """Sum of weighted rows over the sum of weights; the row itself, bit for bit, if one alone has any.

    Args:
        rows: fp32[d] each, finite.
        weights: one a row, 0 or more; rows of weight 0 are not touched. All 0 is all equal.
        out: fp32[d], written.
    """
    kept = [(row, weight) for row, weight in zip(rows, _relative(weights), strict=True) if weight > 0]
    scratch = np.empty(min(_CHUNK_VALUES, out.size), np.float32)
    for chunk in _chunks(out.size):
        into = out[chunk]
        _average([(row[chunk], weight) for row, weight in kept], into, scratch[: into.size])


def middle_mean(rows: Sequence[_Values], num_trimmed: int, weights: Sequence[float] | None, out: _Values) -> None:
    """Mean of what is left of every coordinate without its lowest and highest values; the median if that is one or two.

    Args:
        rows: fp32[d] each, finite.
        num_trimmed: values left out at each end, less than half of the rows.
        weights: one a row, not all 0; they follow their values. None: equal.
        out: fp32[d], written.
    """
    if num_trimmed == 0:
        weighted_mean(rows, [1.0] * len(rows) if weights is None else weights, out)
        return
    relative = _relative(weights or [1.0] * len(rows))
    program = network(len(rows), tuple(range(num_trimmed, len(rows) - num_trimmed)))
    scratch = np.empty((program.num_registers - len(rows) + 1, min(_CHUNK_VALUES, out.size)), np.float32)
    one = np.float32(1)
    carried = None if all(weight == one for weight in relative) else _CarriedWeights(relative, scratch.shape[1])
    for chunk in _chunks(out.size):
        into = out[chunk]
        spare, *free = scratch[:, : into.size]
        registers = [*(row[chunk] for row in rows), *free]
        if carried is None:
            _run(program, registers)
            terms: list[tuple[_Values, _Weight]] = [(registers[output], one) for output in program.outputs]
        else:
            carried.begin(into.size)
            _run(program, registers, carried.exchange)
            sorted_weights = carried.of_wires(range(num_trimmed, len(rows) - num_trimmed))
            terms = [(registers[at], weight) for at, weight in zip(program.outputs, sorted_weights, strict=True)]
        _average(terms, into, spare)


def _run(
    program: Network,
    registers: Sequence[_Values],
    before: Callable[[int, int, _Values, _Values], None] | None = None,
) -> None:
    for exchange in program.exchanges:
        low, high = registers[exchange.read_low], registers[exchange.read_high]
        if before is not None:
            before(exchange.low, exchange.high, low, high)
        if exchange.write_low >= 0:
            np.minimum(low, high, out=registers[exchange.write_low])
        if exchange.write_high >= 0:
            np.maximum(low, high, out=registers[exchange.write_high])


class _CarriedWeights:
    """Which row the value on each wire came from, one byte a value, swapped along with the values.

    Args:
        weights: one a row, at most 256.
        num_values: the longest chunk.
    """

    def __init__(self, weights: Sequence[np.float32], num_values: int) -> None:
        self._weights = np.array(weights, dtype=np.float32)
        self._origins = np.empty((len(weights), num_values), np.uint8)
        self._swaps = np.empty(num_values, np.bool_)
        self._flips = np.empty(num_values, np.uint8)
        self._size = num_values

    def begin(self, size: int) -> None:
        """Every value is on the wire of its own row."""
        self._size = size
        self._origins[:, :size] = np.arange(len(self._weights), dtype=np.uint8)[:, None]

    def exchange(self, low: int, high: int, low_values: _Values, high_values: _Values) -> None:
        """Swap the origins of two wires where the values are about to be."""
        swaps, flips = self._swaps[: self._size], self._flips[: self._size]
        first, second = self._origins[low, : self._size], self._origins[high, : self._size]
        np.greater(low_values, high_values, out=swaps)
        np.bitwise_xor(first, second, out=flips)
        np.multiply(flips, swaps.view(np.uint8), out=flips)
        np.bitwise_xor(first, flips, out=first)
        np.bitwise_xor(second, flips, out=second)

    def of_wires(self, wires: Sequence[int]) -> Iterator[_Values]:
        """The weights of the values on some wires."""
        for wire in wires:
            yield self._weights.take(self._origins[wire, : self._size])


def _relative(weights: Sequence[float]) -> list[np.float32]:
    """Weights over the greatest of them: equal ones become exactly 1."""
    greatest = max(weights)
    return [np.float32(weight / greatest if greatest > 0 else 1.0) for weight in weights]


def _chunks(num_values: int) -> list[slice]:
    return [slice(start, start + _CHUNK_VALUES) for start in range(0, num_values, _CHUNK_VALUES)]


def _average(terms: _Terms, into: _Values, scratch: _Values) -> None:
    """Weighted average of rows that may be too large to be added up in fp32."""
    try:
        with np.errstate(over="raise", under="ignore"):
            _add_and_divide(terms, into, scratch)
    except FloatingPointError:
        with np.errstate(all="ignore"):
            _add_and_divide(terms, into, scratch)
        huge = ~np.isfinite(into)
        weights = [np.broadcast_to(weight, into.shape)[huge].astype(np.float64) for _, weight in terms]
        sums = sum(row[huge] * weight for (row, _), weight in zip(terms, weights, strict=True))
        into[huge] = sums / sum(weights)


def _add_and_divide(terms: _Terms, into: _Values, scratch: _Values) -> None:
    (row, weight), *others = terms
    _weighted(row, weight, into)
    total = weight
    for row, weight in others:
        np.add(into, row if _is_one(weight) else _weighted(row, weight, scratch), out=into)
        total = total + weight
    if _is_power_of_two(total):  # the reciprocal is exact, and a product costs a third of a quotient
        np.multiply(into, np.float32(1) / total, out=into)
    elif not _is_one(total):
        np.divide(into, total, out=into)


def _weighted(row: _Values, weight: _Weight, out: _Values) -> _Values:
    if _is_one(weight):
        np.copyto(out, row)
        return out
    return np.multiply(row, weight, out=out)


def _is_power_of_two(total: _Weight) -> bool:
    return isinstance(total, np.float32) and bool(total > 1) and math.frexp(total)[0] == 0.5


def _is_one(weight: _Weight) -> bool:
    return isinstance(weight, np.float32) and bool(weight == 1)
