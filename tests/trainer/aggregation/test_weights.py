"""Weights and progress of a round: the specification's figures, and claims of strangers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.aggregation import cap_weights, common_progress, contribution_weight
from trainer.errors import TrainerUsageError

HOUR, DAY, WEEK = 3600.0, 86_400.0, 7 * 86_400.0


@pytest.mark.parametrize(
    ("age_s", "weight"),
    [
        (0.0, 10.0),
        (HOUR - 1, 10.0),
        (HOUR, 9.0),
        (DAY - 1, 9.0),
        (DAY, 7.0),
        (WEEK - 1, 7.0),
        (WEEK, 3.0),
        (1e300, 3.0),
        (-5.0, 10.0),
        (math.nan, 3.0),
    ],
)
def test_a_hundred_batches_by_age(age_s, weight):
    assert contribution_weight(100, age_s) == pytest.approx(weight, rel=1e-15)


def test_four_times_the_batches_weigh_twice():
    assert contribution_weight(400, 0) == 2 * contribution_weight(100, 0)


@pytest.mark.parametrize(("num_batches", "weight"), [(0, 0.0), (-7, 0.0), (10**400, 1e6)])
def test_claims_of_batches_that_nobody_trained(num_batches, weight):
    assert contribution_weight(num_batches, 0.0) == weight


@pytest.mark.parametrize(
    ("claimed", "capped"),
    [
        ([10.0, 10.0, 10.0], [10.0, 10.0, 10.0]),
        ([10.0, 9.0, 1e12], [10.0, 9.0, 30.0]),
        ([10.0, 1e12], [10.0, 30.0]),
        ([10.0, math.nan, -3.0, math.inf, -math.inf], [10.0, 0.0, 0.0, 0.0, 0.0]),
        ([0.0, 5.0, 5.0], [0.0, 5.0, 5.0]),
        ([0.0, 0.0], [1.0, 1.0]),
        ([math.nan, -1.0], [1.0, 1.0]),
        ([1e308, 1e308], [1e308, 1e308]),
        ([], []),
    ],
)
def test_capped(claimed, capped):
    assert cap_weights(claimed) == capped


claims = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=9)


@given(claims, st.floats(1, 10))
def test_nobody_outweighs_the_median_by_more_than_the_ratio(claimed, max_ratio):
    capped = cap_weights(claimed, max_ratio)
    assert len(capped) == len(claimed)
    assert all(math.isfinite(weight) and weight >= 0 for weight in capped)
    positive = sorted(weight for weight in capped if weight > 0)
    assert positive
    assert positive[-1] <= max_ratio * positive[(len(positive) - 1) // 2]


@pytest.mark.slow
@given(claims, st.randoms(use_true_random=False))
def test_order_of_members_does_not_matter(claimed, random):
    order = random.sample(range(len(claimed)), len(claimed))
    capped = cap_weights(claimed)
    assert cap_weights([claimed[i] for i in order]) == [capped[i] for i in order]


@given(st.lists(st.floats(1, 3), min_size=3, max_size=7), st.lists(st.floats(), max_size=6))
def test_honest_members_keep_their_weight_against_a_minority(honest, attackers):
    attackers = attackers[: len(honest) - 1]
    assert cap_weights([*honest, *attackers], 3.0)[: len(honest)] == honest or any(0 < a < 1 for a in attackers)


@pytest.mark.parametrize("max_ratio", [0.5, math.nan, math.inf])
def test_a_ratio_that_makes_no_sense(max_ratio):
    with pytest.raises(TrainerUsageError, match="max_ratio"):
        cap_weights([1.0], max_ratio)


SHARES = st.floats(0.0, 1.0)


def test_the_progress_is_the_average_of_the_claims_by_weight() -> None:
    assert common_progress([1.0, 0.25], [3.0, 1.0]) == pytest.approx(0.8125)
    assert common_progress([1.0] * 7, [0.1, 0.2, 0.3, 1.0, 1.5, 2.0, 1.0]) == 1.0


def test_who_brings_nothing_has_no_part_in_the_progress() -> None:
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
