"""When a round begins and what it waits for, by a clock of the test's own."""

from __future__ import annotations

import pytest

from tests.support.gradient_group import Clock
from trainer.errors import TrainerUsageError
from trainer.outer.grad import GradConfig, Progress
from trainer.outer.grad.timing import RoundTimer


def timer_of(clock: Clock, ahead_s: float = 1.0, auto_step_s: float = 10.0) -> RoundTimer:
    return RoundTimer(1000, ahead_s, auto_step_s, clock)


def train(timer: RoundTimer, clock: Clock, own: int, everybody: int, seconds: float) -> None:
    """Counts so many tokens in ten looks."""
    for part in range(1, 11):
        clock.now_s += seconds / 10
        timer.note(Progress(own * part // 10, everybody * part // 10))


def test_the_first_round_begins_at_the_target_and_later_ones_ahead_of_it_by_the_speed_measured() -> None:
    clock = Clock()
    timer = timer_of(clock)
    train(timer, clock, 300, 990, 9.9)
    assert not timer.is_time_to_begin(others_wait=False), "no speed is known yet"
    timer.note(Progress(310, 1000))
    assert timer.is_time_to_begin(others_wait=False)
    assert timer.begin() == 310
    assert timer.is_time_to_fill()
    timer.filled()
    train(timer, clock, 250, 890, 8.9)
    assert timer.remaining_s == pytest.approx(1.1, rel=0.02)
    assert not timer.is_time_to_begin(others_wait=False)
    clock.now_s += 0.2
    timer.note(Progress(260, 910))
    assert timer.is_time_to_begin(others_wait=False)
    assert timer.begin() == round(260 * 1000 / 910), "what it will have at the target"
    assert not timer.is_time_to_fill()
    timer.note(Progress(290, 1000))
    assert timer.is_time_to_fill()


def test_one_without_tokens_begins_for_others_alone_and_expects_nothing() -> None:
    clock = Clock()
    timer = timer_of(clock)
    timer.note(Progress(0, 5000))
    assert not timer.is_time_to_begin(others_wait=False)
    assert timer.is_time_to_begin(others_wait=True)
    assert timer.begin() == 0


def test_an_idle_replica_steps_with_what_it_has_and_invents_nothing() -> None:
    clock = Clock()
    timer = timer_of(clock)
    clock.now_s = 100.0
    assert not timer.is_time_to_begin(others_wait=False), "it has nothing"
    timer.note(Progress(50, 50))
    clock.now_s = 110.0
    assert not timer.is_idle
    timer.note(Progress(50, 90))  # Another counts.
    clock.now_s = 120.0
    assert not timer.is_idle
    clock.now_s = 120.1
    assert timer.is_idle and timer.is_time_to_begin(others_wait=False) and timer.is_time_to_fill()


def test_gradients_go_in_though_the_target_is_not_reached_after_a_while() -> None:
    clock = Clock()
    timer = timer_of(clock)
    timer.note(Progress(100, 400))
    timer.begin()
    assert not timer.is_time_to_fill()
    clock.now_s += 2.5
    assert timer.is_time_to_fill()


def test_a_failed_round_is_not_begun_again_at_once() -> None:
    clock = Clock()
    timer = timer_of(clock)
    timer.note(Progress(1000, 1000))
    timer.failed()
    assert not timer.is_time_to_begin(others_wait=True)
    clock.now_s += 0.5
    assert timer.is_time_to_begin(others_wait=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_tokens": -1},
        {"average_state_every": -1},
        {"num_slices": 0},
        {"ahead_s": float("nan")},
        {"max_weight_ratio": 0.5},
    ],
)
def test_options_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(TrainerUsageError, match=f"grad.{next(iter(wrong))}"):
        GradConfig(**wrong)


def test_rounds_of_slices_follow_every_so_many_steps() -> None:
    config = GradConfig()
    assert [index for index in range(13) if config.averages_state(index)] == [5, 11]
    assert [config.slice_number(index) for index in (5, 11, 17)] == [0, 1, 2]
    assert not any(map(GradConfig(average_state_every=0).averages_state, range(20)))
