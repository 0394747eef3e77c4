"""The ``Range`` header (RFC 9110, section 14) for one range of bytes.

A server may ignore ``Range``: several ranges at once, other units and what cannot be understood get the whole object,
as they would from a server that knows no ranges. Only a range that lies beyond the end is refused (416).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["ByteRange", "UnsatisfiableRangeError", "parse_range"]

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
