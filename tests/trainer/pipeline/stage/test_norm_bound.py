"""What is usual is the median of what came; beyond a multiple of it a gradient weighs as much as that, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import get_total_norm

from tests.support.stage_replicas import CUT, bits_of, carry, micro_batch, stage_replica, stage_replicas
from trainer.pipeline.stage import StageConfig, StageReplica
from trainer.pipeline.stage.norm_bound import WARM_UP, WINDOW, NormBound

FACTOR = 10.0
BOUNDED = StageConfig(clip_factor=1e9, tail_clip_factor=1e9, outlier_factor=FACTOR)
NEVER = StageConfig(clip_factor=1e9, tail_clip_factor=1e9, outlier_factor=math.inf)


def _bound_of(seen: Sequence[tuple[float, int]], factor: float = FACTOR) -> NormBound:
    bound = NormBound(factor)
    for norm, num_tokens in seen:
        bound.note(norm, num_tokens)
    return bound


def _usual(norm: float = 1.0, num_tokens: int = 64, times: int = WARM_UP) -> list[tuple[float, int]]:
    return [(norm, num_tokens)] * times


def _hidden(seed: int) -> torch.Tensor:
    return torch.randn(2, 8, CUT.dim, generator=torch.Generator().manual_seed(seed))


def _warm(index: int, config: StageConfig = BOUNDED) -> StageReplica:
    """A stage that knows what is usual, with nothing accumulated."""
    stage = stage_replica(index, 3, config)
    for seed in range(WARM_UP):
        _, ids, labels = micro_batch(seed)
        if index == 2:
            stage.tail("m", _hidden(seed), labels)
        else:
            stage.backward("m", ids if index == 0 else _hidden(seed), _hidden(100 + seed), 16, 0)
    stage.drop()
    return stage


def _norm(stage: StageReplica) -> float:
    return float(get_total_norm(list(stage.state_dict()["sums"].values())))


def test_before_it_has_seen_some_there_is_no_bound() -> None:
    assert _bound_of(_usual(times=WARM_UP - 1)).coefficient(1e12, 64) == 1.0
    assert _bound_of(_usual()).coefficient(1e12, 64) == pytest.approx(FACTOR / 1e12)


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


@pytest.mark.parametrize(("num_tokens", "most"), [(64, 1.0), (4, 0.25), (1, 0.125), (256, 4.0)])
def test_a_short_one_may_be_as_noisy_as_its_tokens_are_few(num_tokens: int, most: float) -> None:
    assert _bound_of(_usual()).usual(num_tokens) == pytest.approx(most)


def test_a_run_that_changes_its_ways_is_believed_after_half_a_window() -> None:
    bound = _bound_of(_usual(times=WINDOW))
    scales = []
    for _ in range(WINDOW):
        scales.append(bound.coefficient(1000.0, 64))
        bound.note(1000.0, 64)
    assert scales == [pytest.approx(0.01)] * (WINDOW // 2) + [1.0] * (WINDOW // 2)


def test_where_nothing_moves_nothing_is_bounded() -> None:
    assert _bound_of(_usual(norm=0.0)).coefficient(1.0, 64) == 1.0


@pytest.mark.parametrize("index", [0, 1])
def test_a_huge_gradient_weighs_as_much_as_the_bound_and_no_more(index: int) -> None:
    x = micro_batch(1)[1] if index == 0 else _hidden(1)
    stage, plain = _warm(index), stage_replica(index, 3, NEVER)
    usual = sorted(norm for norm, _ in stage.state_dict()["norms"])[WARM_UP // 2]
    found = stage.backward("m", x, _hidden(9) * 1e7, 16, 0)
    honest = plain.backward("m", x, _hidden(9), 16, 0)
    assert _norm(stage) == pytest.approx(FACTOR * usual, rel=1e-5)
    assert stage.outliers == 1
    assert found.scale < 1e-4
    assert stage.accumulated.num_tokens == 16
    sums, direction = stage.state_dict()["sums"], plain.state_dict()["sums"]
    for name, total in sums.items():
        torch.testing.assert_close(total / _norm(stage), direction[name] / _norm(plain), rtol=1e-4, atol=1e-7)
    if index == 1:  # The stages before get the gradient of the same, lighter loss.
        assert found.grad_x is not None
        assert honest.grad_x is not None
        torch.testing.assert_close(found.grad_x, honest.grad_x * 1e7 * found.scale, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_one_liar_among_eight_does_not_decide_where_a_step_goes() -> None:
    """Eight micro-batches, one with the others' gradient turned round and 1e7 times as large."""

    def step(stage: StageReplica, lie: float) -> torch.Tensor:
        for number in range(8):
            gradient = _hidden(7) * (lie if number == 3 else 1.0)
            stage.backward("m", _hidden(7), gradient, 16, stage.version)
        return torch.cat([total.flatten() for total in stage.state_dict()["sums"].values()])

    few = StageConfig(clip_factor=1e9, tail_clip_factor=1e9, outlier_factor=2.0)
    honest = step(_warm(1, few), 1.0)
    towards = torch.cosine_similarity(honest, step(_warm(1, few), -1e7), dim=0)
    unbounded = torch.cosine_similarity(honest, step(_warm(1, NEVER), -1e7), dim=0)
    assert towards > 0.9
    assert unbounded < -0.9


def test_a_tail_bounds_its_own() -> None:
    stage = _warm(2)
    for _ in range(WINDOW):  # So little is usual that the losses of random labels are far beyond it.
        stage._norm_bound.note(1e-4, 16)
    _, _, labels = micro_batch(1)
    plain = stage_replica(2, 3, NEVER).tail("m", _hidden(1), labels)
    found = stage.tail("m", _hidden(1), labels)
    assert found.scale < 1.0
    assert found.loss_sum == plain.loss_sum
    torch.testing.assert_close(found.grad_hidden, plain.grad_hidden * found.scale)
    assert _norm(stage) == pytest.approx(FACTOR * 1e-4, rel=1e-5)


def test_what_was_refused_says_nothing_of_what_is_usual() -> None:
    class TooLateError(Exception):
        pass

    def too_late() -> None:
        raise TooLateError

    stage = _warm(1)
    before = stage.state_dict()["norms"]
    with pytest.raises(TooLateError):
        stage.backward("m", _hidden(1), _hidden(9) * 1e7, 16, 0, before_apply=too_late)
    assert stage.state_dict()["norms"] == before
    assert stage.outliers == 0


def test_a_restart_knows_what_is_usual() -> None:
    stage, restarted = _warm(1), stage_replica(1, 3, BOUNDED)
    restarted.load_state_dict(stage.state_dict())
    for each in (stage, restarted):
        assert each.backward("m", _hidden(1), _hidden(9) * 1e7, 16, 0).scale < 1e-4
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
