"""Rule options, and decisions: pure, permutable, and with a note if members are too few."""

from __future__ import annotations

import itertools
import math
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.aggregation import aggregate, noise
from trainer.aggregation import Moments, RuleConfig, decide, effective_rule, moments, needs_decision, needs_moments
from trainer.errors import TrainerUsageError

WHOLE = ("krum", "multi_krum", "centered_clip")


def decision_on(rows: torch.Tensor, config: RuleConfig, weights=None, reference=None):
    reference = torch.zeros(rows.shape[1]) if reference is None else reference
    return decide(moments(rows, reference), [1.0] * len(rows) if weights is None else weights, config)


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed_mean", *WHOLE])
@pytest.mark.parametrize("validation", ["off", "log", "enforce"])
def test_which_rules_wait_for_whole_vectors_and_which_need_a_decision(rule, validation):
    config = RuleConfig(rule=rule, validation=validation)
    assert needs_moments(config) == (rule in WHOLE)
    assert needs_decision(config) == (rule in WHOLE or validation == "enforce")


@pytest.mark.parametrize(
    ("rule", "num_byzantine", "num_members", "used", "note"),
    [
        ("mean", 1, 2, "mean", ""),
        ("trimmed_mean", 1, 3, "trimmed_mean", ""),
        ("trimmed_mean", 1, 2, "trimmed_mean", "robustness is not available"),
        ("trimmed_mean", 1, 1, "trimmed_mean", ""),
        ("trimmed_mean", 2, 4, "trimmed_mean", "needs 5 members, found 4"),
        ("median", 1, 3, "median", ""),
        ("median", 1, 2, "median", "robustness is not available"),
        ("krum", 1, 5, "krum", ""),
        ("krum", 1, 4, "median", "needs 5 members, found 4: median instead"),
        ("krum", 2, 7, "krum", ""),
        ("krum", 1, 1, "median", "robustness is not available"),
        ("multi_krum", 2, 6, "median", "median instead"),
        ("multi_krum", 0, 3, "multi_krum", ""),
        ("centered_clip", 1, 3, "centered_clip", ""),
        ("centered_clip", 1, 2, "median", "robustness is not available"),
        ("centered_clip", 0, 1, "median", "median instead"),
    ],
)
def test_too_few_members_are_said(rule, num_byzantine, num_members, used, note):
    config = RuleConfig(rule=rule, num_byzantine=num_byzantine, validation="off")
    effective = effective_rule(num_members, config)
    assert effective.rule == used
    assert note in effective.note
    assert bool(note) == bool(effective.note)
    if needs_moments(config):
        decision = decision_on(noise(num_members, 50), config)
        assert (decision.rule_used, decision.note) == (used, effective.note)
        assert (decision.coefficients is None) == (used == "median")


@pytest.mark.parametrize("num_members", [1, 2, 3, 4])
def test_krum_of_few_is_their_median(num_members):
    """Never the first member by default."""
    rows = noise(num_members, 60)
    result, _ = aggregate(rows, RuleConfig(rule="krum"))
    torch.testing.assert_close(result, torch.quantile(rows, 0.5, dim=0))


def test_krum_takes_the_one_in_the_thick_of_it_multi_krum_those_and_weighs_them():
    rows = torch.tensor([[0.0], [0.1], [0.2], [0.35], [100.0]])
    assert decision_on(rows, RuleConfig(rule="krum", validation="off")).coefficients == (0.0, 1.0, 0.0, 0.0, 0.0)
    rows = torch.tensor([[0.0], [0.1], [0.3], [100.0], [-100.0]])
    config, weights = RuleConfig(rule="multi_krum"), [1.0, 3.0, 2.0, 1.0, 1.0]
    assert decision_on(rows, config, weights).coefficients == (0.25, 0.75, 0.0, 0.0, 0.0)
    assert decision_on(rows[:, [0, 0, 0]], config).coefficients == (0.5, 0.5, 0.0, 0.0, 0.0)


def test_krum_never_selects_what_is_not_finite():
    rows = noise(6, 50)
    rows[0, 3] = torch.nan
    decision = decision_on(rows, RuleConfig(rule="krum"))
    assert decision.excluded == {0: "not finite"}
    assert (decision.coefficients[0], sum(decision.coefficients)) == (0.0, 1.0)


@pytest.mark.parametrize("rule", [*WHOLE, "mean"])
def test_nobody_left(rule):
    rows = torch.full((4, 5), torch.nan)
    decision = decision_on(rows, RuleConfig(rule=rule, validation="enforce"), reference=torch.ones(5))
    assert (decision.rule_used, decision.note) == ("none", "no usable contribution")
    assert decision.coefficients is None
    assert set(decision.excluded) == {0, 1, 2, 3}
    assert decision_on(torch.zeros(0, 5), RuleConfig(rule=rule)).rule_used == "none"


def test_who_brings_nothing_is_left_out():
    rows, config = torch.cat([noise(5, 50), torch.zeros(2, 50)]), RuleConfig(rule="multi_krum", validation="log")
    decision = decision_on(rows, config, weights=[1.0] * 5 + [0.0, 0.0])
    assert set(decision.excluded) == {5, 6}
    assert decision.coefficients[5:] == (0.0, 0.0)
    assert decision_on(rows, config, weights=[0.0] * 7).excluded == {}


@pytest.mark.parametrize("rule", WHOLE)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), num_members=st.integers(1, 9), with_reference=st.booleans())
def test_permuted_members_permute_the_decision(rule, data, num_members, with_reference):
    order = data.draw(st.permutations(range(num_members)))
    reference = noise(1, 30, seed=9)[0] if with_reference else torch.zeros(30)
    found = moments(noise(num_members, 30), reference)
    rows = [0, *(member + 1 for member in order)]
    permuted = Moments(found.gram[rows][:, rows], found.sums[rows], found.num_values, found.finite[order])
    weights = [1.0 + member / 7 for member in range(num_members)]
    config = RuleConfig(rule=rule)
    straight = decide(found, weights, config)
    turned = decide(permuted, [weights[member] for member in order], config)
    assert turned.rule_used == straight.rule_used
    assert turned.reference_coefficient == straight.reference_coefficient
    if straight.coefficients is not None:
        assert turned.coefficients == tuple(straight.coefficients[member] for member in order)


def test_equal_arguments_give_equal_decisions_also_over_the_wire():
    found = moments(noise(5, 100), noise(100, seed=4))
    again = Moments.from_bytes(found.to_bytes(), 5)
    for rule, validation in itertools.product((*WHOLE, "mean"), ("off", "log", "enforce")):
        config = RuleConfig(rule=rule, validation=validation)
        assert decide(found, [1.0] * 5, config) == decide(again, [1.0] * 5, config)


@pytest.mark.parametrize("rule", WHOLE)
def test_coefficients_are_shares(rule):
    decision = decision_on(noise(7, 100), RuleConfig(rule=rule), reference=noise(100, seed=4))
    assert all(coefficient >= 0 for coefficient in decision.coefficients)
    assert sum(decision.coefficients) + decision.reference_coefficient == pytest.approx(1.0, abs=1e-9)


def clipped(rows: torch.Tensor, **options) -> torch.Tensor:
    arguments = {name: options.pop(name) for name in ("weights", "reference") if name in options}
    return aggregate(rows, RuleConfig(rule="centered_clip", **options), **arguments)[0]


def test_the_clipped_centre_does_not_depend_on_where_it_starts():
    rows = 1.0 + noise(7, 300)
    from_reference = clipped(rows, reference=torch.full((300,), 40.0))
    torch.testing.assert_close(from_reference, clipped(rows), rtol=1e-3, atol=1e-3)


def test_a_radius_set_by_hand_bounds_the_pull_of_one_and_weights_do_not_pull():
    rows = torch.cat([torch.ones(4, 100), torch.full((1, 100), 1e6)])
    near, wide = (clipped(rows, validation="off", clip_radius=it, reference=torch.ones(100)) for it in (0.5, 1e12))
    assert 0 < float((near - 1).norm()) <= 0.5
    torch.testing.assert_close(wide, rows.mean(0))
    rows = torch.tensor([[0.0], [1.0], [2.0]])
    assert clipped(rows, validation="off", clip_radius=100.0, weights=[1.0, 1.0, 2.0]).item() == pytest.approx(1.0)


REFERENCE = noise(200, seed=11)


def test_enforced_validation_leaves_out_and_logs():
    rows = REFERENCE + 0.3 * noise(5, 200)
    rows[2] *= -10
    for validation, left_out in (("log", set()), ("enforce", {2})):
        config = RuleConfig(rule="centered_clip", validation=validation)
        decision = decision_on(rows, config, reference=REFERENCE)
        assert set(decision.excluded) == left_out
        assert [finding.passed for finding in decision.findings] == [True, True, False, True, True]
    assert decision.excluded[2].startswith("direction")
    assert decision_on(rows, RuleConfig(rule="krum", validation="off"), reference=REFERENCE).findings == ()


def test_an_enforced_mean_is_the_mean_of_the_others():
    rows = REFERENCE + 0.3 * noise(4, 200)
    rows[0] *= 1e6
    result, decision = aggregate(rows, RuleConfig(rule="mean"), reference=REFERENCE)
    torch.testing.assert_close(result, rows[1:].mean(0))
    assert (decision.rule_used, set(decision.excluded)) == ("mean", {0})


def test_what_the_last_result_was_says_nothing_of_three_or_more():
    """One that liars have turned round would make the honest the suspects."""
    rows = REFERENCE + 0.3 * noise(5, 200)
    rows[4] *= -10
    for reference in (REFERENCE, -5 * REFERENCE, torch.zeros(200)):
        decision = decision_on(rows, RuleConfig(), reference=reference)
        assert set(decision.excluded) == {4}
        assert [finding.passed for finding in decision.findings] == [True] * 4 + [False]


@pytest.mark.parametrize("num_members", [1, 2])
def test_of_one_or_two_nobody_is_left_out(num_members):
    rows = REFERENCE + 0.3 * noise(num_members, 200)
    rows[0] *= -10
    decision = decision_on(rows, RuleConfig(), reference=REFERENCE)
    assert decision.excluded == {}
    assert [finding.passed for finding in decision.findings] == [False, True][:num_members]
    assert ("robustness is not available" in decision.note) == (num_members == 2)


def test_the_greater_part_is_never_left_out():
    rows = torch.stack([REFERENCE, REFERENCE, 1e-3 * REFERENCE, 1e-3 * REFERENCE, 1e-3 * REFERENCE])
    decision = decision_on(rows, RuleConfig(min_norm_ratio=1.0, max_norm_ratio=1.0))
    assert set(decision.excluded) == {0, 1}
    spread = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]]) * REFERENCE
    decision = decision_on(spread, RuleConfig(min_norm_ratio=1.0, max_norm_ratio=1.0))
    assert decision.excluded == {}
    assert "validation not enforced: 4 of 5 members differ from the others" in decision.note


def test_zeros_of_most_are_compared_with_nothing():
    rows = torch.cat([torch.zeros(3, 50), noise(1, 50)])
    decision = decision_on(rows, RuleConfig())
    assert decision.excluded == {}
    assert all("nothing to compare with" in finding.reason for finding in decision.findings)


@pytest.mark.parametrize("weights", [[1.0], [1.0, float("nan")], [1.0, -1.0], [1.0, float("inf")]])
def test_weights_must_be_weights(weights):
    with pytest.raises(TrainerUsageError, match="weights: expected 2"):
        decision_on(noise(2, 5), RuleConfig(), weights=weights)


def test_defaults_are_for_strangers_and_the_bounds_are_the_specifications():
    assert astuple(RuleConfig()) == ("trimmed_mean", 0.3, 1, 0.0, "enforce", 0.3, 0.1, 10.0, 100.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rule", "average"), ("validation", "strict"), ("num_byzantine", -1), ("min_cosine", 1.5)),
        *(("trim_fraction", value) for value in (0.5, -0.1, math.nan)),
        *(("clip_radius", value) for value in (-1.0, math.inf)),
        *(("min_norm_ratio", 2.0), ("max_norm_ratio", 0.5), ("max_variance_ratio", math.nan)),
    ],
)
def test_a_value_that_makes_no_sense_is_named(field, value):
    with pytest.raises(TrainerUsageError, match=field):
        RuleConfig(**{field: value})
