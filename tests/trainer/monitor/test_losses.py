"""Trends of losses with the noise that losses have."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.monitor.losses import TrackedLosses, has_fallen, loss_trend

NOISE = 0.2


def noisy(values, seed=0, noise=NOISE):
    return np.asarray(values) + np.random.default_rng(seed).normal(0, noise, len(values))


@pytest.mark.parametrize("length", [0, 1, 40, 79, 80, 400, 2_000, 5_000])
def test_a_loss_that_falls_improves_and_one_that_rises_degrades_and_few_tell_nothing(length):
    falling = noisy(6.0 - 2.0 * np.linspace(0, 1, length))
    expected = ("improving", "degrading") if length >= 80 else ("unknown", "unknown")
    assert (loss_trend(falling), loss_trend(falling[::-1])) == expected


@pytest.mark.slow
def test_noise_alone_is_stable():
    verdicts = [loss_trend(noisy(np.full(2_000, 3.0), seed)) for seed in range(200)]
    assert verdicts.count("stable") >= 196


def test_noise_that_follows_itself_is_stable():
    """Losses of neighbouring batches are alike where a shard is of one kind of text."""
    verdicts = []
    for seed in range(100):
        shocks = noisy(np.zeros(2_000), seed)
        values = np.zeros(2_000)
        for step in range(1, 2_000):
            values[step] = 0.8 * values[step - 1] + shocks[step]
        verdicts.append(loss_trend(3.0 + values))
    assert verdicts.count("stable") >= 90


def test_spikes_do_not_make_a_trend():
    for seed in range(50):
        losses = noisy(np.full(400, 3.0), seed)
        losses[np.random.default_rng(seed).choice(400, 4, replace=False)] = 1e30
        assert loss_trend(losses) == "stable"


@pytest.mark.parametrize("since", [20, 40, 60, 100, 150, 300])
def test_a_jump_shows_wherever_it_lies(since):
    fell_and_jumped = np.concatenate([np.linspace(6, 3, 2_000 - since), np.full(since, 6.0)])
    assert loss_trend(noisy(fell_and_jumped)) == "degrading"
    assert loss_trend(noisy(9.0 - fell_and_jumped)) == "improving"


def test_the_shortest_window_that_shows_a_change_decides():
    assert loss_trend(noisy([*np.linspace(3, 9, 1_900), *np.linspace(9, 6, 100)])) == "improving"
    assert loss_trend(noisy([*np.linspace(9, 3, 1_900), *np.linspace(3, 5, 100)])) == "degrading"


def test_a_constant_is_stable_and_a_thousandth_is_no_change():
    found = [loss_trend(losses) for losses in ([3.0] * 500, [3.0] * 40 + [2.998] * 40, [3.0] * 40 + [2.9] * 40)]
    assert found == ["stable", "stable", "improving"]


def test_having_fallen_needs_more_than_noise():
    assert has_fallen(noisy(np.full(50, 10.4)), noisy(np.full(50, 4.0), 1))
    assert not has_fallen(noisy(np.full(50, 4.0)), noisy(np.full(50, 10.4), 1))
    same = [has_fallen(noisy(np.full(50, 4.0), seed), noisy(np.full(50, 4.0), 1_000 + seed)) for seed in range(100)]
    assert sum(same) <= 2


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=200))
def test_the_average_is_finite_and_within_the_losses(losses):
    history = TrackedLosses()
    for loss in losses:
        history.add(loss)
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert list(history.recent) == finite
    assert history.first == finite[:50]
    if finite:
        slack = 1e-9 * max(map(abs, finite))
        assert min(finite) - slack <= history.smoothed <= max(finite) + slack
    else:
        assert history.smoothed is None


def test_memory_is_bounded_and_the_beginning_stays_and_it_goes_on_from_its_state():
    whole, resumed = TrackedLosses(), TrackedLosses()
    for step in range(10_000):
        if step == 170:
            resumed.load_state_dict(whole.state_dict())
        for history in (whole, resumed)[: 1 + (step >= 170)]:
            history.add(float(step))
    assert whole.first == list(range(50))
    assert list(whole.recent) == list(range(8_000, 10_000))
    assert resumed.state_dict() == whole.state_dict()
