"""HTTP header values, read as strictly as a stranger's deserve: what is not of the form is taken for absent.

ETags come in one spelling throughout the stores: quoted, without the ``W/`` that marks them weak. Caches weaken a
tag in passing (nginx does when it compresses), so `strong_etag` looks at the header as it came, and everything else
compares tags weakly, as RFC 9110 wants for ``If-None-Match``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

__all__ = [
    "ContentRange", "opaque_etag", "parse_content_range", "parse_date", "parse_retry_after_s", "parse_size",
    "strong_etag",
]  # fmt: skip

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
