"""Sets kept as runs are sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from trainer.pipeline.ledger.lane_book import Intervals

_NUMBERS = st.integers(0, 30)
_STEPS = st.lists(st.tuples(st.sampled_from(["add", "drop_through"]), _NUMBERS), max_size=60)


@given(_STEPS)
def test_it_holds_what_a_set_holds_in_the_fewest_runs(steps: list[tuple[str, int]]) -> None:
    intervals, expected = Intervals(), set[int]()
    for step, number in steps:
        if step == "add":
            intervals.add(number)
            expected.add(number)
        else:
            intervals.drop_through(number)
            expected = {each for each in expected if each > number}
        runs = list(intervals)
        assert {each for first, last in runs for each in range(first, last + 1)} == expected
        assert all(before[1] + 1 < after[0] for before, after in pairwise(runs))
        assert len(intervals) == len(expected)
        assert [each in intervals for each in range(32)] == [each in expected for each in range(32)]
        assert intervals.first_gap() == min(set(range(32)) - expected)
        assert list(Intervals(runs)) == runs


def test_many_in_order_are_one_run() -> None:
    intervals = Intervals()
    for number in range(1, 10**5 + 1):
        intervals.add(number)
    assert list(intervals) == [(1, 10**5)]
