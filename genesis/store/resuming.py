"""HTTP header values, and where the body of a resumed download goes.

Header values are read strictly: what is not of the form is taken for absent. ETags have one spelling in all stores:
quoted, without the ``W/`` that marks weak ones. Caches weaken a tag in passing (nginx does when it compresses), so
`strong_etag` reads the header as it came, and everything else compares tags weakly, as RFC 9110 asks for
``If-None-Match``.

`place` is a pure function from earlier attempts and a new answer to what is done with its body. Bytes are appended only
where the server states that they are the very next ones of the same object: the strong ETag already seen, and a
``Content-Range`` that begins where the last attempt ended and fits the known size. Anything else starts over or is
thrown away, so a body is never put together from two objects. The trade-off: from a server without strong ETags each
cut body is read again from its start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

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
    except (ValueError, OverflowError):
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


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
