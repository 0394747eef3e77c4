"""What bounds the calls of a store: how long each may take, and how many bytes a second a process receives.

Apart from `genesis.store.retrying`, whose library (30 ms) a local store does not import.

`Throttle` is a token bucket with debt: what came is paid for afterwards, by a wait that is as long as the debt. Over
any span of time no more comes than ``bytes_per_s`` times its length, one burst (a quarter of a second's worth unless
told otherwise), and the one block (64 KiB) each thread holds while it waits. All threads and all stores that are given
one throttle share it. The trade-off: the sender is slowed by the receive window filling up, so the kernel's buffers of
each connection are filled before the first wait is felt. A forked child, and the copy a pickle makes, have a bucket of
their own: the cap is one process's.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

from genesis.errors import UsageError
from genesis.store.base import PerProcess


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


_BURST_S = 0.25


class _Bucket:
    """Tokens, one a byte, of one process."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = burst_bytes
        self._counted_at = clock()

    def owed_s(self, size_bytes: int) -> float:
        """Takes tokens; returns how long it is until there are as many again as were taken."""
        with self._lock:
            now = self._clock()
            earned = max(0.0, now - self._counted_at) * self._bytes_per_s
            self._tokens = min(self._burst_bytes, self._tokens + earned) - size_bytes
            self._counted_at = now
            return max(0.0, -self._tokens / self._bytes_per_s)


class Throttle:
    """A bandwidth cap; see the module's docstring for what it guarantees."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        burst_bytes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Sets the cap.

        Args:
            bytes_per_s: what may be received a second, on average.
            burst_bytes: what may come at once after a pause; a quarter of a second's worth unless given.
            clock: seconds, never going back.
            sleep: waits that many seconds.

        Raises:
            UsageError: a number is not positive.
        """
        burst = bytes_per_s * _BURST_S if burst_bytes is None else burst_bytes
        for name, value in (("bytes_per_s", bytes_per_s), ("burst_bytes", burst)):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"expected {name} above 0, found {value}")
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst
        self._sleep = sleep
        self._bucket = PerProcess(lambda: _Bucket(bytes_per_s, burst, clock))

    def __repr__(self) -> str:
        return f"Throttle({self._bytes_per_s:,.0f} bytes/s)"

    def __reduce__(self) -> tuple[Callable[[], Throttle], tuple[()]]:
        """A pickle holds the cap alone."""
        return functools.partial(Throttle, self._bytes_per_s, burst_bytes=self._burst_bytes), ()

    @property
    def bytes_per_s(self) -> float:
        """The cap."""
        return self._bytes_per_s

    def pay(self, size_bytes: int) -> float:
        """Waits as long as ``size_bytes`` that were received cost, and returns how many seconds that was."""
        owed_s = self._bucket.get().owed_s(size_bytes)
        if owed_s > 0:
            self._sleep(owed_s)
        return owed_s


class _Count:
    """Bytes received by one process."""

    __slots__ = ("lock", "total")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total = 0


class Meter:
    """Counts bytes as they come, and slows their coming down to a throttle's cap. Safe from many threads."""

    def __init__(self, throttle: Throttle | None = None) -> None:
        """Takes the throttle, if there is to be one."""
        self._throttle = throttle
        self._count = PerProcess(_Count)

    @property
    def received_bytes(self) -> int:
        """Bytes received by this process so far."""
        count = self._count.peek()
        return 0 if count is None else count.total

    @property
    def cap_bytes_per_s(self) -> float | None:
        """The throttle's cap."""
        return None if self._throttle is None else self._throttle.bytes_per_s

    def received(self, size_bytes: int) -> float:
        """Notes that ``size_bytes`` came; returns the seconds it made the caller wait for them."""
        count = self._count.get()
        with count.lock:
            count.total += size_bytes
        return 0.0 if self._throttle is None else self._throttle.pay(size_bytes)
