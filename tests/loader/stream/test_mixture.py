"""The order of a mixture: within one row of the shares at every length, and any row found without those before it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.stream.mixture import MAX_PERIOD, MixtureOrder, row_order, shares_of

PARTS = st.lists(st.integers(1, 60), min_size=1, max_size=8) | st.lists(st.integers(1, 2_000), min_size=2, max_size=3)


@given(PARTS)
def test_every_prefix_is_within_one_row_of_the_shares(parts: list[int]) -> None:
    order = MixtureOrder(parts)
    rows = 2 * order.period + 3
    lanes = order.lanes(0, rows)
    counts = np.cumsum(lanes[:, None] == np.arange(len(parts)), axis=0)
    exact = np.outer(np.arange(1, rows + 1), parts)
    assert (np.abs(counts * order.period - exact) < order.period).all()  # In whole numbers, so without rounding.


@given(PARTS, st.integers(0, 2**60), st.integers(0, 50))
def test_any_stretch_is_that_of_the_whole_order(parts: list[int], first: int, count: int) -> None:
    order = MixtureOrder(parts)
    period = [int(lane) for lane in MixtureOrder(parts).lanes(0, order.period)]
    expected = [period[row % order.period] for row in range(first, first + count)]
    assert order.lanes(first, count).tolist() == expected
    assert order.counts(first, first + count) == [expected.count(lane) for lane in range(len(parts))]


def test_the_order_is_the_same_for_ever() -> None:
    assert MixtureOrder((7, 2, 1)).lanes(0, 20).tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2] * 2
    assert MixtureOrder((3, 3)).lanes(0, 6).tolist() == [0, 1] * 3
    assert row_order([0.8, 0.2], "exact").lanes(10**15, 5).tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.8, 0.2], (4, 1)),
        ([80, 20], (4, 1)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([1e300, 1e300, 1.0], (500_000, 499_999, 1)),
        ([5e-324, 5e-324], (1, 1)),
        ([1.0, 1e-17], (999_999, 1)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([0.123456789, 0.5], (9_901, 40_099)),
        ([123_456_789, 876_543_211], (123_457, 876_543)),
    ],
)
def test_weights_are_the_decimals_they_print_as(weights: list[float], shares: tuple[int, ...]) -> None:
    assert shares_of(weights) == shares


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=9))
def test_rounded_shares_are_the_nearest_millionths(weights: list[float]) -> None:
    shares = shares_of(weights)
    total = sum(shares)
    assert total <= MAX_PERIOD
    assert min(shares) >= 1
    exact = [Fraction(repr(weight)) for weight in weights]
    for share, weight in zip(shares, exact, strict=True):
        given_one = len(weights) - 1
        assert abs(Fraction(share, total) - weight / sum(exact)) <= Fraction(1 + given_one, MAX_PERIOD)


def test_the_older_order_is_the_one_it_was() -> None:
    """Runs that began with it go on with it."""
    order = row_order([3.0, 1.0, 0.5], "weyl")
    assert order.lanes(0, 24).tolist() == [0, 0, 1, 0, 0, 1, 0, 2, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 2, 0, 0, 1]
    assert order.counts(1000, 2**40) == [733_007_751_183, 244_335_917_061, 122_167_958_532]
