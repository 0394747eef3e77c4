"""How a worker becomes one of its stage, tried with a clock and others of the test's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import TrainerError
from trainer.network.discovery.stage_report import StageReport
from trainer.run.config.swarm import JoinConfig
from trainer.run.swarm.catch_up import StateCatchUp

ROUND_S = 10.0


def serving(round_index: int, position: float) -> StageReport:
    return StageReport(
        uid="tail.0.42",
        incarnation="0" * 16,
        status="serving",
        version=5,
        round_index=round_index,
        round_position=position,
    )


@dataclass
class Stage:
    """Others that have a round every ten seconds, and a newcomer."""

    num_others: int = 3
    is_current: bool = False
    fetch_s: float = 0.5
    fails: int = 0
    """Fetches that bring nothing."""
    ends_at_s: float = 1e9
    first_from_s: float = 0.0
    """From when on a worker that is alone may serve."""
    liars: tuple[float, ...] = ()
    """Others that always say that they are so far in the round."""
    now_s: float = 0.0
    own_round: int = 0
    taken_at: list[float] = field(default_factory=list)

    def others(self) -> list[StageReport]:
        round_index, position = divmod(self.now_s / ROUND_S, 1.0)
        honest = [serving(100 + int(round_index), position)] * self.num_others
        return [*honest, *(serving(100 + int(round_index), lie) for lie in self.liars)]

    def take_up(self) -> bool:
        began = self.others()[0].round_index
        self.taken_at.append((self.now_s / ROUND_S) % 1.0)
        self.now_s += self.fetch_s
        if len(self.taken_at) <= self.fails:
            return False
        self.own_round = began
        return True

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def arrival(self, is_over: Callable[[], bool] | None = None, **options: float) -> StateCatchUp:
        return StateCatchUp(
            config=JoinConfig(idle_s=1e6, **options),  # type: ignore[arg-type]
            others=self.others,
            take_up=self.take_up,
            may_be_first=lambda: self.now_s >= self.first_from_s,
            round_index=lambda: self.own_round,
            is_current=lambda: self.is_current,
            is_over=is_over or (lambda: self.now_s > self.ends_at_s),
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )


def test_who_is_alone_serves_at_once() -> None:
    stage = Stage(num_others=0)
    assert stage.arrival().run()
    assert not stage.taken_at


def test_who_is_alone_and_may_not_be_the_first_waits_until_it_may_or_others_come() -> None:
    stage = Stage(num_others=0, first_from_s=20.0)
    assert stage.arrival().run()
    assert 20.0 <= stage.now_s < 21.0

    stage = Stage(num_others=0, first_from_s=1e9)
    waits = stage.sleep

    def sleep(seconds: float) -> None:
        waits(seconds)
        stage.num_others = 3 if stage.now_s > 5.0 else 0

    arrival = stage.arrival()
    arrival.sleep = sleep
    assert arrival.run()
    assert len(stage.taken_at) == 1


@given(st.floats(0, 30), st.floats(0.05, 1.0))
def test_a_state_is_taken_up_in_the_first_part_of_a_round(begin_s: float, window: float) -> None:
    stage = Stage(now_s=begin_s)
    assert stage.arrival(window=window).run()
    assert all(position < window for position in stage.taken_at)
    assert len(stage.taken_at) == 1


@given(st.integers(0, 40))
def test_nobody_serves_without_the_others_state(fails: int) -> None:
    stage = Stage(fails=fails, ends_at_s=300.0)
    served = stage.arrival(window=1.0).run()
    assert served == (len(stage.taken_at) > fails)
    assert stage.own_round or not served


def test_who_is_too_far_behind_when_the_state_is_here_fetches_another() -> None:
    stage = Stage(fetch_s=75.0)

    def faster(take_up: Callable[[], bool] = stage.take_up) -> bool:
        found = take_up()
        stage.fetch_s = 20.0
        return found

    arrival = stage.arrival(max_rounds_behind=5)
    arrival.take_up = faster
    assert arrival.run()
    assert len(stage.taken_at) == 2
    assert stage.others()[0].round_index - stage.own_round <= 5


def test_one_that_lies_about_the_round_keeps_nobody_out() -> None:
    stage = Stage(liars=(0.99,), ends_at_s=100.0)
    assert stage.arrival().run()


def test_a_worker_that_is_to_stop_or_cannot_go_on_does_not_serve() -> None:
    assert not Stage(fails=10**6, ends_at_s=5.0).arrival().run()

    def broken() -> bool:
        raise TrainerError("the compute thread cannot go on")

    with pytest.raises(TrainerError, match="compute thread"):
        Stage().arrival(broken).run()


def test_what_is_waited_for_and_what_ends_it_is_said_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trainer.run.swarm.catch_up"):
        assert Stage(now_s=5.0, fails=1).arrival().run()
        assert Stage(now_s=60.2, fails=100, ends_at_s=200.0).arrival().run() is False
    first, second, *later = [record.message for record in caplog.records]
    end = "the next round of the others begins (round {}), or when it has not moved for 1e+06 s"
    begin = "waiting for the stage's state: "
    assert first == f"{begin}their state is taken up when {end.format('100 is 50 % through')}"
    assert second == f"{begin}none hands out a state yet; they are asked again in 2 s, then when " + end.format(
        "106 is 2 % through"
    )
    assert len(later) == 2, "once a minute"


def test_who_comes_back_with_the_others_state_serves_at_once_and_fetches_nothing() -> None:
    stage = Stage(now_s=0.5 * ROUND_S, is_current=True)
    assert stage.arrival().run()
    assert stage.now_s == 0.5 * ROUND_S and not stage.taken_at


def test_who_comes_back_where_nobody_serves_does_not_serve_for_that() -> None:
    stage = Stage(num_others=0, is_current=True, first_from_s=7.0)
    assert stage.arrival().run()
    assert stage.now_s >= 7.0
