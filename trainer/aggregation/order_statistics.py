"""Sorting networks: order statistics of a few rows, coordinate by coordinate, by minimum and maximum alone.

A network is a fixed list of compare-exchanges, so that whole rows go through one vector instruction at a time: 4 rows
of 262,144 values are sorted by five minima and five maxima in 0.4 ms, where torch.sort over the rows takes 13 ms.
Networks are Batcher's odd-even merges (the least possible number of exchanges up to 8 rows: 1, 3, 5, 9, 12, 16, 19),
cut down to what the wanted ranks depend on. A network is compiled once for each number of rows and choice of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["CompareExchange", "Network", "network"]


@dataclass(frozen=True, slots=True)
class CompareExchange:
    """Order two wires: read two registers, write the lesser value to one and the greater to another."""

    low: int
    """Wire that carries the lesser value from here on."""
    high: int
    read_low: int
    """Register that wire ``low`` is in."""
    read_high: int
    write_low: int
    """Register for the lesser value, never one that is read here; -1: not needed."""
    write_high: int


@dataclass(frozen=True, slots=True)
class Network:
    """A program over registers; the first ``num_rows`` of them are the rows, and are only read."""

    num_registers: int
    exchanges: tuple[CompareExchange, ...]
    outputs: tuple[int, ...]
    """Register of each wanted rank, in the order they were asked for."""


def _merges(num_rows: int) -> list[tuple[int, int]]:
    """Batcher's odd-even merge sort (Knuth, volume 3, algorithm 5.2.2M) as pairs of wires."""
    pairs: list[tuple[int, int]] = []
    span = 1
    while span < num_rows:
        step = span
        while step >= 1:
            pairs.extend(
                (wire, wire + step)
                for first in range(step % span, num_rows - step, 2 * step)
                for wire in range(first, min(first + step, num_rows - step))
                if wire // (2 * span) == (wire + step) // (2 * span)
            )
            step //= 2
        span *= 2
    return pairs


def _needed(pairs: Sequence[tuple[int, int]], ranks: Sequence[int]) -> list[tuple[int, int, bool, bool]]:
    """The pairs that the ranks depend on, and which of their two results are used."""
    wanted = set(ranks)
    kept = []
    for low, high in reversed(pairs):
        if low in wanted or high in wanted:
            kept.append((low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    return kept[::-1]


@lru_cache(maxsize=256)
def network(num_rows: int, ranks: tuple[int, ...]) -> Network:
    """The program that finds some ranks of every coordinate.

    Args:
        num_rows: rows to sort.
        ranks: the wanted ones, 0 the smallest.
    """
    register = list(range(num_rows))
    free: list[int] = []
    num_registers = num_rows
    exchanges = []
    for low, high, use_low, use_high in _needed(_merges(num_rows), ranks):
        reads = register[low], register[high]
        writes = [-1, -1]
        for side, used in enumerate((use_low, use_high)):
            if used:
                if not free:
                    free.append(num_registers)
                    num_registers += 1
                writes[side] = free.pop()
        free.extend(read for read in reads if read >= num_rows)
        register[low], register[high] = writes
        exchanges.append(CompareExchange(low, high, *reads, *writes))
    return Network(num_registers, tuple(exchanges), tuple(register[rank] for rank in ranks))
