"""Moments, exact and bounded on the wire; decisions by them: pure, permutable, with a note if members are too few."""

from __future__ import annotations

import math
import struct
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.aggregation import aggregate, noise, whole_moments
from trainer.aggregation import (
    Moments,
    RuleConfig,
    decide,
    effective_rule,
    finite_rows,
    moments,
    needs_moments,
)
from trainer.errors import CodecError, TrainerUsageError

WHOLE = ("krum", "multi_krum", "centered_clip")


def decision_on(rows: torch.Tensor, config: RuleConfig, weights=None, reference=None):
    reference = torch.zeros(rows.shape[1]) if reference is None else reference
    return decide(moments(rows, reference), [1.0] * len(rows) if weights is None else weights, config)


@pytest.mark.parametrize(
    ("rule", "num_byzantine", "num_members", "used", "note"),
    [
        ("mean", 1, 2, "mean", ""),
        ("trimmed_mean", 1, 2, "trimmed_mean", "robustness is not available"),
        ("trimmed_mean", 1, 1, "trimmed_mean", ""),
        ("trimmed_mean", 2, 4, "trimmed_mean", "needs 5 members, found 4"),
        ("median", 1, 2, "median", "robustness is not available"),
        ("krum", 1, 5, "krum", ""),
        ("krum", 1, 4, "median", "needs 5 members, found 4: median instead"),
        ("krum", 1, 1, "median", "robustness is not available"),
        ("multi_krum", 2, 6, "median", "median instead"),
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
        rows = noise(num_members, 50)
        decision = decision_on(rows, config)
        if used == "median":  # Never the first member by default.
            torch.testing.assert_close(aggregate(rows, config)[0], torch.quantile(rows, 0.5, dim=0))
        assert (decision.rule_used, decision.note) == (used, effective.note)
        assert (decision.coefficients is None) == (used == "median")


def test_krum_takes_the_one_in_the_thick_of_it_multi_krum_those_and_weighs_them():
    rows = torch.tensor([[0.0], [0.1], [0.2], [0.35], [100.0]])
    assert decision_on(rows, RuleConfig(rule="krum", validation="off")).coefficients == (0.0, 1.0, 0.0, 0.0, 0.0)
    rows = torch.tensor([[0.0], [0.1], [0.3], [100.0], [-100.0]])
    config, weights = RuleConfig(rule="multi_krum"), [1.0, 3.0, 2.0, 1.0, 1.0]
    assert decision_on(rows, config, weights).coefficients == (0.25, 0.75, 0.0, 0.0, 0.0)
    assert decision_on(rows[:, [0, 0, 0]], config).coefficients == (0.5, 0.5, 0.0, 0.0, 0.0)


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
    assert decision.excluded == dict.fromkeys((5, 6), "brings nothing (weight 0)")
    assert all(finding.passed for finding in decision.findings)
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


def test_defaults_are_for_strangers_and_the_bounds_are_the_specifications():
    assert astuple(RuleConfig()) == ("trimmed_mean", 0.3, 1, 0.0, "enforce", 0.3, 0.1, 10.0, 100.0)


@pytest.mark.parametrize(("field", "value"), [("rule", "average"), ("trim_fraction", 0.5), ("min_cosine", math.nan)])
def test_a_value_that_makes_no_sense_is_named(field, value):
    with pytest.raises(TrainerUsageError, match=field):
        RuleConfig(**{field: value})


def test_products_and_sums_are_those_of_the_vectors():
    x, reference = noise(3, 500), noise(1, 500, seed=1)[0]
    found = moments(x, reference)
    every = torch.cat([reference[None], x]).double().numpy()
    np.testing.assert_allclose(found.gram, every @ every.T, rtol=1e-12)
    np.testing.assert_allclose(found.sums, every.sum(1), rtol=1e-9)
    assert (found.num_values, found.num_members) == (500, 3)
    assert np.array_equal(found.gram, found.gram.T)


def test_vectors_that_agree_to_five_digits_still_have_a_distance():
    base = noise(1, 200_000)[0]
    near = base + 1e-5 * noise(1, 200_000, seed=2)[0]
    gram = moments(torch.stack([base, near]), torch.zeros(200_000)).gram
    squared = gram[1, 1] + gram[2, 2] - 2 * gram[1, 2]
    assert squared == pytest.approx(float((base.double() - near.double()).square().sum()), rel=1e-3)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 7])
def test_slices_add_up(num_slices):
    x, reference = noise(4, 300_001), noise(1, 300_001, seed=1)[0]
    whole, added = moments(x, reference), whole_moments(x, reference, num_slices)
    np.testing.assert_allclose(added.gram, whole.gram, rtol=1e-10, atol=1e-8)
    assert added.num_values == whole.num_values


def test_a_row_that_is_not_finite_is_flagged_and_touches_no_other():
    x, reference = noise(4, 100), noise(1, 100, seed=1)[0]
    clean = moments(x, reference)
    x[1, 50], x[3, 0] = torch.nan, -torch.inf
    found = moments(x, reference)
    assert found.finite.tolist() == [True, False, True, False]
    assert whole_moments(x, reference).finite.tolist() == [True, False, True, False]
    kept = np.ix_([0, 1, 3], [0, 1, 3])
    np.testing.assert_allclose(found.gram[kept], clean.gram[kept], rtol=1e-12)
    assert not found.gram[[2, 4]].any()
    assert not found.gram[:, [2, 4]].any()


def test_extremes_have_moments():
    x = torch.full((2, 1000), torch.finfo(torch.float32).max)
    found = moments(x, torch.zeros(1000))
    assert found.finite.all()
    assert np.isfinite(found.gram).all()
    found = moments(torch.zeros(2, 0), torch.zeros(0))
    assert (found.num_values, found.finite.all()) == (0, True)


@settings(max_examples=60, deadline=None)
@given(num_members=st.integers(0, 9), num_values=st.integers(0, 50), seed=st.integers(0, 99), bad=st.booleans())
def test_bytes_and_back(num_members, num_values, seed, bad):
    x = noise(num_members, num_values, seed=seed)
    if bad and x.numel():
        x[-1, 0] = torch.nan
    found = moments(x, torch.ones(num_values))
    encoded = found.to_bytes()
    assert len(encoded) == 16 + num_members + 4 * (num_members + 1) * (num_members + 4)
    for again in (Moments.from_bytes(form(encoded), num_members) for form in (bytes, bytearray)):
        assert all(np.array_equal(getattr(again, it), getattr(found, it)) for it in ("gram", "sums", "finite"))
        assert again.num_values == num_values


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=150), st.integers(0, 3))
def test_any_bytes_are_moments_or_refused(buffer, num_members):
    try:
        found = Moments.from_bytes(buffer, num_members)
    except CodecError:
        return
    assert found.to_bytes() == buffer


def edited(offset: int, form: str, value: float) -> bytes:
    encoded = bytearray(moments(noise(1, 10), torch.ones(10)).to_bytes())
    struct.pack_into(form, encoded, offset, value)
    return bytes(encoded)


# Layout for one member: head 16, flag 1, then rr, rx, xx, then the two sums.
@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (b"", "at least 16 bytes"),
        (b"XXXX" + bytes(12), "found b'XXXX'"),
        (struct.pack("<4sIQ", b"GMO1", 2**32 - 1, 0), "of 1 members, found b'GMO1' of 4294967295"),
        (edited(0, "4s", b"GMO1")[:-1], "expected 57 bytes"),
        (edited(16, "B", 2), "flags of 0 and 1"),
        (edited(17, "<d", float("nan")), "finite"),
        (edited(41, "<d", float("inf")), "finite"),
        (edited(17, "<d", -1.0), "squares of 0 or more"),
        (edited(25, "<d", 1e9), "Cauchy-Schwarz"),
        (edited(49, "<d", 1e9), "Cauchy-Schwarz"),
    ],
)
def test_what_no_vectors_have_is_refused(buffer, message):
    with pytest.raises(CodecError, match=message):
        Moments.from_bytes(buffer, 1)


def test_finite_rows_tells_overflowing_sums_from_infinities():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[1.0, 2.0], [largest, largest], [torch.inf, -torch.inf], [torch.nan, 0.0], [-torch.inf, 1.0]])
    assert finite_rows(x) == [True, True, False, False, False]
    assert finite_rows(list(x)) == finite_rows(x)
    assert finite_rows(torch.zeros(0, 5)) == []
