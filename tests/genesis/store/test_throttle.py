"""A bandwidth cap, on a clock that only waiting moves."""

from __future__ import annotations

import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import UsageError
from genesis.store import Throttle

RATE, BURST = 1000.0, 200.0


class Clock:
    """Stands still but for `sleep` and `now_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lock = threading.Lock()

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.now_s += seconds


def throttle(clock: Clock) -> Throttle:
    return Throttle(RATE, burst_bytes=BURST, clock=clock, sleep=clock.sleep)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 10)), max_size=30))
def test_never_more_than_the_cap_and_no_wait_longer_than_needed(events):
    """After each payment, what came since any earlier moment fits the cap and one burst; a wait only makes it fit."""
    clock = Clock()
    capped = throttle(clock)
    paid: list[tuple[float, int]] = []
    for size_bytes, idle_s in events:
        clock.now_s += idle_s
        asked_at = clock.now_s
        waited_s = capped.pay(size_bytes)
        assert clock.now_s == asked_at + waited_s
        paid.append((asked_at, size_bytes))
        spans = [
            (clock.now_s - since, sum(size for at, size in paid[number:])) for number, (since, _) in enumerate(paid)
        ]
        assert all(came <= BURST + RATE * span_s + 1e-6 for span_s, came in spans)
        if waited_s > 0:
            assert any(came >= BURST + RATE * span_s - 1e-6 for span_s, came in spans)


def test_what_is_saved_up_is_one_burst():
    clock = Clock()
    capped = throttle(clock)
    clock.now_s = 1_000_000.0
    assert capped.pay(int(BURST)) == 0
    assert capped.pay(100) == pytest.approx(0.1)


def test_threads_share_it():
    """A clock that stands still adds up what each was told to wait: the last one waits for all."""
    waits: list[float] = []
    capped = Throttle(RATE, burst_bytes=BURST, clock=lambda: 0.0, sleep=waits.append)
    threads = [threading.Thread(target=lambda: [capped.pay(10) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert max(waits) == pytest.approx((4 * 100 * 10 - BURST) / RATE)
    assert len(set(waits)) == len(waits)


def test_a_pickle_keeps_the_cap():
    capped = Throttle(123.0, clock=lambda: 0.0)
    assert pickle.loads(pickle.dumps(capped)).bytes_per_s == 123.0


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_cap_that_is_none(rate):
    with pytest.raises(UsageError, match="bytes_per_s above 0"):
        Throttle(rate)
    with pytest.raises(UsageError, match="burst_bytes above 0"):
        Throttle(1, burst_bytes=rate)
