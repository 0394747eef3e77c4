"""Conditional and range requests (RFC 9110, sections 13 and 14): whether to send an object, and which part of it.

Pure functions of the headers and the object's two validators. A header that cannot be understood is ignored, as the
RFC has it; ETags decide before times, and times count only to the second. Several ranges at once and units other than
bytes get the whole object. Only a range that lies beyond the end is refused (416).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum

_ETAG = re.compile(r'(?P<weak>W/)?(?P<tag>"[\x21\x23-\x7e\x80-\xff]*")')
_STRONG_AFTER_S = 60
"""A time is a strong validator only if the object can no longer have changed twice within its second."""


class Precondition(Enum):
    """What the conditions of a request come to."""

    SEND = 200
    NOT_MODIFIED = 304
    FAILED = 412


def evaluate(headers: Mapping[str, str], etag: str, modified_s: int) -> Precondition:
    """Weighs the four conditions in the order of section 13.2.2.

    Args:
        headers: of a GET or HEAD, by lower-case name.
        etag: the object's, strong, with quotes.
        modified_s: seconds since the epoch.
    """
    if (if_match := headers.get("if-match")) is not None:
        if not _matches(if_match, etag, strong=True):
            return Precondition.FAILED
    elif (
        unmodified_since := _seconds(headers.get("if-unmodified-since"))
    ) is not None and modified_s > unmodified_since:
        return Precondition.FAILED
    if (if_none_match := headers.get("if-none-match")) is not None:
        return Precondition.NOT_MODIFIED if _matches(if_none_match, etag, strong=False) else Precondition.SEND
    modified_since = _seconds(headers.get("if-modified-since"))
    if modified_since is not None and modified_s <= modified_since:
        return Precondition.NOT_MODIFIED
    return Precondition.SEND


def range_applies(if_range: str | None, etag: str, modified_s: int, now_s: float) -> bool:
    """Whether ``Range`` counts: always without ``If-Range``, else only if the object is still exactly the one named."""
    if if_range is None:
        return True
    if '"' in if_range:
        return if_range.strip() == etag
    return _seconds(if_range) == modified_s and now_s - modified_s >= _STRONG_AFTER_S


def _matches(header: str, etag: str, *, strong: bool) -> bool:
    if header.strip() == "*":
        return True
    return any(found["tag"] == etag and not (strong and found["weak"]) for found in _ETAG.finditer(header))


def _seconds(date: str | None) -> int | None:
    if date is None:
        return None
    try:
        moment = parsedate_to_datetime(date)
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return None


_SINGLE = re.compile(r"bytes=[ \t]*(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})[ \t]*", re.IGNORECASE)


class UnsatisfiableRangeError(Exception):
    """The range begins at or beyond the end of the object; the answer is 416."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``first`` to ``last``, both included, of an object of ``size_bytes``."""

    first: int
    last: int
    size_bytes: int

    @property
    def length(self) -> int:
        """How many bytes it is."""
        return self.last - self.first + 1

    @property
    def content_range(self) -> str:
        """As ``Content-Range`` says it."""
        return f"bytes {self.first}-{self.last}/{self.size_bytes}"


def parse_range(header: str | None, size_bytes: int) -> ByteRange | None:
    """The range asked for, cut to the object; None where the whole object is the answer.

    Raises:
        UnsatisfiableRangeError: there is no byte of it in the object.
    """
    found = _SINGLE.fullmatch(header or "")
    if found is None or found["first"] == found["last"] == "":
        return None
    if found["first"] == "":
        length = min(int(found["last"]), size_bytes)
        first, last = size_bytes - length, size_bytes - 1
    else:
        first = int(found["first"])
        last = int(found["last"]) if found["last"] else size_bytes - 1
        if found["last"] and last < first:
            return None  # Not a range at all, so it is ignored.
        last = min(last, size_bytes - 1)
    if first > last:
        raise UnsatisfiableRangeError
    return ByteRange(first, last, size_bytes)
