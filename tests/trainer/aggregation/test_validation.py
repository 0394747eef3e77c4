"""What members send, by gradient validation (spec T-20), and claim, by weights and progress."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.aggregation import noise
from trainer.aggregation import (
    Finding,
    RuleConfig,
    cap_weights,
    common_progress,
    contribution_weight,
    moments,
    validate,
)

REFERENCE = noise(4096)


def validated(submitted: torch.Tensor, reference: torch.Tensor, config: RuleConfig | None = None) -> Finding:
    return validate(moments(submitted[None], reference), config or RuleConfig())[0]


@pytest.mark.parametrize(
    ("submitted", "reason"),
    [
        (REFERENCE + 0.5 * noise(4096, seed=1), ""),
        (-REFERENCE, "direction: cosine -1"),
        (noise(4096, seed=1), "direction"),
        (10.5 * REFERENCE, "magnitude: 10.5 times"),
        (0.09 * REFERENCE, "magnitude: 0.09 times"),
        (torch.zeros(4096), "direction"),
        (10 * REFERENCE, ""),
        (0.1 * REFERENCE, ""),
        (REFERENCE.clone().index_fill_(0, torch.tensor([5]), torch.nan), "not finite"),
    ],
    ids=["honest", "opposite", "unrelated", "large", "small", "zero", "at most", "at least", "NaN"],
)
def test_the_three_checks(submitted, reason):
    finding = validated(submitted, REFERENCE)
    assert finding.passed == (reason == "")
    assert finding.reason.startswith(reason)
    assert bool(finding.reason) == bool(reason)


def test_a_variance_out_of_proportion():
    """Norm and direction may pass while the spread does not: the reference is nearly constant."""
    reference = torch.ones(4096) + 0.01 * REFERENCE
    finding = validated(torch.ones(4096) + 0.5 * noise(4096, seed=1), reference)
    assert not finding.passed
    assert finding.reason.startswith("variance")
    assert finding.variance_ratio == pytest.approx(2500, rel=0.1)


def test_what_cannot_be_compared_passes_with_a_reason():
    for submitted in (torch.ones(8), torch.zeros(8), -1e30 * torch.ones(8)):
        finding = validated(submitted, torch.zeros(8))
        assert (finding.passed, finding.reason) == (True, "no reference to compare with yet")
        assert finding.cosine is finding.norm_ratio is None
    finding = validated(torch.full((1000,), 0.1) + 0.01 * noise(1000), torch.full((1000,), 0.1))
    assert (finding.passed, finding.reason) == (True, "variance not compared: the reference has none")
    for value, passed in ((2.0, True), (-2.0, False), (30.0, False), (0.0, False)):
        finding = validated(torch.tensor([value]), torch.tensor([2.0]))
        assert (finding.passed, finding.variance_ratio) == (passed, None), "one value has no variance"
    assert not validated(torch.tensor([torch.nan]), torch.zeros(1)).passed


def members(count: int, cosine: float, num_values: int = 60_000) -> torch.Tensor:
    """Honest ones, with so large a cosine to each other."""
    common, own = noise(num_values, seed=3), noise(count, num_values, seed=4)
    return cosine**0.5 * common + (1 - cosine) ** 0.5 * own


def found_of(rows: torch.Tensor, config: RuleConfig | None = None) -> list[bool]:
    findings = validate(moments(rows, torch.zeros(rows.shape[1])), config or RuleConfig())
    assert [finding.member for finding in findings] == list(range(len(rows)))
    return [finding.passed for finding in findings]


LIES = {
    "x -10": lambda own: -10 * own,
    "x 1000": lambda own: 1000 * own,
    "not a number": lambda own: torch.full_like(own, torch.nan),
    "zeros": torch.zeros_like,
    "sign flipped": lambda own: -own,
    "noise of the same norm": lambda own: noise(*own.shape, seed=9) * own.norm(dim=1, keepdim=True) / 60_000**0.5,
    "one noise of all": lambda own: noise(1, own.shape[1], seed=9).repeat(len(own), 1),
}


@pytest.mark.parametrize("cosine", [0.1, 0.3, 0.9])
@pytest.mark.parametrize(("count", "num_liars"), [(3, 1), (4, 1), (5, 2), (7, 2), (7, 3), (8, 3)])
@pytest.mark.parametrize("lie", LIES)
def test_a_minority_that_lies_is_told_from_the_others(lie, count, num_liars, cosine):
    rows = members(count, cosine)
    rows[-num_liars:] = LIES[lie](rows[-num_liars:])
    assert found_of(rows) == [True] * (count - num_liars) + [False] * num_liars


@pytest.mark.parametrize("cosine", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("num_values", [50, 60_000])
def test_of_the_honest_nobody_is_odd_however_much_they_agree(count, cosine, num_values):
    assert found_of(members(count, cosine, num_values)) == [True] * count


def test_members_that_hardly_agree_any_more_are_not_odd():
    """Late in a run pseudo-gradients are mostly noise, in far fewer dimensions than they have values."""
    rows = members(4, 0.0)
    common = noise(60_000, seed=5)
    for row, cosine in zip(rows, (0.02, 0.02, 0.01, -0.02), strict=True):
        row += cosine / 0.02**0.5 * common
    assert found_of(rows) == [True] * 4
    rows[3] -= 0.5 * rows[:3].sum(dim=0)
    assert found_of(rows) == [True, True, True, False]


def test_who_trained_on_other_data_or_for_less_time_is_not_odd():
    rows = members(4, 0.3)
    rows[3] = 0.45 * rows[3] + 0.9 * noise(60_000, seed=12)
    rows[2] *= 0.2
    assert found_of(rows) == [True] * 4


HOUR, DAY, WEEK = 3600.0, 86_400.0, 7 * 86_400.0


@pytest.mark.parametrize(
    ("age_s", "weight"),
    [
        *((0.0, 10.0), (HOUR - 1, 10.0), (HOUR, 9.0), (DAY - 1, 9.0), (DAY, 7.0), (WEEK - 1, 7.0), (WEEK, 3.0)),
        *((1e300, 3.0), (-5.0, 10.0), (math.nan, 3.0)),
    ],
)
def test_a_hundred_batches_by_age(age_s, weight):
    assert contribution_weight(100, age_s) == pytest.approx(weight, rel=1e-15)
    assert contribution_weight(400, age_s) == 2 * contribution_weight(100, age_s)


@pytest.mark.parametrize(("num_tokens", "weight"), [(0, 0.0), (-7, 0.0), (4096, 4096.0), (10**400, 1e12)])
def test_tokens_weigh_what_they_are_whatever_their_age(num_tokens, weight):
    assert contribution_weight(num_tokens, 1e9, "linear") == weight


@pytest.mark.parametrize(("num_batches", "weight"), [(0, 0.0), (-7, 0.0), (10**400, 1e6)])
def test_claims_of_batches_that_nobody_trained(num_batches, weight):
    assert contribution_weight(num_batches, 0.0) == weight


@pytest.mark.parametrize(
    ("claimed", "capped"),
    [
        ([10.0, 9.0, 1e12], [10.0, 9.0, 30.0]),
        ([10.0, math.nan, -3.0, math.inf, -math.inf], [10.0, 0.0, 0.0, 0.0, 0.0]),
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
    assert cap_weights(claimed[::-1], max_ratio) == capped[::-1]  # The order of members does not matter.


@given(st.lists(st.floats(1, 3), min_size=3, max_size=7), st.lists(st.floats(), max_size=6))
def test_honest_members_keep_their_weight_against_a_minority(honest, attackers):
    attackers = attackers[: len(honest) - 1]
    assert cap_weights([*honest, *attackers], 3.0)[: len(honest)] == honest or any(0 < a < 1 for a in attackers)


SHARES = st.floats(0.0, 1.0)


def test_the_progress_is_the_average_of_the_claims_by_weight() -> None:
    assert common_progress([1.0, 0.25], [3.0, 1.0]) == pytest.approx(0.8125)
    assert common_progress([1.0] * 7, [0.1, 0.2, 0.3, 1.0, 1.5, 2.0, 1.0]) == 1.0
    assert common_progress([0.0, 0.5, 0.5], [0.0, 1.0, 2.0]) == 0.5
    assert common_progress([1.0, 1.0], [0.0, 0.0]) == 0.0
    assert common_progress([], []) == 0.0


@settings(deadline=None)
@given(st.lists(SHARES, min_size=2, max_size=9), st.floats(0.1, 1e6), st.data())
def test_a_minority_that_claims_to_have_done_all_does_not_lift_it_over_the_others(honest, weight, data) -> None:
    num_liars = data.draw(st.integers(1, len(honest) - 1))
    found = common_progress([*honest, *[1.0] * num_liars], [*[1.0] * len(honest), *[weight] * num_liars])
    assert 0.0 <= found <= max(honest)
