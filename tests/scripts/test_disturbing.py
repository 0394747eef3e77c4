"""The schedule by which a swarm is disturbed, how it is carried out, and the curve it is judged by."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.swarm_bench.disturbing import KINDS, SLOWED, Disturbance, Disturber, is_at_work, schedule
from scripts.swarm_bench.losses import LossCurve, curve_of
from trainer.monitor import Event

TICK_S = 0.01


@dataclass
class Noted:
    """A victim that notes what becomes of it."""

    name: str
    stage: str
    alive: bool = True
    stopped: bool = False
    heard: list[str] = field(default_factory=list)

    def is_at_work(self) -> bool:
        return self.alive

    def send(self, number: signal.Signals) -> None:
        assert self.alive
        self.stopped = number == signal.SIGSTOP
        self.heard.append(number.name)

    def kill(self) -> None:
        self.alive = False
        self.heard.append("kill")

    def revive(self) -> None:
        self.alive = True
        self.heard.append("revive")


def stages(replicas: int = 2) -> list[Noted]:
    return [Noted(f"{stage}.{number}", stage) for stage in ("head", "tail") for number in range(replicas)]


def carry_out(disturber: Disturber, seconds: float, look: list[tuple[Noted, ...]] | None = None) -> None:
    for number in range(int(seconds / TICK_S)):
        disturber.tick(number * TICK_S)
        if look is not None:
            look.append(tuple(it for it in disturber.victims if it.stopped or not it.alive))


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(15.0, 200.0))
def test_a_schedule_is_the_seeds_and_has_as_much_of_each_kind(seed: int, duration_s: float) -> None:
    plan = schedule(seed, duration_s)
    assert plan == schedule(seed, duration_s)
    assert [it.at_s for it in plan] == [5.0 * number for number in range(len(plan))]
    assert plan[-1].at_s + 5.0 <= duration_s
    counts = Counter(it.kind for it in plan)
    assert max(counts.values()) - min(counts[kind] for kind in KINDS) <= 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100))
def test_of_a_stage_one_at_most_suffers_and_in_the_end_nobody(seed: int) -> None:
    victims, seen = stages(), list[tuple[Noted, ...]]()
    disturber = Disturber(schedule(seed, 60.0, every_s=1.0), victims)
    carry_out(disturber, 30.0, seen)
    for suffering in seen:
        assert len({it.stage for it in suffering}) == len(suffering)
    disturber.end()
    assert all(it.alive and not it.stopped for it in victims)


def test_slowed_ten_times_is_stopped_for_nine_tenths_of_the_time() -> None:
    seen: list[tuple[Noted, ...]] = []
    carry_out(Disturber([Disturbance(0.0, "slow", 20.0, 0.0)], stages()), 20.0, seen)
    assert sum(bool(suffering) for suffering in seen) / len(seen) == pytest.approx(1 - 1 / SLOWED, abs=0.02)


def test_what_nobody_could_bear_is_put_off() -> None:
    victims = stages()
    victims[0].alive = victims[2].alive = False
    disturber = Disturber([Disturbance(0.0, "kill", 1.0, 0.99)], victims)
    carry_out(disturber, 1.0)
    assert (disturber.done, disturber.num_put_off) == ([], 1)
    victims[2].alive = True
    carry_out(disturber, 3.0)
    assert [name for _, name in disturber.done] == ["tail.1"]
    assert victims[3].heard == ["kill", "revive"]
    assert disturber.is_over


def test_who_is_at_work_says_so_and_not_that_it_lost_touch_since() -> None:
    serves, lost = "INFO head.0.40 serves version 3 at x\n", "WARNING lost touch with the other workers of head\n"
    assert not is_at_work("INFO node answers\n")
    assert is_at_work(serves)
    assert not is_at_work(serves + lost)
    assert is_at_work(serves + lost + serves)


def test_losses_of_drivers_are_one_curve_by_time() -> None:
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    events = [
        Event(begun + timedelta(seconds=at_s), "driver", "step", {"loss": loss, "num_tokens": tokens})
        for at_s, loss, tokens in ((3, 1.0, 10), (1, 4.0, 20), (2, 2.0, 10))
    ]
    curve = curve_of(events)
    assert (curve.num_tokens, list(curve.losses)) == (40, [4.0, 2.0, 1.0])
    assert curve.parts(40, 2) == [4.0, 1.5]
    assert curve.parts(20, 1) == [4.0]
    with pytest.raises(ValueError, match="steps in each"):
        LossCurve([100], [1.0]).parts(100, 2)
