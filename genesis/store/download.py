"""One object's bytes, collected over as many attempts as it takes, and the time that may take.

The bytes go into one buffer, which becomes the body without a copy: a 20 MiB shard costs 20 MiB at its peak, where
joining a list of chunks costs 40 and four times the time. Room is made at once for the length a server names, up to
64 MiB; beyond, as bytes come, so that a server that lies about lengths costs its reader no more than that.

The time: the policy's deadline, and beyond it what the bytes take at the slowest rate allowed (half the throttle's cap,
if that is less) and what the throttle made them wait. A byte counts once however often it is sent, so a server that
sends the same bytes again and again, or one byte now and then, comes to an end:
``deadline_s + max_bytes / rate + (wait for max_bytes under the throttle)`` at the latest, and one read time-out.
"""

from __future__ import annotations

import io

from genesis.errors import StoreError
from genesis.store.policy import Deadline, RetryPolicy
from genesis.store.resuming import NOTHING, Answer, Held, Mismatch, place
from genesis.store.retrying import TransientError
from genesis.store.throttle import Meter

MAX_OBJECT_BYTES = 1 << 30
"""No object of a store is larger: what a call reads at most that sets no bound of its own."""

_ROOM_BYTES = 64 << 20


class Download:
    """The state of one `get`: what has come, what to ask for next, and how long it may go on.

    A `genesis.store.retrying.TimeLimit` of its own call; used by one thread.
    """

    def __init__(
        self, name: str, policy: RetryPolicy, meter: Meter, *, max_bytes: int, deadline: Deadline | None = None
    ) -> None:
        """Begins with nothing.

        Args:
            name: of the object, for messages.
            policy: deadline and slowest rate.
            meter: told of every byte.
            max_bytes: larger objects are refused.
            deadline: of the call this is a part of; the policy's from now if there is none.
        """
        self._name = name
        self._meter = meter
        self._max_bytes = max_bytes
        self._deadline = deadline or policy.deadline()
        self._rate = min(policy.slowest_bytes_per_s, (meter.cap_bytes_per_s or float("inf")) / 2)
        self._waited_s = 0.0
        self._furthest_bytes = 0
        self._held = NOTHING
        self._buffer = io.BytesIO()

    @property
    def held(self) -> Held:
        """What has come so far; the next attempt asks for the rest of it, if it can resume."""
        return self._held

    @property
    def moved_bytes(self) -> int:
        """The most that was ever held."""
        return self._furthest_bytes

    def remaining_s(self) -> float:
        """Seconds left; negative once the time is up."""
        return self._deadline.remaining_s() + self._furthest_bytes / self._rate + self._waited_s

    def begin(self, answer: Answer) -> None:
        """Makes ready for the body of an answer: 200, 206, 412 or 416.

        Raises:
            StoreError: the object is too large.
            TransientError: the body is not what was asked for; what was held is thrown away.
        """
        placed = place(self._held, answer)
        if isinstance(placed, Mismatch):
            self.discard()
            raise TransientError(f"{placed.reason}; starting over")
        self._check_size(placed.total_bytes or 0)
        if placed.size_bytes == 0:
            self._buffer = _room(min(placed.total_bytes or 0, _ROOM_BYTES))
        self._held = placed

    def append(self, chunk: bytes) -> None:
        """Takes the next bytes of the body.

        Raises:
            StoreError: the object is too large.
            TransientError: the time is up, or there is more than the server said.
        """
        waited_s = self._meter.received(len(chunk))
        size = self._held.size_bytes + len(chunk)
        self._check_size(size)
        total = self._held.total_bytes
        if total is not None and size > total:
            self.discard()
            raise TransientError(f"expected {total:,} bytes, {size:,} or more came")
        self._buffer.write(chunk)
        self._held = Held(size, self._held.etag, total)
        if size > self._furthest_bytes:
            self._furthest_bytes = size
            self._waited_s += waited_s
        if self.remaining_s() < 0:
            raise TransientError(f"{size:,} bytes had come when the time was up")

    def finish(self) -> bytes:
        """The body, once an answer's has ended.

        Raises:
            TransientError: there is more to come.
        """
        held = self._held
        if held.total_bytes is not None and held.size_bytes != held.total_bytes:
            raise TransientError(f"expected {held.total_bytes:,} bytes, {held.size_bytes:,} came")
        return self._buffer.getvalue()

    def discard(self) -> None:
        """Throws away what is held: the next attempt asks for the whole.

        To be called at the end of a call, too. tenacity leaves reference cycles behind, through which a body would live
        on until the garbage collector comes by: reading 15 shards of 20 MiB one after the other took 296 MiB so.
        """
        self._held = NOTHING
        self._buffer = io.BytesIO()

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise StoreError(
                f"{self._name}: expected at most {self._max_bytes:,} bytes, found {size_bytes:,} or more; "
                "this is not the object it should be, or the store is not one"
            )


def _room(size_bytes: int) -> io.BytesIO:
    """A buffer of zeros, to be written over from its start; `BytesIO.getvalue` gives its own memory, uncopied."""
    buffer = io.BytesIO()
    if size_bytes:
        buffer.seek(size_bytes - 1)
        buffer.write(b"\0")
        buffer.seek(0)
    return buffer
