"""When attempts are repeated, and when they are not."""

from __future__ import annotations

import time

import pytest

from genesis.errors import StoreAccessError, StoreUnavailableError
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
