"""One way to try again, for every store behind a network.

An attempt raises `TransientError` for what may pass (500, 503 SlowDown, time-outs, cut connections, short reads); it is
repeated after a random wait that doubles on average (full jitter, 0.1 s to 10 s; from 0.1 s again after an attempt that
brought something) on top of what the server asked for, until the call's deadline; then it is a `StoreUnavailableError`.
A wait that would go beyond the deadline is not begun. Anything else goes through at once. A server that has never
answered is given 10 s, not the whole deadline: that is a wrong address far more often than a restart.

There is one layer of retries, here: the client libraries' own are switched off, since two layers multiply their
attempts and the inner one knows nothing of the deadline.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

import tenacity

from genesis.errors import StoreUnavailableError
from genesis.store.limits import RetryPolicy, TimeLimit

T = TypeVar("T")

_PROGRESS_BYTES = 64 << 10
"""An attempt that brought less counts as one that brought nothing."""
_LONGEST_EXPONENT = 60

_JITTER = random.SystemRandom()
"""Not the global generator: that is the user's, whose seed is to give the same numbers on every network."""

logger = logging.getLogger(__name__)


class TransientError(Exception):
    """An attempt failed in a way that may pass; never leaves the stores."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, connecting: bool = False) -> None:
        """Describes the failure.

        Args:
            message: what happened, for the log and for the error if it does not pass.
            retry_after_s: how long the server asked to wait.
            connecting: there was no connection, so the server has not even seen the request.
        """
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.connecting = connecting


class Retrier:
    """Runs attempts under a policy; remembers whether the server ever answered."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._answered = False

    def call(self, what: str, attempt: Callable[[], T], limit: TimeLimit) -> T:
        """The result of the first attempt that succeeds.

        Args:
            what: what is attempted, for messages: ``write 'manifest.json' to s3://bucket``.
            attempt: raises `TransientError` for what may pass.
            limit: no wait goes beyond it.

        Raises:
            StoreUnavailableError: every attempt failed.
        """
        began = time.monotonic()
        failures: list[str] = []

        def out_of_time(state: tenacity.RetryCallState) -> bool:
            left_s = limit.remaining_s()
            if not self._has_answered(_transient(state)):
                left_s = min(left_s, began + self._policy.first_contact_s - time.monotonic())
            return state.upcoming_sleep >= left_s

        def note(state: tenacity.RetryCallState) -> None:
            failures.append(str(_transient(state)))
            logger.debug("%s: %s; attempt %d follows", what, failures[-1], state.attempt_number + 1)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            wait=_Waits(self._policy, limit),
            stop=out_of_time,
            before_sleep=note,
            reraise=True,
        )
        try:
            result = retrying(attempt)
        except TransientError as error:
            # The very last may only have run out of time; the one before says why.
            reasons = " after ".join(dict.fromkeys([str(error), *failures[-1:]]))
            cause = "the address and the network" if error.connecting else "the network, and the server's log and disk"
            raise StoreUnavailableError(
                f"cannot {what}: {reasons} (attempts: {len(failures) + 1}, over {time.monotonic() - began:.0f} s); "
                f"check {cause}, and run the same command again",
                retry_after_s=error.retry_after_s,
            ) from error
        self._answered = True
        return result

    def _has_answered(self, error: TransientError) -> bool:
        if not error.connecting:
            self._answered = True
        return self._answered


class _Waits:
    """The waits between the attempts of one call."""

    def __init__(self, policy: RetryPolicy, limit: TimeLimit) -> None:
        self._policy = policy
        self._limit = limit
        self._moved_bytes = limit.moved_bytes
        self._fruitless = 0

    def __call__(self, state: tenacity.RetryCallState) -> float:
        """Seconds to wait now."""
        moved_bytes = self._limit.moved_bytes
        has_moved = moved_bytes - self._moved_bytes >= _PROGRESS_BYTES
        self._moved_bytes = moved_bytes
        self._fruitless = 0 if has_moved else self._fruitless + 1
        longest_s = self._policy.first_wait_s * 2 ** min(max(0, self._fruitless - 1), _LONGEST_EXPONENT)
        backoff_s = _JITTER.uniform(0.0, min(self._policy.longest_wait_s, longest_s))
        return backoff_s + (_transient(state).retry_after_s or 0.0)


def _transient(state: tenacity.RetryCallState) -> TransientError:
    error = state.outcome.exception() if state.outcome is not None else None
    if not isinstance(error, TransientError):
        raise TypeError(f"expected to retry a TransientError, found {error!r}")
    return error
