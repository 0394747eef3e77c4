"""When attempts are repeated, and when they are not."""

from __future__ import annotations

import random
import time

import pytest

from genesis.errors import StoreAccessError, StoreUnavailableError, UsageError
from genesis.store.policy import Deadline, RetryPolicy
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


def test_what_passes_is_tried_again():
    attempt = attempts_of(TransientError("one"), TransientError("two"), "done")
    assert Retrier(QUICK).call("work", attempt, QUICK.deadline()) == "done"


def test_what_does_not_pass_is_raised_at_once():
    attempt = attempts_of(StoreAccessError("no"), "done")
    with pytest.raises(StoreAccessError):
        Retrier(QUICK).call("work", attempt, QUICK.deadline())


def test_the_last_error_is_named():
    with pytest.raises(StoreUnavailableError, match=r"cannot work: busy \(attempts: \d+"):
        Retrier(QUICK).call("work", attempts_of(TransientError("busy")), Deadline.after(0.05))


def test_a_wait_beyond_the_deadline_is_not_begun():
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="attempts: 1,"):
        Retrier(QUICK).call("work", attempts_of(TransientError("busy", retry_after_s=3600)), Deadline.after(60))
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("asked_s", [3600.0, None])
def test_how_long_the_server_asked_to_wait_is_told(asked_s):
    with pytest.raises(StoreUnavailableError) as caught:
        Retrier(QUICK).call("work", attempts_of(TransientError("busy", retry_after_s=asked_s)), Deadline.after(0.01))
    assert caught.value.retry_after_s == asked_s


def test_a_server_never_met_is_given_less_time():
    down = TransientError("refused", connecting=True)
    began = time.monotonic()
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


def test_large_bodies_have_more_time():
    policy = RetryPolicy(deadline_s=10, slowest_bytes_per_s=1_000_000)
    assert policy.deadline(20_000_000).remaining_s() == pytest.approx(30, abs=1)


class Moving:
    """A call's time, which a test moves on, and how far it has come."""

    def __init__(self, left_s: float = 1e9) -> None:
        self.left_s = left_s
        self.moved_bytes = 0

    def remaining_s(self) -> float:
        return self.left_s


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


def test_an_attempt_that_brought_something_starts_the_waits_again(waits):
    call = Moving()

    def attempt() -> str:
        if len(waits) == 200:
            return "done"
        call.moved_bytes += 1 << 20
        raise TransientError("cut")

    Retrier(RetryPolicy(first_wait_s=1, longest_wait_s=1e9)).call("work", attempt, call)
    assert max(waits) <= 1


def test_a_byte_an_attempt_is_no_progress(waits):
    call = Moving()

    def attempt() -> str:
        if len(waits) == 60:
            return "done"
        call.moved_bytes += 1
        raise TransientError("cut")

    Retrier(RetryPolicy(first_wait_s=1, longest_wait_s=1e5)).call("work", attempt, call)
    assert max(waits) > 1000


def test_what_the_server_asked_for_is_the_least(waits):
    asked = TransientError("busy", retry_after_s=50)
    Retrier(RetryPolicy(first_wait_s=1, longest_wait_s=2)).call("work", attempts_of(asked, asked, "done"), Moving())
    assert all(50 <= waited <= 52 for waited in waits)
    with pytest.raises(StoreUnavailableError, match="attempts: 1,"):
        Retrier(RetryPolicy()).call("work", attempts_of(asked), Moving(left_s=49))


def test_time_earned_meanwhile_counts(waits):
    """The limit is asked each time, so a call that moves on may outlast the deadline it began with."""
    call = Moving(left_s=0.5)

    def attempt() -> str:
        call.left_s = 0.5 if len(waits) < 30 else -1
        raise TransientError("cut")

    with pytest.raises(StoreUnavailableError, match="attempts: 31,"):
        Retrier(RetryPolicy(first_wait_s=0.4, longest_wait_s=0.4)).call("work", attempt, call)


def test_the_users_random_numbers_are_not_used_up(waits):
    random.seed(1)
    expected = random.random()
    random.seed(1)
    Retrier(QUICK).call("work", attempts_of(TransientError("busy"), "done"), Moving())
    assert random.random() == expected


def test_a_policy_for_a_store_with_mirrors():
    short = RetryPolicy().lasting(20)
    assert (short.deadline_s, short.first_contact_s, short.connect_timeout_s, short.read_timeout_s) == (20, 10, 10, 10)
    assert short.lasting(4) == RetryPolicy().lasting(4)
    assert short.lasting(4).read_timeout_s == 2
    for nonsense in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="deadline_s above 0"):
            RetryPolicy().lasting(nonsense)
