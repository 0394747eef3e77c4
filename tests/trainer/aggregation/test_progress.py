"""How much of its work a round has, as its members claim."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.aggregation import common_progress

SHARES = st.floats(0.0, 1.0)


def test_it_is_the_average_of_the_claims_by_weight() -> None:
    assert common_progress([1.0, 0.25], [3.0, 1.0]) == pytest.approx(0.8125)
    assert common_progress([1.0] * 7, [0.1, 0.2, 0.3, 1.0, 1.5, 2.0, 1.0]) == 1.0


def test_who_brings_nothing_has_no_part_in_it() -> None:
    assert common_progress([0.0, 0.5, 0.5], [0.0, 1.0, 2.0]) == 0.5
    assert common_progress([1.0, 1.0], [0.0, 0.0]) == 0.0
    assert common_progress([], []) == 0.0


@settings(deadline=None)
@given(st.lists(SHARES, min_size=2, max_size=9), st.floats(0.1, 1e6), st.data())
def test_a_minority_that_claims_to_have_done_all_does_not_lift_it_over_the_others(
    honest: list[float], weight: float, data: st.DataObject
) -> None:
    num_liars = data.draw(st.integers(1, len(honest) - 1))
    found = common_progress([*honest, *[1.0] * num_liars], [*[1.0] * len(honest), *[weight] * num_liars])
    assert 0.0 <= found <= max(honest)
