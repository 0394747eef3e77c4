"""Sorting networks: every rank of every input, by the 0-1 principle."""

from __future__ import annotations

import itertools

import pytest

from trainer.aggregation.order_statistics import Network, network


def run(program: Network, row: tuple[int, ...]) -> list[int]:
    registers = [*row, *[-9] * (program.num_registers - len(row))]
    for exchange in program.exchanges:
        low, high = registers[exchange.read_low], registers[exchange.read_high]
        for register, value in ((exchange.write_low, min(low, high)), (exchange.write_high, max(low, high))):
            if register >= 0:
                assert register >= len(row), "a row was overwritten"
                assert register not in (exchange.read_low, exchange.read_high)
                registers[register] = value
    return [registers[output] for output in program.outputs]


@pytest.mark.parametrize("num_rows", range(1, 12))
def test_sorts_every_sequence_of_zeros_and_ones(num_rows):
    """A network that sorts those sorts everything (Knuth, volume 3, theorem 5.3.4Z)."""
    program = network(num_rows, tuple(range(num_rows)))
    for row in itertools.product((0, 1), repeat=num_rows):
        assert run(program, row) == sorted(row)


@pytest.mark.parametrize("num_rows", range(1, 8))
def test_any_choice_of_ranks(num_rows):
    for size in range(1, num_rows + 1):
        for ranks in itertools.combinations(range(num_rows), size):
            program = network(num_rows, ranks)
            for row in itertools.product((0, 1), repeat=num_rows):
                assert run(program, row) == [sorted(row)[rank] for rank in ranks]


@pytest.mark.parametrize(("num_rows", "least"), [(2, 1), (3, 3), (4, 5), (5, 9), (6, 12), (7, 16), (8, 19)])
def test_as_few_exchanges_as_can_be(num_rows, least):
    assert len(network(num_rows, tuple(range(num_rows))).exchanges) == least


def test_a_median_takes_less_than_a_sort():
    def operations(ranks: tuple[int, ...]) -> int:
        return sum((e.write_low >= 0) + (e.write_high >= 0) for e in network(7, ranks).exchanges)

    assert operations((3,)) < operations(tuple(range(7)))
