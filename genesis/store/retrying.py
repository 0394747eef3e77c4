"""One way to try again, for every store behind a network.

An attempt raises `TransientError` for what may pass (500, 503 SlowDown, time-outs, cut connections, short reads); it is
repeated after a random wait that doubles on average (full jitter, 0.1 s to 10 s), or after what the server asked
for, until the call's deadline; then it is a `StoreUnavailableError`. Anything else goes through at once. A server that
has never answered is given 10 s, not the whole deadline: that is a wrong address far more often than a restart.

There is one layer of retries, here: the client libraries' own are switched off, since two layers multiply their
attempts and the inner one knows nothing of the deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

import tenacity

from genesis.errors import StoreUnavailableError

__all__ = ["Deadline", "Retrier", "RetryPolicy", "TransientError"]

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """That many seconds from now."""
        return cls(time.monotonic() + seconds)

    def remaining_s(self) -> float:
        """Seconds left; negative once it has passed."""
        return self.at - time.monotonic()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long calls may take."""

    deadline_s: float = 120.0
    """For a call with all its attempts, beyond what its bytes take at ``slowest_bytes_per_s``."""
    slowest_bytes_per_s: float = 250_000.0
    """2 Mbit/s: a 20 MB shard has 80 s more."""
    first_contact_s: float = 10.0
    """For a server that has never answered to accept a connection."""
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    """For the server to send anything at all."""
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0

    def is_over(self, deadline: Deadline, moved_bytes: int) -> bool:
        """Whether a call with that deadline has had its time, given that it has moved ``moved_bytes`` meanwhile."""
        return deadline.remaining_s() < -moved_bytes / self.slowest_bytes_per_s

    def deadline(self, size_bytes: int = 0) -> Deadline:
        """The deadline of a call that begins now and moves ``size_bytes``."""
        return Deadline.after(self.deadline_s + size_bytes / self.slowest_bytes_per_s)


class Retrier:
    """Runs attempts under a policy; remembers whether the server ever answered."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._answered = False

    def call(self, what: str, attempt: Callable[[], T], deadline: Deadline) -> T:
        """The result of the first attempt that succeeds.

        Args:
            what: what is attempted, for messages: ``write 'manifest.json' to s3://bucket``.
            attempt: raises `TransientError` for what may pass.
            deadline: no wait goes beyond it.

        Raises:
            StoreUnavailableError: every attempt failed.
        """
        began = time.monotonic()
        failures: list[str] = []

        def out_of_time(state: tenacity.RetryCallState) -> bool:
            error = _transient(state)
            if not error.connecting:
                self._answered = True
            ends_at = deadline.at if self._answered else min(deadline.at, began + self._policy.first_contact_s)
            return time.monotonic() + state.upcoming_sleep >= ends_at

        def note(state: tenacity.RetryCallState) -> None:
            failures.append(str(_transient(state)))
            logger.debug("%s: %s; attempt %d follows", what, failures[-1], state.attempt_number + 1)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            wait=self._wait_s,
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
                f"check {cause}, and run the same command again"
            ) from error
        self._answered = True
        return result

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        backoff = tenacity.wait_random_exponential(self._policy.first_wait_s, self._policy.longest_wait_s)
        return max(backoff(state), _transient(state).retry_after_s or 0.0)


def _transient(state: tenacity.RetryCallState) -> TransientError:
    error = state.outcome.exception() if state.outcome is not None else None
    if not isinstance(error, TransientError):
        raise TypeError(f"expected to retry a TransientError, found {error!r}")
    return error
