"""A node's own judgement of its health: what makes it withdraw, when it gives up, and what makes it fit again."""

from __future__ import annotations

import pytest

from trainer.errors import TrainerUsageError, UnfitNodeError
from trainer.run.config.run import HealthConfig
from trainer.run.node.health import Health


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_third_withdrawal_in_a_row_ends_it_and_tells_all_reasons() -> None:
    noted: list[None] = []
    health = Health(HealthConfig(), noted=lambda: noted.append(None))
    health.withdraw("rounds")
    health.withdraw("loss")
    with pytest.raises(UnfitNodeError, match=r"3 times in a row: rounds; then loss; then lag\."):
        health.withdraw("lag")
    assert len(noted) == 3


def test_a_round_with_others_or_an_hour_between_makes_it_fit_again() -> None:
    clock = Clock()
    health = Health(HealthConfig(), clock)
    for _ in range(5):
        health.withdraw("rounds")
        health.withdraw("rounds")
        health.shared()
    for _ in range(5):
        clock.now_s += 3600.0
        health.withdraw("lag")
    health.withdraw("lag")
    with pytest.raises(UnfitNodeError):
        health.withdraw("lag")


def test_first_rounds_missed_within_a_minute_are_one_attempt_to_join() -> None:
    clock = Clock()
    health = Health(HealthConfig(), clock)
    for _ in range(11):
        health.missed_first_round("went on")
        clock.now_s += 10.0
    clock.now_s += 10.0
    with pytest.raises(UnfitNodeError, match="3 times in a row"):
        health.missed_first_round("went on")


def test_it_may_be_told_to_try_for_ever() -> None:
    health = Health(HealthConfig(max_withdrawals=0))
    for _ in range(100):
        health.withdraw("rounds")


def test_failed_rounds_count_in_a_row_and_only_while_the_others_go_on() -> None:
    health = Health(HealthConfig(max_failed_rounds=2))
    assert health.round_failed(others_went_on=True) == ""
    assert health.round_failed(others_went_on=False) == ""
    assert health.round_failed(others_went_on=True) == ""
    assert "2 rounds" in health.round_failed(others_went_on=True)
    health.withdraw("that")
    assert health.round_failed(others_went_on=True) == ""


def test_skipped_steps_count_in_a_row() -> None:
    health = Health(HealthConfig(max_skipped_steps=3))
    for is_skipped in (True, True, False, True, True):
        assert health.step(is_skipped=is_skipped) == ""
    assert "not finite at 3 steps" in health.step(is_skipped=True)
    never = Health(HealthConfig(max_skipped_steps=0))
    assert not any(never.step(is_skipped=True) for _ in range(100))


@pytest.mark.parametrize(
    ("own", "others", "is_unfit"),
    [
        (11.0, [3.0, 3.2], True),
        (11.0, [3.0], False),  # One other may be the wrong one.
        (11.0, [3.0, 0.01, 4.0, 3.5], True),
        (9.0, [3.0, 3.2], False),
        (None, [3.0, 3.0], False),
        (7.0, [0.0, 0.0, 0.0], False),
        (7.0, [9.0, 1.0, 8.0], False),  # One liar moves no median of honest ones.
    ],
)
def test_a_loss_is_compared_with_the_median_of_the_others(own: float, others: list[float], is_unfit: bool) -> None:
    assert bool(Health(HealthConfig()).loss(own, others)) is is_unfit
    assert not Health(HealthConfig(max_loss_ratio=0.0)).loss(own, others)


@pytest.mark.parametrize("name", ["max_withdrawals", "max_skipped_steps", "max_failed_rounds"])
def test_values_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(TrainerUsageError, match=name):
        HealthConfig(**{name: -1})
    with pytest.raises(TrainerUsageError, match="max_loss_ratio"):
        HealthConfig(max_loss_ratio=0.5)
