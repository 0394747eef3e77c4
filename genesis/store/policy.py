"""How long the calls of a store may take: a policy, and the moment it gives each call.

Apart from `genesis.store.retrying`, whose library (30 ms) a local store does not import.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Protocol, Self

from genesis.errors import UsageError


class TimeLimit(Protocol):
    """How long a call has."""

    def remaining_s(self) -> float:
        """Seconds left; negative once the time is up."""

    @property
    def moved_bytes(self) -> int:
        """How far the call has come; what it has moved twice counts once."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock: the limit of a call whose size was known when it began."""

    at: float

    @property
    def moved_bytes(self) -> int:
        """0: a plain deadline does not count bytes."""
        return 0

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

    def lasting(self, deadline_s: float) -> RetryPolicy:
        """This policy with another deadline, every other time cut to fit.

        A store that has mirrors is given a short one, such as 20 s: one that hangs is then left for the next after two
        attempts.

        Raises:
            UsageError: the deadline is not positive.
        """
        if not deadline_s > 0:
            raise UsageError(f"expected deadline_s above 0, found {deadline_s}")
        return replace(
            self,
            deadline_s=deadline_s,
            first_contact_s=min(self.first_contact_s, deadline_s),
            connect_timeout_s=min(self.connect_timeout_s, deadline_s / 2),
            read_timeout_s=min(self.read_timeout_s, deadline_s / 2),
        )

    def deadline(self, size_bytes: int = 0) -> Deadline:
        """The deadline of a call that begins now and moves ``size_bytes``."""
        return Deadline.after(self.deadline_s + size_bytes / self.slowest_bytes_per_s)
