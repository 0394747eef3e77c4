"""One object's bytes, collected over as many attempts as it takes: header values, places of bodies, and the time.

Header values are read strictly: what is not of the form is taken for absent. ETags have one spelling in all stores:
quoted, without the ``W/`` that marks weak ones. Caches weaken a tag in passing (nginx does when it compresses), so
`strong_etag` reads the header as it came, and everything else compares tags weakly, as RFC 9110 asks for
``If-None-Match``.

`place` is a pure function from earlier attempts and a new answer to what is done with its body. Bytes are appended only
where the server states that they are the very next ones of the same object: the strong ETag already seen, and a
``Content-Range`` that begins where the last attempt ended and fits the known size. Anything else starts over or is
thrown away, so a body is never put together from two objects. The trade-off: from a server without strong ETags each
cut body is read again from its start.

The bytes go into one buffer, which becomes the body without a copy: a 20 MiB shard costs 20 MiB at its peak, where
joining a list of chunks costs 40 and four times the time. Room is made at once for the length a server names, up to
64 MiB; beyond, as bytes come, so that a server that lies about lengths costs its reader no more than that.

The time a `Download` may take: the policy's deadline, and beyond it what the bytes take at the slowest rate allowed
(half the throttle's cap, if that is less) and what the throttle made them wait. A byte counts once however often it is
sent, so a server that sends the same bytes again and again, or one byte now and then, comes to an end: ``deadline_s +
max_bytes / rate + (wait for max_bytes under the throttle)`` at the latest, and one read time-out.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from genesis.errors import StoreError
from genesis.store.limits import Deadline, Meter, RetryPolicy
from genesis.store.retrying import TransientError

_SIZE = re.compile(r"[0-9]{1,18}")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_STRONG_ETAG = re.compile(r'"[!#-~\x80-\xff]+"')
_ANY_ETAG = re.compile(r'(?:W/)?("?)([!#-~\x80-\xff]+)\1')


@dataclass(frozen=True, slots=True)
class ContentRange:
    """``bytes 5-9/20``: which part of an object a body is."""

    first: int
    last: int
    total: int

    @property
    def size_bytes(self) -> int:
        """Bytes in the part."""
        return self.last - self.first + 1


def parse_content_range(value: str) -> ContentRange | None:
    """A ``Content-Range`` that names a part that can be; None for anything else, an unknown total among them."""
    found = _CONTENT_RANGE.fullmatch(value.strip())
    if found is None:
        return None
    part = ContentRange(*(int(group) for group in found.groups()))
    return part if part.first <= part.last < part.total else None


def parse_size(value: str) -> int | None:
    """A ``Content-Length``; None if it is not a number of bytes."""
    return int(value) if _SIZE.fullmatch(value) else None


def strong_etag(value: str) -> str | None:
    """The ETag if it promises the same bytes, which a weak or misspelt one does not; None otherwise."""
    return value if _STRONG_ETAG.fullmatch(value) else None


def opaque_etag(value: str) -> str | None:
    """The ETag in one spelling, weak or strong, quoted or (as some servers have it) not; None if there is none."""
    found = _ANY_ETAG.fullmatch(value)
    return None if found is None else f'"{found.group(2)}"'


def parse_date(value: str) -> datetime | None:
    """An HTTP date, aware, UTC; None if it is none."""
    try:
        moment = parsedate_to_datetime(value)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):  # The second where a zone takes it beyond the year 9999.
        return None


def parse_retry_after_s(value: str) -> float | None:
    """How long a ``Retry-After`` asks to wait, in either of its two forms; None if it is neither."""
    seconds = parse_size(value.strip())
    if seconds is not None:
        return float(seconds)
    moment = parse_date(value)
    return None if moment is None else max(0.0, (moment - datetime.now(UTC)).total_seconds())


_WHOLE, _PART = 200, 206
_REFUSED = {412, 416}


@dataclass(frozen=True, slots=True)
class Held:
    """What has come of an object so far."""

    size_bytes: int = 0
    etag: str | None = None
    """The strong ETag it came with; None if the server gave none, so that it cannot be gone on with."""
    total_bytes: int | None = None
    """Size of the whole object, once a server has reported it."""

    @property
    def resumable_etag(self) -> str | None:
        """The ETag to ask for the rest with; None if the whole is to be asked for."""
        return self.etag if self.size_bytes > 0 else None


NOTHING = Held()


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and headers of an answer; a header that is not there is empty."""

    status: int
    etag: str = ""
    content_length: str = ""
    content_range: str = ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The answer's body is of no use, and neither is what is held: the next attempt asks for the whole."""

    reason: str


def place(held: Held, answer: Answer) -> Held | Mismatch:
    """What is held when the answer's body begins to come.

    Args:
        held: what earlier attempts brought; the request asked for the rest of it if there is a `resumable_etag`.
        answer: 200, 206, 412 or 416.

    Returns:
        ``held`` itself, but for a total now known, if the body goes on where that ends; something that holds no bytes
        if the body begins at the object's start; a `Mismatch` if it is neither.
    """
    if answer.status in _REFUSED:
        return Mismatch(f"the rest after {held.size_bytes:,} bytes is refused ({answer.status})")
    if answer.status == _WHOLE and not answer.content_range:
        return Held(0, strong_etag(answer.etag), parse_size(answer.content_length))
    # ``rclone serve s3`` 1.75 sends parts with status 200: taken for a whole, one would be an object cut at its front.
    if answer.status not in (_WHOLE, _PART) or held.resumable_etag is None:
        return Mismatch(
            f"expected the whole object, found status {answer.status}, {answer.content_range or 'no range'}"
        )
    return _appended(held, answer)


def _appended(held: Held, answer: Answer) -> Held | Mismatch:
    part = parse_content_range(answer.content_range)
    if part is None or part.first != held.size_bytes:
        return Mismatch(f"expected the bytes from {held.size_bytes:,} on, found {answer.content_range or 'no range'!r}")
    if strong_etag(answer.etag) != held.etag:
        return Mismatch(f"expected the rest of {held.etag}, found {answer.etag or 'no ETag'}")
    if held.total_bytes not in (None, part.total):
        return Mismatch(f"expected an object of {held.total_bytes:,} bytes, found one of {part.total:,}")
    if answer.content_length and parse_size(answer.content_length) != part.size_bytes:
        return Mismatch(f"expected {part.size_bytes:,} bytes for {answer.content_range}, found {answer.content_length}")
    return Held(held.size_bytes, held.etag, part.total)


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
