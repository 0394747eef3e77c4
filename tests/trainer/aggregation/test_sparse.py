"""Aggregation of sparse contributions: two ways of averaging, clipping, validation, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.aggregation import RuleConfig
from trainer.aggregation.config import RuleName
from trainer.aggregation.sparse import Averaging, SparseVector, aggregate_sparse, require_sparse_rule
from trainer.errors import RoundFailedError, TrainerUsageError

OFF = RuleConfig(rule="mean", validation="off")
ENFORCE = RuleConfig(rule="mean", validation="enforce")


def sparse(num_values: int, entries: dict[int, float]) -> SparseVector:
    places = sorted(entries)
    values = np.array([entries[place] for place in places], np.float32)
    return SparseVector(num_values, np.array(places, np.int64), values)


def members(count: int, seed: int = 0, *, num_values: int = 4096) -> list[SparseVector]:
    """Honest members: the greatest of a common direction and each one's noise."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(num_values) ** 3
    found = []
    for _ in range(count):
        vector = common + rng.standard_normal(num_values)
        places = np.sort(np.argsort(-np.abs(vector))[: num_values // 16])
        found.append(SparseVector(num_values, places, vector[places].astype(np.float32)))
    return found


def test_by_replicas_a_coordinate_that_one_sends_counts_for_one() -> None:
    found = aggregate_sparse([sparse(4, {0: 4.0}), sparse(4, {0: 2.0, 1: 2.0 * 3**0.5})], [1.0, 1.0], OFF)
    assert torch.allclose(found.vector, torch.tensor([3.0, 3**0.5, 0.0, 0.0]))


def test_by_senders_a_coordinate_is_divided_by_those_who_sent_it() -> None:
    contributions = [sparse(4, {0: 4.0}), sparse(4, {0: 2.0, 1: 2.0 * 3**0.5})]
    found = aggregate_sparse(contributions, [3.0, 1.0], OFF, averaging="senders")
    assert torch.allclose(found.vector, torch.tensor([3.5, 2 * 3**0.5, 0.0, 0.0]))


def test_a_zero_that_fills_a_chunk_was_not_sent() -> None:
    contributions = [sparse(3, {0: 2.0, 1: 0.0}), sparse(3, {1: 2.0})]
    found = aggregate_sparse(contributions, [1.0, 1.0], OFF, averaging="senders")
    assert torch.allclose(found.vector, torch.tensor([2.0, 2.0, 0.0]))


def test_weights_count() -> None:
    found = aggregate_sparse([sparse(2, {0: 1.0}), sparse(2, {1: 1.0})], [3.0, 1.0], OFF)
    assert torch.allclose(found.vector, torch.tensor([0.75, 0.25]))


def test_weights_of_zero_are_all_equal_and_beside_others_bring_nothing() -> None:
    contributions = [sparse(2, {0: 1.0}), sparse(2, {1: 1.0})]
    assert torch.allclose(aggregate_sparse(contributions, [0.0, 0.0], OFF).vector, torch.tensor([0.5, 0.5]))
    found = aggregate_sparse(contributions, [1.0, 0.0], OFF)
    assert torch.equal(found.vector, torch.tensor([1.0, 0.0]))
    assert list(found.decision.excluded) == [1]


def test_whoever_pulls_harder_than_the_median_is_clipped_to_it() -> None:
    contributions = [sparse(3, {0: 1.0}), sparse(3, {1: 1.0}), sparse(3, {2: 1e6})]
    found = aggregate_sparse(contributions, [1.0, 1.0, 1.0], OFF)
    assert dict(found.clipped) == {2: pytest.approx(1e-6)}
    assert torch.allclose(found.vector, torch.full((3,), 1 / 3))


@pytest.mark.parametrize("averaging", ["replicas", "senders"])
def test_an_inverted_member_is_left_out_by_its_direction(averaging: Averaging) -> None:
    honest = members(4)
    liar = SparseVector(4096, honest[0].indices, -honest[0].values)
    found = aggregate_sparse([*honest, liar], [1.0] * 5, ENFORCE, averaging)
    assert list(found.decision.excluded) == [4]
    assert torch.equal(found.vector, aggregate_sparse(honest, [1.0] * 4, OFF, averaging).vector)


def test_honest_members_pass_validation() -> None:
    for seed in range(10):
        assert not aggregate_sparse(members(5, seed), [1.0] * 5, ENFORCE).decision.excluded


@pytest.mark.parametrize("averaging", ["replicas", "senders"])
@given(seed=st.integers(0, 1000), count=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_the_result_is_that_of_dense_arithmetic(averaging: Averaging, seed: int, count: int) -> None:
    contributions = members(count, seed)
    weights = [1.0 + member for member in range(count)]
    found = aggregate_sparse(contributions, weights, OFF, averaging)
    rows = torch.stack([each.dense() for each in contributions]).double()
    for member, scale in found.clipped.items():
        rows[member] *= scale
    scaled = rows * torch.tensor(weights).double()[:, None]
    if averaging == "replicas":
        expected = scaled.sum(0) / sum(weights)
    else:
        sent = torch.stack([each.dense() != 0 for each in contributions]) * torch.tensor(weights)[:, None]
        expected = scaled.sum(0) / sent.sum(0).clamp_min(1e-9)
    assert torch.allclose(found.vector.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_did_not_come_is_left_out_and_nothing_at_all_fails_the_round() -> None:
    found = aggregate_sparse([None, sparse(2, {0: 1.0})], [1.0, 1.0], OFF)
    assert torch.equal(found.vector, torch.tensor([1.0, 0.0]))
    assert found.decision.excluded == {0: "not finite"}
    with pytest.raises(RoundFailedError):
        aggregate_sparse([None, None], [1.0, 1.0], OFF)


def test_vectors_of_zeros_come_to_zero() -> None:
    found = aggregate_sparse([sparse(3, {0: 0.0}), sparse(3, {})], [1.0, 1.0], OFF)
    assert torch.equal(found.vector, torch.zeros(3))


@pytest.mark.parametrize("rule", ["median", "krum", "multi_krum", "centered_clip"])
def test_rules_that_mean_nothing_are_refused_with_the_reason(rule: RuleName) -> None:
    with pytest.raises(TrainerUsageError, match=f"{rule}: "):
        require_sparse_rule(RuleConfig(rule=rule))


@pytest.mark.parametrize("rule", ["mean", "trimmed_mean"])
def test_the_default_stands_for_the_clipped_mean(rule: RuleName) -> None:
    require_sparse_rule(RuleConfig(rule=rule))
