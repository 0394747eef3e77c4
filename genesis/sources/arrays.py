"""A JSON array of any size as lines: each element becomes one, so that everything made for lines reads arrays too.

The array is not parsed here, only cut: a scan for brackets and the ends of strings finds where elements end, the comma
or bracket there becomes a newline, and the newlines inside an element (white space between its parts, as they cannot
stand in a JSON string) become carriage returns. Whether an element is JSON at all is found by whoever parses the line.
A raw newline in a string stays an error so, for a carriage return is one too.

Memory is one piece of the stream. The trade-off: reading on at an element scans what is before it again, as it does
for lines, at the speed of this scan instead of that of counting newlines.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from genesis.sources.decompression import UnreadableRestError

_BLANK = b" \t\r\n"
_LOOK_BYTES = 1 << 20
"""What is blank for longer holds no array."""
_BOM = b"\xef\xbb\xbf"
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
"""The inside of a string, as far as there is any; a backslash at the very end is left."""
_IN_ELEMENT = re.compile(rb'["\[\]{}]')
_BETWEEN = re.compile(rb'["\[\]{},]')


class BrokenArrayError(UnreadableRestError):
    """What came is not a JSON array, or not all of one; every element before has been given."""


def holds_array(chunks: Iterator[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Whether the first byte that is not blank opens an array, and the same chunks again."""
    seen: list[bytes] = []
    beginning = b""
    for chunk in chunks:
        seen.append(chunk)
        beginning = b"".join(seen).removeprefix(_BOM).lstrip(_BLANK)
        if len(beginning) >= len(_BOM) or sum(map(len, seen)) > _LOOK_BYTES:
            break
    return beginning.startswith(b"["), itertools.chain(seen, chunks)


def array_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The elements of an array, each ended by a newline, in pieces that may end anywhere.

    Args:
        chunks: the array's text, for which `holds_array` was true.

    Raises:
        BrokenArrayError: an element is missing between two commas, there is more behind the array, or its end is
            missing.
    """
    scan = _Scan()
    for chunk in chunks:
        lines = scan.lines(chunk)
        if lines:
            yield lines
        if scan.failure is not None:
            raise scan.failure
    if not scan.ended:
        raise BrokenArrayError("truncated: the array is not closed")


class _Scan:
    """Where in the array the bytes seen so far end."""

    def __init__(self) -> None:
        self.ended = False
        self.failure: BrokenArrayError | None = None
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False
        """The element in turn has begun."""
        self._elements = 0

    def lines(self, chunk: bytes) -> bytes:
        """The next bytes of the lines; ``failure`` says that there are no more, and why."""
        data = bytearray(chunk.replace(b"\n", b"\r"))
        start = position = 0
        if self._depth == 0 and not self.ended:
            start = position = data.find(b"[") + 1
            if not start:
                return b""
            self._depth = 1
        end = start
        """Behind what is to be given: white space before an element is not, lest an empty array had a row."""
        while position < len(data) and self.failure is None and not self.ended:
            position = self._through_string(data, position) if self._in_string else self._step(data, position)
            if self._begun or (self._elements and data[position - 1] == ord("\n")):
                end = position
        if self.ended and data[position:].strip(_BLANK):
            self.failure = BrokenArrayError("there is more text behind the end of the array")
        return bytes(data[start:end])

    def _step(self, data: bytearray, position: int) -> int:
        """Goes behind the next byte that means something; returns where that is."""
        found = (_BETWEEN if self._depth == 1 else _IN_ELEMENT).search(data, position)
        stop = found.start() if found else len(data)
        if self._depth == 1 and not self._begun:
            self._begun = bool(data[position:stop].strip(_BLANK))
        if found is None:
            return stop
        byte = data[stop]
        if self._depth == 1 and byte in b",]":
            self._end_element(data, stop)
            return stop + 1
        self._begun = True
        if byte == ord('"'):
            self._in_string = True
        elif byte in b"{[":
            self._depth += 1
        elif self._depth > 1:
            self._depth -= 1
        return stop + 1

    def _end_element(self, data: bytearray, place: int) -> None:
        closes = data[place] == ord("]")
        if self._begun:
            self._elements += 1
            data[place] = ord("\n")
        elif not closes or self._elements:
            self.failure = BrokenArrayError("expected an object, found nothing before the comma or bracket")
        self._begun = False
        self.ended = closes

    def _through_string(self, data: bytearray, position: int) -> int:
        if self._escaped:
            self._escaped = False
            position += 1
        found = _STRING.match(data, position)
        end = found.end() if found else len(data)
        if end == len(data):
            return end
        if data[end] == ord('"'):
            self._in_string = False
            return end + 1
        self._escaped = True
        return len(data)
