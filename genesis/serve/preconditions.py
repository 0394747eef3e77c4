"""Conditional requests (RFC 9110, section 13): whether to send an object, and whether to send a part of it.

Pure functions of the headers and the object's two validators. A header that cannot be understood is ignored, as the
RFC has it; ETags decide before times, and times count only to the second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum

__all__ = ["Precondition", "evaluate", "range_applies"]

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
