"""What a node has contributed: honest claims are confirmed, claims beyond the account are not, and are doubted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.observing import Report, Step
from trainer.monitor.contribution import Claim, check, usual_flops_per_micro_batch
from trainer.monitor.work import WorkTally

EACH = 1e9


def a_claim(micro_batches: int, flops_each: float = EACH, life: str = "1") -> Claim:
    return Claim(incarnation=life, stage="head", flops=micro_batches * flops_each, micro_batches=micro_batches)


@given(st.integers(0, 10**6), st.integers(0, 64))
def test_an_honest_claim_is_confirmed_up_to_what_is_settled(counted: int, under_way: int) -> None:
    found = check(a_claim(counted + under_way), counted, EACH)
    assert found.doubts == ()
    assert found.confirmed_flops == counted * EACH


@given(st.integers(0, 10**6), st.integers(65, 10**6), st.floats(1.2, 1e6))
def test_nothing_beyond_the_account_is_confirmed_whatever_is_claimed(counted: int, more: int, factor: float) -> None:
    found = check(a_claim(int(1.2 * counted) + more, factor * EACH), counted, EACH)
    assert len(found.doubts) == 2
    assert found.confirmed_flops == counted * EACH


def test_without_an_account_nothing_is_confirmed_nor_doubted() -> None:
    assert check(a_claim(10**9), None, EACH).confirmed_flops is None
    assert check(a_claim(10**9), None, EACH).doubts == ()


def test_of_three_workers_or_more_the_median_tells_what_a_micro_batch_takes() -> None:
    claims = [a_claim(10), a_claim(20), a_claim(5, 100 * EACH)]
    assert usual_flops_per_micro_batch(claims) == EACH
    assert usual_flops_per_micro_batch(claims[:2]) is None
    assert check(claims[2], 5, usual_flops_per_micro_batch(claims)).confirmed_flops == 5 * EACH


def test_a_tally_adds_up_what_was_applied_and_keeps_the_latest_rounds() -> None:
    tally = WorkTally(clock=lambda: 50.0)
    for _ in range(3):
        tally.step(Step(num_tokens=100, seconds=2.0))
    tally.step(Step(num_tokens=100, seconds=2.0, skipped=True))
    for index in range(5):
        tally.round(Report(round_index=index))
    tally.round(Report(round_index=5, members=("a",)))
    tally.round_failed(6, "too few")
    tally.saved()
    tally.withdrew()
    done = tally.done()
    assert (done.num_steps, done.num_tokens, done.active_s) == (4, 300, 8.0)
    assert (done.rounds_shared, done.rounds_alone, done.rounds_failed, done.withdrawals) == (5, 1, 1, 1)
    assert [it.round_index for it in done.rounds] == [3, 4, 5, 6]
    assert done.rounds[0].phases == (0.2, 1.0, 0.3)
    assert done.rounds[-1].error == "too few"
    assert done.checkpoint_at == 50.0


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_a_step_whose_time_is_not_known_spoils_no_sum(seconds: float) -> None:
    tally = WorkTally()
    tally.step(Step(seconds=seconds))
    assert tally.done().active_s == 0.0
