"""Shares in the ratio of speeds; newcomers found out soon and at a bounded cost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.swarm_bench.churn import ChurnPlan, compare
from trainer.pipeline.driver.balancer import Balancer, Reservation


class Queues:
    """Workers that serve one after another, each at its speed, on a simulated clock."""

    def __init__(self, in_flight: int, service_s: dict[str, float]) -> None:
        self.balancer = Balancer(4)
        self.in_flight = in_flight
        self.service_s: dict[str, float] = {}
        self.free_s: dict[str, float] = {}
        self.under_way: list[tuple[float, Reservation]] = []
        self.order: list[str] = []
        self.now = 0.0
        for worker, each_s in service_s.items():
            self.join(worker, each_s)

    def join(self, worker: str, service_s: float) -> None:
        self.service_s[worker], self.free_s[worker] = service_s, self.now
        self.balancer.add(worker)

    def run(self, num: int) -> None:
        """Until so many more are granted."""
        done = len(self.order) + num
        while len(self.order) < done:
            while len(self.under_way) < self.in_flight and (place := self.balancer.acquire(1.0, self.now)) is not None:
                begin_s = max(self.now, self.free_s[place.worker])
                self.free_s[place.worker] = begin_s + self.service_s[place.worker]
                self.under_way.append((self.free_s[place.worker], place))
                self.order.append(place.worker)
            self.under_way.sort(key=lambda each: each[0])
            self.now, place = self.under_way.pop(0)
            self.balancer.measured(place, 1.0, place.reserved_s, self.now)
            self.balancer.done(place)


def reserved(balancer: Balancer, worker: str) -> Reservation:
    place = balancer.acquire(1.0, 0.0, lambda other: other != worker)
    assert place is not None
    return place


def known(balancer: Balancer, workers: str, s_per_unit: float) -> None:
    """Adds workers that have proved themselves, level with each other."""
    for number, worker in enumerate(workers):
        balancer.add(worker)
        place = reserved(balancer, worker)
        balancer.timed(place, 1.0, s_per_unit)
        (balancer.released if number else balancer.done)(place)
    assert len({load.runtime_s for load in balancer.loads()}) == 1


def test_shares_are_in_the_ratio_of_speeds() -> None:
    queues = Queues(8, {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0})
    queues.run(550)
    shares = {worker: count / 550 * 2.75 for worker, count in Counter(queues.order).items()}
    assert shares == pytest.approx({"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.25}, rel=0.1)


def test_requests_that_wait_in_line_at_a_worker_count_once() -> None:
    balancer = Balancer()
    known(balancer, "a", 1.0)
    places = [reserved(balancer, "a") for _ in range(3)]
    for number, place in enumerate(places, start=1):
        balancer.measured(place, 1.0, 0.0, float(number))
        balancer.done(place)
    assert balancer.estimate_s("a", 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("num_slow", [4, 16])
def test_a_fast_newcomer_gets_its_share_within_a_few_requests(num_slow: int) -> None:
    queues = Queues(2 * num_slow, {f"slow-{number}": 10.0 for number in range(num_slow)})
    queues.run(20 * num_slow)
    queues.join("new", 1.0)
    joined = len(queues.order)
    queues.run(10 * num_slow)
    after = queues.order[joined:]
    assert "new" in after[:5]  # One newcomer in four micro-batches.
    found_out = after.index("new") + num_slow  # Its first answer comes within a second.
    share = 10 / (10 + num_slow)  # It is ten times as fast as each of the others.
    following = after[found_out : found_out + 4 * num_slow]
    assert following.count("new") / len(following) > 0.7 * share


def test_a_worker_that_was_banned_proves_itself_anew_and_makes_up_for_nothing() -> None:
    queues = Queues(4, dict.fromkeys("abc", 1.0))
    queues.run(60)
    queues.balancer.distrust("c")
    banned = queues.order.count("c")
    for _ in range(30):
        place = queues.balancer.acquire(1.0, queues.now, lambda worker: worker == "c")
        assert place is not None
        queues.now += 0.5
        queues.balancer.measured(place, 1.0, queues.now - 0.5, queues.now)
        queues.balancer.done(place)
    queues.run(60)
    assert 10 <= queues.order.count("c") - banned <= 30


def test_no_more_than_the_cap_at_one_worker_and_none_where_nobody_may() -> None:
    balancer = Balancer(2)
    balancer.add("a")
    first = balancer.acquire(1.0, 0.0)
    assert first is not None
    assert balancer.acquire(1.0, 0.0) is None  # It has not answered anything yet.
    balancer.measured(first, 1.0, 0.0, 1.0)
    assert [balancer.acquire(1.0, 1.0) is None for _ in range(2)] == [False, True]
    balancer.done(first)
    assert balancer.acquire(1.0, 1.0, lambda _worker: True) is None
    balancer.rest("a", 5.0)
    assert balancer.acquire(1.0, 4.0) is None
    assert balancer.next_rested_s(4.0) == 5.0
    assert balancer.acquire(1.0, 5.0) is not None


def test_a_newcomer_alone_gets_more_when_its_first_is_held_up_elsewhere() -> None:
    balancer = Balancer(3)
    balancer.add("a")
    times = [now for now in range(12) if balancer.acquire(1.0, now) is not None]
    assert times == [0, 2, 4]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 8))
def test_nothing_is_granted_twice_or_forgotten(seed: int, num_workers: int, cap: int) -> None:
    draw = random.Random(seed)
    balancer = Balancer(cap)
    names = [f"w{number}" for number in range(num_workers)]
    held: list[Reservation] = []
    here: set[str] = set()
    now = 0.0
    for _ in range(120):
        now += draw.random()
        worker, event = draw.choice(names), draw.randrange(8)
        if event == 0:
            balancer.add(worker)
            here.add(worker)
        elif event == 1:
            balancer.remove(worker)
            here.discard(worker)
            held = [place for place in held if place.worker != worker]
        elif event == 2:
            balancer.distrust(worker)
        elif event <= 4 and (place := balancer.acquire(draw.uniform(0.1, 9), now)) is not None:
            held.append(place)
        elif held:
            place = held.pop(draw.randrange(len(held)))
            if event == 5:
                balancer.failed(place, now)
            elif event == 6:
                balancer.released(place)
            else:
                balancer.measured(place, place.units, place.reserved_s, now)
                balancer.done(place)
        loads = {load.worker: load for load in balancer.loads()}
        assert set(loads) == here
        assert Counter(place.worker for place in held) == Counter(
            {name: load.in_flight for name, load in loads.items() if load.in_flight}
        )
        assert all(load.in_flight <= cap for load in loads.values())
        assert all(load.s_per_unit > 0 and load.runtime_s >= 0 for load in loads.values())
    for place in held:
        balancer.done(place)
    if here:
        assert balancer.acquire(1.0, now + 10) is not None


def test_slow_workers_that_come_and_go_cost_less_than_half_of_what_they_cost_other_rules() -> None:
    ratios = compare(ChurnPlan(stay_s=25.0, duration_s=400.0), seeds=3)
    assert min(ratios["ours_over_swarm"], ratios["ours_over_bottom"]) >= 2
    assert ratios["ours_per_s"] >= 3.9  # The four fast ones alone could do 4.
