"""Sums of gradients, and the bound on what one gradient may weigh: a multiple of the median of those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import get_total_norm

from tests.support.stage_replicas import (
    backward,
    bits_of,
    carry,
    count,
    hidden,
    micro_batch,
    stage_replica,
    stage_replicas,
)
from trainer.pipeline.stage import StageConfig, StageReplica
from trainer.pipeline.stage.passes import WARM_UP, WINDOW, GradientAccumulator, NormBound

FACTOR = 10.0
BOUNDED = StageConfig(clip_factor=1e9, tail_clip_factor=1e9, outlier_factor=FACTOR)
NEVER = StageConfig(clip_factor=1e9, tail_clip_factor=1e9, outlier_factor=math.inf)


def _bound_of(seen: Sequence[tuple[float, int]]) -> NormBound:
    bound = NormBound(FACTOR)
    for norm, num_tokens in seen:
        bound.note(norm, num_tokens)
    return bound


def _usual(norm: float = 1.0, times: int = WARM_UP) -> list[tuple[float, int]]:
    return [(norm, 64)] * times


def _warm(index: int, config: StageConfig = BOUNDED) -> StageReplica:
    """A stage that knows what is usual, with nothing accumulated."""
    stage = stage_replica(index, 3, config)
    for seed in range(WARM_UP):
        count(stage, seed)
    stage.drop()
    return stage


def _norm(stage: StageReplica) -> float:
    return float(get_total_norm(list(stage.state_dict()["sums"].values())))


def test_gradients_in_one_piece_of_memory_are_added_up_apart() -> None:
    parameters, both = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)], torch.ones(3)
    accumulator = GradientAccumulator(parameters)
    accumulator.add([both, both], 1)
    accumulator.add([torch.ones(3), torch.zeros(3)], 1)
    accumulator.hand_over(1.0)
    assert [parameter.grad.tolist() for parameter in parameters] == [[2.0] * 3, [1.0] * 3]


def test_a_bound_begins_when_some_were_seen_that_move_and_follows_the_run_after_half_a_window() -> None:
    assert _bound_of(_usual(times=WARM_UP - 1)).coefficient(1e12, 64) == 1.0
    assert _bound_of(_usual(norm=0.0)).coefficient(1.0, 64) == 1.0
    assert _bound_of(_usual()).coefficient(1e12, 64) == pytest.approx(FACTOR / 1e12)
    for num_tokens, most in {64: 1.0, 4: 0.25, 1: 0.125, 256: 4.0}.items():  # A short one may be noisier.
        assert _bound_of(_usual()).usual(num_tokens) == pytest.approx(most)
    bound, scales = _bound_of(_usual(times=WINDOW)), []
    for _ in range(WINDOW):
        scales.append(bound.coefficient(1000.0, 64))
        bound.note(1000.0, 64)
    assert scales == [pytest.approx(0.01)] * (WINDOW // 2) + [1.0] * (WINDOW // 2)


@pytest.mark.slow
@given(st.lists(st.floats(0.5, 2.0), min_size=WARM_UP, max_size=2 * WINDOW), st.floats(0.0, 4.9))
def test_what_is_within_the_bound_is_not_touched(norms: list[float], norm: float) -> None:
    assert _bound_of([(each, 64) for each in norms]).coefficient(norm, 64) == 1.0


@pytest.mark.slow
@given(st.integers(0, WINDOW // 2 - 1), st.floats(0.0, 1e12), st.randoms(use_true_random=False))
def test_fewer_than_half_cannot_say_what_is_usual(num_liars: int, lie: float, random) -> None:  # type: ignore[no-untyped-def]
    seen = [(lie, 64)] * num_liars + [(random.uniform(0.5, 2.0), 64) for _ in range(WINDOW - num_liars)]
    random.shuffle(seen)
    assert 0.5 <= (_bound_of(seen).usual(64) or 0.0) <= 2.0


@pytest.mark.parametrize("index", [0, 1])
def test_a_huge_gradient_weighs_as_much_as_the_bound_and_no_more(index: int) -> None:
    x = micro_batch(1)[1] if index == 0 else hidden(1)
    stage, plain = _warm(index), stage_replica(index, 3, NEVER)
    usual = sorted(norm for norm, _ in stage.state_dict()["norms"])[WARM_UP // 2]
    found = backward(stage, x, hidden(9) * 1e7)
    honest = backward(plain, x, hidden(9))
    assert _norm(stage) == pytest.approx(FACTOR * usual, rel=1e-5)
    assert stage.outliers == 1
    assert found.scale < 1e-4
    assert stage.accumulated.num_tokens == 16
    sums, direction = stage.state_dict()["sums"], plain.state_dict()["sums"]
    for name, total in sums.items():
        torch.testing.assert_close(total / _norm(stage), direction[name] / _norm(plain), rtol=1e-4, atol=1e-7)
    if index == 1:  # The stages before get the gradient of the same, lighter loss.
        torch.testing.assert_close(found.grad_x, honest.grad_x * 1e7 * found.scale, rtol=1e-4, atol=1e-7)


def test_a_tail_bounds_its_own() -> None:
    stage = _warm(2)
    for _ in range(WINDOW):  # So little is usual that the losses of random labels are far beyond it.
        stage._norm_bound.note(1e-4, 16)
    _, _, labels = micro_batch(1)
    plain = stage_replica(2, 3, NEVER).tail("m", hidden(1), labels)
    found = stage.tail("m", hidden(1), labels)
    assert found.scale < 1.0
    assert found.loss_sum == plain.loss_sum
    torch.testing.assert_close(found.grad_hidden, plain.grad_hidden * found.scale)
    assert _norm(stage) == pytest.approx(FACTOR * 1e-4, rel=1e-5)


def test_what_was_refused_says_nothing_of_what_is_usual_and_a_restart_knows_it() -> None:
    def too_late() -> None:
        raise TimeoutError

    stage, restarted = _warm(1), stage_replica(1, 3, BOUNDED)
    before = stage.state_dict()["norms"]
    with pytest.raises(TimeoutError):
        backward(stage, hidden(1), hidden(9) * 1e7, before_apply=too_late)
    assert (stage.state_dict()["norms"], stage.outliers) == (before, 0)
    restarted.load_state_dict(stage.state_dict())
    for each in (stage, restarted):
        assert backward(each, hidden(1), hidden(9) * 1e7).scale < 1e-4
    assert bits_of(stage) == bits_of(restarted)


@pytest.mark.slow
def test_an_honest_run_is_bit_for_bit_the_same_without_a_bound() -> None:
    """Micro-batches of 1 to 4 rows, some with labels that do not count, from the first step on."""
    bounded, free = stage_replicas(3, StageConfig()), stage_replicas(3, StageConfig(outlier_factor=math.inf))
    for number in range(10 * 8):
        batch = micro_batch(number, rows=1 + number % 4, padded=0 if number % 5 else 7)
        assert carry(bounded, batch) == carry(free, batch)
        if number % 8 == 7:
            for stage in (*bounded, *free):
                assert stage.step(number // 8).applied
    assert [bits_of(stage) for stage in bounded] == [bits_of(stage) for stage in free]
    assert not any(stage.outliers for stage in bounded)
