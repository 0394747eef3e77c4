"""How a worker comes and goes, with a clock of the test's own: what it may serve, take up, choose, save and share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import CheckpointError, TrainerError
from trainer.model import preset
from trainer.model.plan import StagePlan
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.run.config.run import JoinConfig
from trainer.run.swarm.lifecycle import (
    catch_up,
    confirm_current,
    is_ahead,
    neediest_stage,
    rejoin_delay_s,
    shut_down_gracefully,
)

ROUND_S = 10.0
LEAVE_S = 30.0
PLAN = StagePlan.of(preset("tiny", 2048), 3)


def report(stage: str, number: int = 40, status: str = "serving", **figures: float) -> StageReport:
    content = {"uid": str(StageUid(stage, number)), "incarnation": "0" * 16, "status": status}
    return StageReport.model_validate(content | figures)


@dataclass
class Stage:
    """Others that have a round every ten seconds, and a newcomer."""

    num_others: int = 3
    is_current: bool = False
    fetch_s: float = 0.5
    fails: int = 0  # Fetches that bring nothing.
    ends_at_s: float = 1e9
    first_from_s: float = 0.0  # From when on a worker that is alone may serve.
    liars: tuple[float, ...] = ()  # Others that always announce to be so far in the round.
    stands_still: bool = False  # The others do no work.
    now_s: float = 0.0
    own_round: int = 0
    taken_at: list[float] = field(default_factory=list)

    def others(self) -> list[StageReport]:
        round_index, position = (7.0, 0.6) if self.stands_still else divmod(self.now_s / ROUND_S, 1.0)
        positions = [position] * self.num_others + list(self.liars)
        return [report("tail", round_index=100 + int(round_index), round_position=each) for each in positions]

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

    def catch_up(
        self, is_over: Callable[[], bool] | None = None, *, max_behind: int | None = None, **options: float
    ) -> bool:
        return catch_up(
            JoinConfig(**({"idle_s": 1e6} | options)),  # type: ignore[arg-type]
            others=self.others,
            take_up=self.take_up,
            may_be_first=lambda: self.now_s >= self.first_from_s,
            round_index=lambda: self.own_round,
            is_current=lambda: self.is_current,
            is_over=is_over or (lambda: self.now_s > self.ends_at_s),
            clock=lambda: self.now_s,
            sleep=self.sleep,
            max_behind=max_behind,
        )


@pytest.mark.parametrize("is_current", [False, True])
def test_who_is_alone_serves_when_it_may_or_takes_up_the_state_of_others_that_come(is_current: bool) -> None:
    for first_from_s in (0.0, 20.0):
        stage = Stage(num_others=0, first_from_s=first_from_s, is_current=is_current)
        assert stage.catch_up()
        assert first_from_s <= stage.now_s < first_from_s + 1.0
        assert not stage.taken_at

    class Empty(Stage):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            self.num_others = 3 if self.now_s > 5.0 else 0

    stage = Empty(num_others=0, first_from_s=1e9)
    assert stage.catch_up()
    assert len(stage.taken_at) == 1


@given(st.floats(0, 30), st.floats(0.05, 1.0))
def test_a_state_is_taken_up_in_the_first_part_of_a_round(begin_s: float, window: float) -> None:
    stage = Stage(now_s=begin_s)
    assert stage.catch_up(window=window)
    assert all(position < window for position in stage.taken_at)
    assert len(stage.taken_at) == 1


@given(st.integers(0, 40))
def test_nobody_serves_without_the_others_state(fails: int) -> None:
    stage = Stage(fails=fails, ends_at_s=300.0)
    served = stage.catch_up(window=1.0)
    assert served == (len(stage.taken_at) > fails)
    assert stage.own_round or not served


def test_who_is_too_far_behind_when_the_state_is_here_fetches_another() -> None:
    class Slow(Stage):
        def take_up(self) -> bool:
            found = super().take_up()
            self.fetch_s = 20.0
            return found

    stage = Slow(fetch_s=75.0)
    assert stage.catch_up(max_rounds_behind=5)
    assert len(stage.taken_at) == 2
    assert stage.others()[0].round_index - stage.own_round <= 5


def test_one_that_lies_about_the_round_keeps_nobody_out_and_who_is_to_stop_does_not_serve() -> None:
    assert Stage(liars=(0.99,), ends_at_s=100.0).catch_up()
    assert not Stage(fails=10**6, ends_at_s=5.0).catch_up()

    def broken() -> bool:
        raise TrainerError("the compute thread cannot go on")

    with pytest.raises(TrainerError, match="compute thread"):
        Stage().catch_up(broken)


def test_who_is_current_serves_at_once_and_a_round_that_stands_still_counts_as_a_beginning() -> None:
    stage = Stage(now_s=0.5 * ROUND_S, is_current=True)
    assert stage.catch_up()
    assert stage.now_s == 0.5 * ROUND_S and not stage.taken_at
    stage = Stage(stands_still=True, now_s=5.0)
    assert stage.catch_up(window=0.1, idle_s=20.0)
    assert 25.0 <= stage.now_s < 26.0 and len(stage.taken_at) == 1


@given(st.floats(0, 30), st.floats(0.05, 0.5), st.floats(0, 2))
def test_who_averages_gradients_is_current_and_confirmed_in_the_first_fifth_of_a_round_it_is_in(
    begin_s: float, window: float, fetch_s: float
) -> None:
    stage, follows_s = Stage(now_s=begin_s, fetch_s=fetch_s), 0.0

    def follow(seconds: float) -> None:
        nonlocal follows_s
        stage.sleep(seconds)
        follows_s += seconds
        stage.own_round = stage.others()[0].round_index  # It takes part in their rounds.

    assert stage.catch_up(window=window, max_behind=0)
    assert stage.own_round == stage.others()[0].round_index
    config = JoinConfig(window=window, idle_s=1e6)
    waits = {"clock": lambda: stage.now_s, "is_over": lambda: False, "round_index": lambda: stage.own_round}
    assert confirm_current(config, others=stage.others, is_lost=lambda: False, sleep=follow, **waits)
    assert (stage.now_s / ROUND_S) % 1.0 < 2 * window
    assert follows_s <= ROUND_S + 1.0


def test_a_follower_that_loses_touch_begins_again_and_one_whose_stage_is_idle_or_empty_serves() -> None:
    stage = Stage(now_s=0.5 * ROUND_S, own_round=100)
    config = JoinConfig(idle_s=4.0)
    waits = {"clock": lambda: stage.now_s, "sleep": stage.sleep, "round_index": lambda: stage.own_round}
    assert not confirm_current(config, others=stage.others, is_lost=lambda: True, is_over=lambda: False, **waits)
    assert not confirm_current(config, others=stage.others, is_lost=lambda: False, is_over=lambda: True, **waits)
    assert confirm_current(config, others=list, is_lost=lambda: False, is_over=lambda: False, **waits)
    stage.stands_still = True
    began_s = stage.now_s
    assert confirm_current(config, others=stage.others, is_lost=lambda: False, is_over=lambda: False, **waits)
    assert began_s + 4.0 <= stage.now_s < began_s + 5.0


def test_a_worker_that_keeps_losing_touch_asks_less_and_less_often() -> None:
    assert rejoin_delay_s(0.0, math.inf) == rejoin_delay_s(16.0, 30.0) == 0.0
    waited = [0.0]
    for _ in range(8):
        waited.append(rejoin_delay_s(waited[-1], 1.0))
    assert waited == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([10], True),  # A tie, which the newer state wins.
        ([40], False),
        ([10, 10], False),  # Most of the stage.
        ([10, 41], True),  # One of two that are new, which came a moment later.
        ([38, 60], False),  # The others have gone on.
        ([10, 10, 10, 41], False),
    ],
)
def test_who_comes_back_with_more_keeps_it_unless_most_of_the_stage_has_less(others: list[int], expected: bool) -> None:
    assert is_ahead(40, [report("tail", 40 + n, version=version) for n, version in enumerate(others)]) is expected


@pytest.mark.parametrize(
    ("rates", "neediest"),
    [
        ([("head", 1.0), ("tail", 1.0)], "body-1"),  # One without anybody.
        ([("head", 50.0), ("body-1", 20.0), ("body-1", 20.0), ("tail", 45.0)], "body-1"),
        ([("head", 50.0), ("body-1", 20.0), ("body-1", 20.0), ("tail", 45.0), ("body-1", 20.0)], "tail"),
        # One that reports no rate yet counts as the slowest that does.
        ([("head", 0.0), ("body-1", 30.0), ("tail", 10.0), ("tail", 0.0)], "head"),
    ],
)
def test_the_neediest_stage_has_nobody_or_the_least_rate(rates: list[tuple[str, float]], neediest: str) -> None:
    assert neediest_stage(PLAN.names, [report(stage, rows_per_s=rate) for stage, rate in rates]) == neediest


def test_joining_workers_count_and_leaving_ones_do_not_and_newcomers_that_come_together_spread() -> None:
    joining, leaving = report("body-1", status="joining", rows_per_s=1.0), report("head", 9, "leaving", rows_per_s=9.0)
    assert neediest_stage(PLAN.names, [report("head", rows_per_s=1.0), joining]) == "tail"
    others = [report(stage, rows_per_s=1.0) for stage in ("body-1", "tail")]
    assert neediest_stage(PLAN.names, [leaving, *others]) == "head"
    chosen = Counter(neediest_stage(PLAN.names, [], number) for number in range(30))
    assert chosen == {"head": 10, "body-1": 10, "tail": 10}


@dataclass
class Leaver:
    """A worker with requests under way; what it does, in order."""

    answered_at_s: tuple[float, ...] = ()  # When each of them has its answer.
    fails: dict[str, Exception] = field(default_factory=dict)  # By what it does.
    takes_s: dict[str, float] = field(default_factory=dict)
    now_s: float = 0.0
    did: list[tuple[str, float]] = field(default_factory=list)

    def leave(self) -> dict[str, float]:
        """What it did, and when, or in how many seconds at most."""
        shut_down_gracefully(
            leave_s=LEAVE_S,
            num_unanswered=lambda: sum(at_s > self.now_s for at_s in self.answered_at_s),
            refuse=lambda: self.did.append(("refuse", self.now_s)),
            save=lambda timeout_s: self._do("save", timeout_s),
            share=lambda timeout_s: self._do("share", timeout_s),
            clock=lambda: self.now_s,
            sleep=self._sleep,
        )
        return dict(self.did)

    def _do(self, name: str, timeout_s: float) -> None:
        self.did.append((name, timeout_s))
        self._sleep(self.takes_s.get(name, 0.0))
        if name in self.fails:
            raise self.fails[name]

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_what_is_under_way_is_answered_before_anything_is_refused_but_holds_nothing_up_for_ever() -> None:
    did = Leaver(answered_at_s=(2.0, 7.0)).leave()
    assert list(did) == ["refuse", "save", "share"]
    assert 7.0 <= did["refuse"] < 7.5
    leaver = Leaver(answered_at_s=(1e9,))
    did = leaver.leave()
    assert list(did) == ["refuse", "save", "share"]
    assert did["save"] == pytest.approx(LEAVE_S / 2, abs=0.5)
    assert leaver.now_s == pytest.approx(LEAVE_S, abs=0.5)


def test_what_could_not_be_saved_is_shared_and_said_and_a_round_that_fails_costs_the_round_alone() -> None:
    assert list(Leaver(fails={"share": TrainerError("busy")}).leave()) == ["refuse", "save", "share"]
    leaver = Leaver(fails={"save": CheckpointError("no space left")})
    with pytest.raises(CheckpointError, match="no space"):
        leaver.leave()
    assert [name for name, _ in leaver.did] == ["refuse", "save", "share"]
    assert Leaver(takes_s={"save": 100.0}).leave()["share"] == 0.0
    assert Leaver(takes_s={"save": 100.0}, answered_at_s=(1e9,)).leave()["save"] >= 5.0, "however little is left"
