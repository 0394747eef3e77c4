"""Reduces the members' copies of one part of a vector to one.

Every operation is elementwise, in a fixed order: the bits are the same however a vector is cut into parts and on every
machine, so that a reducer's work can be checked by repeating it. Middle values are found by sorting networks (Batcher's
odd-even merges, cut down to the wanted ranks), whole rows at a time: 4 rows of 262,144 values take 0.4 ms, with
torch.sort 13. Coordinates whose fp32 sum overflows are computed again in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.aggregation.config import RuleConfig
from trainer.aggregation.deciding import RuleDecision, effective_rule, needs_moments, trim_count
from trainer.aggregation.second_moments import finite_rows
from trainer.errors import RoundFailedError, TrainerUsageError

_Values = NDArray[np.float32]
_Weight = np.float32 | _Values
_Terms = Sequence[tuple[_Values, _Weight]]

# Values of each row worked on at once: of 8,192 to 262,144 the fastest for most rules and numbers of rows.
_CHUNK_VALUES: Final = 65_536


def reduce_part(
    contributions: Tensor | Sequence[Tensor],
    weights: Sequence[float] | NDArray[np.float64],
    config: RuleConfig,
    decision: RuleDecision | None = None,
    reference_part: Tensor | None = None,
    positions: Sequence[int] | None = None,
) -> Tensor:
    """Aggregates the members' copies of one part, fp32[m, d] on the CPU, to a finite fp32[d].

    Rows that are not finite, excluded or of weight 0 are left out; weights (capped) that are all 0 are all equal.

    Args:
        contributions: not changed.
        weights: [m].
        config: the rule.
        decision: result of ``decide`` over whole vectors, required if ``needs_moments(config)``, or, for a
            coordinate-wise rule, over this part. Without one nobody is validated.
        reference_part: fp32[d]; required if the decision gives the reference a share.
        positions: [m], positions of the rows in the decision; None: 0 to m-1. If members of the decision are missing,
            the shares of the others grow in proportion.

    Raises:
        RoundFailedError: no row is left.
    """
    if decision is None and needs_moments(config):
        raise TrainerUsageError(f"{config.rule}: expected a decision over whole vectors, found none")
    places = range(len(contributions)) if positions is None else positions
    if not len(contributions) == len(weights) == len(places):
        raise TrainerUsageError(
            f"expected a weight and a position for each of {len(contributions)} rows, found {len(weights)} weights "
            f"and {len(places)} positions"
        )
    excluded = {} if decision is None else decision.excluded
    finite = enumerate(finite_rows(contributions))
    allowed = [row for row, is_finite in finite if is_finite and places[row] not in excluded]
    usable = [row for row in allowed if weights[row] > 0] or allowed
    if not usable:
        raise RoundFailedError(
            f"expected a finite contribution to the part, found none among {len(contributions)}; train on"
        )
    rows: list[_Values] = [contributions[row].detach().numpy() for row in usable]
    result = torch.empty(rows[0].size)
    into: _Values = result.numpy()
    if decision is not None and decision.coefficients is not None:
        _combine(rows, [places[row] for row in usable], decision, reference_part, into)
        return result
    rule = effective_rule(len(rows), config).rule if decision is None else decision.rule_used
    kept_weights = [float(weights[row]) for row in usable]
    if rule == "median":
        _median(rows, into)
    elif rule == "trimmed_mean":
        _middle_mean(rows, trim_count(len(rows), config), kept_weights, into)
    else:
        _weighted_mean(rows, kept_weights, into)
    return result


def _combine(
    rows: Sequence[_Values], places: Sequence[int], decision: RuleDecision, reference_part: Tensor | None, into: _Values
) -> None:
    """The decision's linear combination over the rows that are present."""
    coefficients = decision.coefficients or ()
    shares = [coefficients[place] for place in places]
    if decision.reference_coefficient > 0:
        if reference_part is None:
            raise TrainerUsageError("expected the reference's part, of which the decision has a share; found none")
        rows = [*rows, reference_part.detach().numpy()]
        shares.append(decision.reference_coefficient)
    if any(share > 0 for share in shares):
        _weighted_mean(rows, shares, into)
    else:  # Krum's choice is missing here, and the others were never chosen.
        _median(rows, into)


def _median(rows: Sequence[_Values], into: _Values) -> None:
    _middle_mean(rows, (len(rows) - 1) // 2, [1.0] * len(rows), into)


def _weighted_mean(rows: Sequence[_Values], weights: Sequence[float], out: _Values) -> None:
    """The sum of weighted rows over the sum of weights; a single row with a weight is copied bit for bit."""
    kept = [(row, weight) for row, weight in zip(rows, _relative(weights), strict=True) if weight > 0]
    scratch = np.empty(min(_CHUNK_VALUES, out.size), np.float32)
    for chunk in _chunks(out.size):
        into = out[chunk]
        _average([(row[chunk], weight) for row, weight in kept], into, scratch[: into.size])


def _middle_mean(rows: Sequence[_Values], num_trimmed: int, weights: Sequence[float], out: _Values) -> None:
    """The average of every coordinate without the ``num_trimmed`` lowest and highest values; weights follow values."""
    if num_trimmed == 0:
        _weighted_mean(rows, weights, out)
        return
    relative = np.array(_relative(weights))
    ranks = range(num_trimmed, len(rows) - num_trimmed)
    program = sorting_network(len(rows), tuple(ranks))
    scratch = np.empty((program.num_registers - len(rows) + 1, min(_CHUNK_VALUES, out.size)), np.float32)
    own_rows = np.arange(len(rows), dtype=np.uint8)[:, None]
    for chunk in _chunks(out.size):
        into = out[chunk]
        spare, *free = scratch[:, : into.size]
        registers = [*(row[chunk] for row in rows), *free]
        kept_weights: list[_Weight] = [np.float32(1)] * len(ranks)
        if (relative == 1).all():
            _run(program, registers)
        else:
            origins = np.repeat(own_rows, into.size, axis=1)
            _run(program, registers, origins)
            kept_weights = [relative.take(origins[rank]) for rank in ranks]
        values = (registers[output] for output in program.outputs)
        _average(list(zip(values, kept_weights, strict=True)), into, spare)


@dataclass(frozen=True, slots=True)
class CompareExchange:
    """Orders two wires: reads two registers, and writes the lesser value to one and the greater to another."""

    low: int  # Wire that carries the lesser value from here on.
    high: int
    read_low: int  # Register that wire ``low`` is in.
    read_high: int
    write_low: int  # Register for the lesser value, never one that is read here; -1: not needed.
    write_high: int


@dataclass(frozen=True, slots=True)
class SortingNetwork:
    """A program over registers; the first of them are the rows, which are only read."""

    num_registers: int
    exchanges: tuple[CompareExchange, ...]
    outputs: tuple[int, ...]


@lru_cache(maxsize=256)
def sorting_network(num_rows: int, ranks: tuple[int, ...]) -> SortingNetwork:
    """Compiles the program that finds some ranks (0: the smallest) of every coordinate of ``num_rows`` rows."""
    register = list(range(num_rows))
    free: list[int] = []
    num_registers = num_rows
    exchanges = []
    for low, high, use_low, use_high in _needed(list(_merges(num_rows)), ranks):
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
    return SortingNetwork(num_registers, tuple(exchanges), tuple(register[rank] for rank in ranks))


def _merges(num_rows: int) -> Iterator[tuple[int, int]]:
    """Batcher's odd-even merge sort (Knuth, volume 3, algorithm 5.2.2M) as pairs of wires."""
    span = 1
    while span < num_rows:
        step = span
        while step >= 1:
            for first in range(step % span, num_rows - step, 2 * step):
                for wire in range(first, min(first + step, num_rows - step)):
                    if wire // (2 * span) == (wire + step) // (2 * span):
                        yield wire, wire + step
            step //= 2
        span *= 2


def _needed(pairs: Sequence[tuple[int, int]], ranks: Sequence[int]) -> list[tuple[int, int, bool, bool]]:
    """The pairs that the ranks depend on, and which of their two results are used."""
    wanted = set(ranks)
    kept = []
    for low, high in reversed(pairs):
        if low in wanted or high in wanted:
            kept.append((low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    return kept[::-1]


def _run(program: SortingNetwork, registers: Sequence[_Values], origins: NDArray[np.uint8] | None = None) -> None:
    """Runs the program; ``origins`` (uint8[wires, d]), the row each wire's value is of, is swapped with the values."""
    for exchange in program.exchanges:
        low, high = registers[exchange.read_low], registers[exchange.read_high]
        if origins is not None:
            first, second = origins[exchange.low], origins[exchange.high]
            flips = np.bitwise_xor(first, second)
            flips *= np.greater(low, high).view(np.uint8)
            first ^= flips
            second ^= flips
        if exchange.write_low >= 0:
            np.minimum(low, high, out=registers[exchange.write_low])
        if exchange.write_high >= 0:
            np.maximum(low, high, out=registers[exchange.write_high])


def _relative(weights: Sequence[float]) -> list[np.float32]:
    greatest = max(weights)
    return [np.float32(weight / greatest if greatest > 0 else 1.0) for weight in weights]


def _chunks(num_values: int) -> list[slice]:
    return [slice(start, start + _CHUNK_VALUES) for start in range(0, num_values, _CHUNK_VALUES)]


def _average(terms: _Terms, into: _Values, scratch: _Values) -> None:
    """Weighted average of rows whose sum may overflow fp32."""
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
    if isinstance(total, np.float32) and total > 1 and math.frexp(total)[0] == 0.5:
        # A power of two: its reciprocal is exact, and a product costs a third of a quotient.
        np.multiply(into, np.float32(1) / total, out=into)
    elif not _is_one(total):
        np.divide(into, total, out=into)


def _weighted(row: _Values, weight: _Weight, out: _Values) -> _Values:
    if _is_one(weight):
        np.copyto(out, row)
        return out
    return np.multiply(row, weight, out=out)


def _is_one(weight: _Weight) -> bool:
    return isinstance(weight, np.float32) and bool(weight == 1)
