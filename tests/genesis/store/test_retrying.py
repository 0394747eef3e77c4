"""When attempts are repeated, and a bandwidth cap on a clock that only waiting moves."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import StoreAccessError, StoreUnavailableError, UsageError
from genesis.store import Throttle
from genesis.store.limits import Deadline, RetryPolicy
from genesis.store.retrying import Retrier, TransientError

QUICK = RetryPolicy(deadline_s=5, first_contact_s=0.1, first_wait_s=0.001, longest_wait_s=0.01)


def attempts_of(*outcomes: Exception | str):
    left = list(outcomes)

    def attempt() -> str:
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return attempt


def test_what_is_tried_again_and_what_is_told_in_the_end():
    attempt = attempts_of(TransientError("one"), TransientError("two"), "done")
    assert Retrier(QUICK).call("work", attempt, QUICK.deadline()) == "done"
    attempt = attempts_of(StoreAccessError("no"), "done")
    with pytest.raises(StoreAccessError):
        Retrier(QUICK).call("work", attempt, QUICK.deadline())
    with pytest.raises(StoreUnavailableError, match=r"cannot work: busy \(attempts: \d+"):
        Retrier(QUICK).call("work", attempts_of(TransientError("busy")), Deadline.after(0.05))
    for asked_s in (3600.0, None):
        with pytest.raises(StoreUnavailableError) as caught:
            Retrier(QUICK).call("work", attempts_of(TransientError("", retry_after_s=asked_s)), Deadline.after(0.01))
        assert caught.value.retry_after_s == asked_s


def test_what_is_not_waited_for():
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="attempts: 1,"):
        Retrier(QUICK).call("work", attempts_of(TransientError("busy", retry_after_s=3600)), Deadline.after(60))
    down = TransientError("refused", connecting=True)
    with pytest.raises(StoreUnavailableError, match="address"):
        Retrier(QUICK).call("work", attempts_of(down), Deadline.after(60))
    assert time.monotonic() - began < 60


def test_a_server_met_before_is_given_the_whole_time():
    retrier = Retrier(QUICK)
    retrier.call("work", attempts_of("hello"), QUICK.deadline())
    ends_at = time.monotonic() + 3 * QUICK.first_contact_s

    def restarting() -> str:
        if time.monotonic() < ends_at:
            raise TransientError("refused", connecting=True)
        return "back"

    assert retrier.call("work", restarting, Deadline.after(60)) == "back"


def test_deadlines():
    policy = RetryPolicy(deadline_s=10, slowest_bytes_per_s=1_000_000)
    assert policy.deadline(20_000_000).remaining_s() == pytest.approx(30, abs=1)
    short = RetryPolicy().lasting(20)
    assert (short.deadline_s, short.first_contact_s, short.connect_timeout_s, short.read_timeout_s) == (20, 10, 10, 10)
    for nonsense in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="deadline_s above 0"):
            RetryPolicy().lasting(nonsense)


class Moving:
    """A call that never ends, and how far it has come."""

    moved_bytes = 0

    def remaining_s(self) -> float:
        return 1e9


@pytest.fixture
def waits(monkeypatch):
    """What was waited for between attempts; nobody really waits."""
    waited: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", waited.append)
    return waited


def test_waits_grow_at_random_up_to_the_longest(waits):
    policy = RetryPolicy(first_wait_s=1, longest_wait_s=8)
    Retrier(policy).call("work", attempts_of(*[TransientError("busy")] * 200, "done"), Moving())
    assert all(waited <= min(8, 2**number) for number, waited in enumerate(waits))
    assert min(waits[10:]) < 1
    assert max(waits[10:]) > 7


@pytest.mark.parametrize("brought_bytes", [1 << 20, 1])
def test_an_attempt_that_brought_more_than_a_byte_starts_the_waits_again(waits, brought_bytes):
    call = Moving()

    def attempt() -> str:
        if len(waits) == 100:
            return "done"
        call.moved_bytes += brought_bytes
        raise TransientError("cut")

    Retrier(RetryPolicy(first_wait_s=1, longest_wait_s=1e5)).call("work", attempt, call)
    assert max(waits) <= 1 if brought_bytes > 1 else max(waits) > 1000


def test_what_the_server_asked_for_is_the_least(waits):
    asked = TransientError("busy", retry_after_s=50)
    Retrier(RetryPolicy(first_wait_s=1, longest_wait_s=2)).call("work", attempts_of(asked, asked, "done"), Moving())
    assert all(50 <= waited <= 52 for waited in waits)


RATE, BURST = 1000.0, 200.0


class Clock:
    """Stands still but for `sleep` and `now_s`."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
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
