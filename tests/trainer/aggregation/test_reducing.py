"""Reducing a part, against numpy's sort; sorting networks, by the 0-1 principle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.aggregation import noise
from trainer.aggregation import RuleConfig, RuleDecision, reduce_part
from trainer.aggregation.deciding import trim_count
from trainer.aggregation.reducing import SortingNetwork, sorting_network
from trainer.errors import RoundFailedError

LARGEST = torch.finfo(torch.float32).max
PART_RULES = ("mean", "median", "trimmed_mean")


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def reduced(rows: torch.Tensor, rule: str, weights=None, **options) -> torch.Tensor:
    return reduce_part(rows, [1.0] * len(rows) if weights is None else weights, RuleConfig(rule=rule, **options))


@pytest.mark.parametrize(
    ("rule", "values", "result"),
    [
        ("mean", (2, 4), 3),
        ("median", (1, 2, 1000), 2),
        ("median", (1, 2, 3, 1000), 2.5),
        ("median", (1, 2, 3, 1e9, -1e9, 1e9), 2.5),
        ("trimmed_mean", (1, 2, 3, 4, 100), 3),
        ("trimmed_mean", (7,), 7),
        ("trimmed_mean", (7, 9), 8),
        ("trimmed_mean", (7, 9, 1e30), 9),
        ("trimmed_mean", (0, 0, 0, 5, 5), 5 / 3),
    ],
)
def test_examples(rule, values, result):
    assert reduced(column(*values), rule).item() == pytest.approx(result, rel=1e-6)
    for weight in (1.0, 1e-300):
        assert reduced(column(1, 2, 6), "mean", [weight, weight, 2 * weight]).item() == 3.75


@pytest.mark.parametrize(
    ("num_members", "options", "trimmed"),
    [
        *((n, {}, trimmed) for n, trimmed in ((0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1))),
        *((n, {}, trimmed) for n, trimmed in ((7, 2), (8, 2), (20, 6), (48, 14))),
        (7, {"num_byzantine": 2}, 2),
        (3, {"num_byzantine": 0}, 0),
        (10, {"num_byzantine": 0, "trim_fraction": 0.1}, 1),
        (5, {"num_byzantine": 100}, 2),
    ],
)
def test_how_many_are_trimmed(num_members, options, trimmed):
    """At least the byzantine; one value always stays."""
    assert trim_count(num_members, RuleConfig(rule="trimmed_mean", **options)) == trimmed


matrices = st.tuples(st.integers(1, 10), st.integers(1, 12)).flatmap(
    lambda shape: hnp.arrays(
        np.float32, shape, elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False) | st.integers(-3, 3)
    )
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(values=matrices, num_byzantine=st.integers(0, 4))
def test_like_sorting(values, num_byzantine):
    rows = torch.from_numpy(values.copy())
    ordered = np.sort(values.astype(np.float64), axis=0)
    config = RuleConfig(rule="trimmed_mean", num_byzantine=num_byzantine)
    trim = trim_count(len(rows), config)
    kept = ordered[trim : len(rows) - trim]
    tolerance = 1e-5 * np.abs(kept).max(0) + 1e-30
    weights = [1.0] * len(rows)
    assert (np.abs(reduce_part(rows, weights, config).numpy() - kept.mean(0)) <= tolerance).all()
    median = reduced(rows, "median").numpy()
    assert (np.abs(median - np.median(ordered, axis=0)) <= 1e-5 * np.abs(ordered).max(0)).all()
    assert np.array_equal(rows.numpy(), values), "the contributions were changed"


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    values=hnp.arrays(np.float32, (6, 9), elements=st.floats(-100, 100, width=32), unique=True),
    weights=st.lists(st.floats(0.125, 3, width=16), min_size=6, max_size=6),
    num_byzantine=st.integers(0, 2),
)
def test_weights_follow_their_values(values, weights, num_byzantine):
    config = RuleConfig(rule="trimmed_mean", num_byzantine=num_byzantine)
    trim = trim_count(6, config)
    order = np.argsort(values, axis=0)[trim : 6 - trim]
    kept, kept_weights = np.take_along_axis(values, order, 0).astype(np.float64), np.array(weights)[order]
    expected = (kept * kept_weights).sum(0) / kept_weights.sum(0)
    np.testing.assert_allclose(reduce_part(torch.from_numpy(values), weights, config), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("rule", PART_RULES)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_cut_into_parts_changes_no_bit(num_rows, rule, weighted):
    rows = noise(num_rows, 200_003)
    rows[:, 150_000:150_040] = LARGEST  # sums overflow here
    weights = [1.0 + index for index in range(num_rows)] if weighted else [1.0] * num_rows
    whole = reduced(rows, rule, weights)
    bounds = [0, 1, 5, 65_536, 65_537, 150_020, 200_003]
    parts = [reduced(rows[:, a:b], rule, weights) for a, b in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.isfinite(whole).all()


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 9))
def test_the_order_of_members_changes_no_bit(rule, data, num_rows):
    rows = noise(num_rows, 500, seed=num_rows)
    order = data.draw(st.permutations(range(num_rows)))
    assert torch.equal(reduced(rows[order], rule), reduced(rows, rule))


@pytest.mark.parametrize("rule", PART_RULES)
def test_who_weighs_nothing_or_is_not_finite_is_left_out(rule):
    rows = column(1, 2, 3, 0, 0)
    assert reduced(rows, rule, [5.0, 5.0, 5.0, 0.0, 0.0]).item() == 2
    assert torch.isfinite(reduced(rows, rule, [0.0] * 5)).all()
    assert reduced(torch.zeros(5, 0), rule).shape == (0,)
    rows = noise(5, 300)
    for value in (torch.nan, torch.inf, -torch.inf):
        with_attacker = torch.cat([rows, torch.full((1, 300), 1.0).index_fill_(1, torch.tensor([299]), value)])
        assert torch.equal(reduced(with_attacker, rule), reduced(rows, rule))


@pytest.mark.parametrize("rule", PART_RULES)
@pytest.mark.parametrize("weights", [[1.0] * 4, [1.0, 2.0, 3.0, 1.0]])
def test_huge_finite_values_do_not_overflow(rule, weights):
    rows = torch.full((4, 10), LARGEST)
    rows[:, 5:] = noise(4, 5)
    result = reduced(rows, rule, weights)
    assert torch.equal(result[:5], torch.full((5,), LARGEST))
    assert torch.equal(result[5:], reduced(rows[:, 5:], rule, weights))


def linear(coefficients, reference_coefficient=0.0, excluded=None) -> RuleDecision:
    return RuleDecision(tuple(coefficients), reference_coefficient, excluded or {}, "multi_krum", "")


CONFIG = RuleConfig(rule="multi_krum")


def test_a_decisions_combination():
    rows, reference = noise(4, 40), noise(40, seed=3)
    result = reduce_part(rows[:3], [1.0] * 3, CONFIG, linear([0.5, 0.25, 0.0], 0.25), reference)
    torch.testing.assert_close(result, 0.5 * rows[0] + 0.25 * rows[1] + 0.25 * reference)
    # One chosen row comes back bit for bit.
    assert torch.equal(reduce_part(rows[:3], [1.0] * 3, CONFIG, linear([0.0, 1.0, 0.0])), rows[1])
    # The shares of members missing in a part go to the others; without the one chosen the median is left.
    decision = linear([0.5, 0.3, 0.2, 0.0], excluded={3: "direction"})
    result = reduce_part(rows[:2], [1.0] * 2, CONFIG, decision, positions=[0, 2])
    torch.testing.assert_close(result, (0.5 * rows[0] + 0.2 * rows[1]) / 0.7)
    result = reduce_part(rows[1:], [1.0] * 3, CONFIG, linear([1.0, 0.0, 0.0, 0.0]), positions=[1, 2, 3])
    assert torch.equal(result, reduced(rows[1:], "median"))


def test_the_excluded_are_not_looked_at():
    rows = noise(4, 40)
    decision = RuleDecision(None, 0.0, {1: "magnitude"}, "mean", "")
    result = reduce_part(rows, [1.0] * 4, RuleConfig(validation="enforce"), decision)
    assert torch.equal(result, reduced(rows[[0, 2, 3]], "mean"))
    with pytest.raises(RoundFailedError):
        reduce_part(rows[1:2], [1.0], RuleConfig(validation="enforce"), decision, positions=[1])


def test_of_nobody_there_is_no_result():
    for rows in (torch.zeros(0, 4), torch.full((3, 4), torch.nan)):
        with pytest.raises(RoundFailedError, match=f"none among {len(rows)}"):
            reduced(rows, "median")


def run_network(program: SortingNetwork, row: tuple[int, ...]) -> list[int]:
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
    """A network that sorts those sorts everything (Knuth, volume 3, theorem 5.3.4Z); up to 7 rows by any ranks."""
    if num_rows <= 8:  # As few exchanges as can be.
        least = [0, 1, 3, 5, 9, 12, 16, 19][num_rows - 1]
        assert len(sorting_network(num_rows, tuple(range(num_rows))).exchanges) == least
    sizes = range(1 if num_rows < 8 else num_rows, num_rows + 1)
    for ranks in itertools.chain.from_iterable(itertools.combinations(range(num_rows), size) for size in sizes):
        program = sorting_network(num_rows, ranks)
        for row in itertools.product((0, 1), repeat=num_rows):
            assert run_network(program, row) == [sorted(row)[rank] for rank in ranks]
