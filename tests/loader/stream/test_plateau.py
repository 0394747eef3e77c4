"""The plateau rules: 000 and 001 to the letter, the relative one, and losses that say nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader import LoaderUsageError, PlateauRule
from loader.stream.plateau import LossHistory

LOSSES = st.lists(st.floats(0.0, 0.3) | st.floats(0.0, 12.0), max_size=50)


def specification_says(losses: list[float]) -> bool:
    """001, "Adaptive Shard Rotation"."""
    if len(losses) < 20:
        return False
    recent = losses[-20:]
    average = sum(recent) / len(recent)
    variance = sum((loss - average) ** 2 for loss in recent) / len(recent)
    return variance < 0.02 and average < 0.05


@given(LOSSES)
def test_absolute_is_the_specification_and_off_never_fires(losses: list[float]) -> None:
    assert (PlateauRule().plateau(losses) is not None) == specification_says(losses)
    assert PlateauRule("off").plateau(losses) is None


def test_the_defaults_are_the_specifications_and_what_makes_no_sense_is_refused() -> None:
    rule = PlateauRule()
    assert (rule.kind, rule.history, rule.window, rule.min_steps) == ("absolute", 50, 20, 100)
    assert (rule.max_variance, rule.max_mean) == (0.02, 0.05)
    for wrong in ({"kind": "sideways"}, {"window": 1}, {"window": 50}, {"history": 20}, {"min_steps": -1}):
        with pytest.raises(LoaderUsageError):
            PlateauRule(**wrong)  # type: ignore[arg-type]


def test_bounds_are_exclusive() -> None:
    plateau = PlateauRule().plateau([9.0] * 30 + [0.01, 0.03] * 10)
    assert plateau is not None
    assert (plateau.mean, plateau.variance) == (pytest.approx(0.02), pytest.approx(0.0001))
    at_the_mean = [0.05] * 50
    assert PlateauRule("absolute").plateau(at_the_mean) is None
    assert PlateauRule("absolute").plateau([math.nextafter(0.05, 0)] * 50) is not None
    half = math.sqrt(0.02)
    wide = [1 + half * 1.0001, 1 - half * 1.0001] * 25
    assert PlateauRule("absolute", max_mean=5.0).plateau(wide) is None
    # However wide losses scatter from batch to batch, one that no longer falls has plateaued.
    assert PlateauRule("relative").plateau(wide) is not None


def test_relative_asks_whether_the_loss_still_falls() -> None:
    rule = PlateauRule("relative")
    falling = [3.0 - 0.01 * n for n in range(50)]
    assert rule.plateau(falling) is None
    assert rule.plateau([3.0] * 50) is not None
    assert rule.plateau([3.0] * 30 + [2.99] * 20) is not None  # 0.33 % is less than 0.5 %.
    assert rule.plateau([3.0] * 30 + [2.98] * 20) is None  # 0.67 % is not.
    assert rule.plateau([3.0] * 30 + [3.05] * 20) is not None  # Rising is no improvement.
    assert rule.plateau([3.0] * 49) is None  # The history is not full.


def test_the_history_is_bounded_can_be_cleared_and_leaves_out_losses_that_are_not_finite() -> None:
    history = LossHistory(50, [0.01] * 19)
    for loss in (math.nan, math.inf, -math.inf):
        history.add(loss)
    assert history.losses() == [0.01] * 19
    history.add(0.01)
    assert PlateauRule().plateau(history.losses()) is not None
    for loss in range(130):
        history.add(loss)
    assert history.losses() == [float(loss) for loss in range(80, 130)]
    history.clear()
    assert history.losses() == []


def test_huge_losses_are_no_accident() -> None:
    # The square of 1e200 is no float; a rule that looks at it must say no, not fail.
    assert PlateauRule("absolute").plateau([1e200, -1e200] * 25) is None
    assert PlateauRule("relative").plateau([1e200, -1e200] * 25) is None
