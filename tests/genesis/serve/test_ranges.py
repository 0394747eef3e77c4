"""The Range header, held against slices of the bytes themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.serve.preconditions import UnsatisfiableRangeError, parse_range

sizes = st.integers(0, 300)
positions = st.integers(0, 400)


def _slice(part, body):
    return body[part.first : part.last + 1]


@given(sizes, positions, positions)
def test_from_and_to(size, first, last):
    body = bytes(index % 251 for index in range(size))
    header = f"bytes={first}-{last}"
    if last < first:
        assert parse_range(header, size) is None
    elif first >= size:
        with pytest.raises(UnsatisfiableRangeError):
            parse_range(header, size)
    else:
        part = parse_range(header, size)
        assert _slice(part, body) == body[first : last + 1]
        assert part.length == len(body[first : last + 1])
        assert part.content_range == f"bytes {first}-{min(last, size - 1)}/{size}"


@given(sizes, positions)
def test_from_somewhere_on(size, first):
    body = bytes(size)
    if first >= size:
        with pytest.raises(UnsatisfiableRangeError):
            parse_range(f"bytes={first}-", size)
    else:
        assert _slice(parse_range(f"bytes={first}-", size), body) == body[first:]


@pytest.mark.slow
@given(sizes, positions)
def test_the_last_so_many(size, length):
    body = bytes(index % 251 for index in range(size))
    if length == 0 or size == 0:
        with pytest.raises(UnsatisfiableRangeError):
            parse_range(f"bytes=-{length}", size)
    else:
        assert _slice(parse_range(f"bytes=-{length}", size), body) == body[-length:]


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "bytes",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "bytes=1-2,4-5",
        "bytes=1-2, bytes=3-4",
        "items=0-1",
        "bytes=+1-2",
        "bytes=1--2",
        "bytes=0x1-2",
        "bytes=" + "9" * 5000 + "-",
        "bytes=\u0661-\u0662",
    ],
)
def test_what_is_no_single_range_is_ignored(header):
    assert parse_range(header, 100) is None


def test_the_unit_in_capitals_and_blanks():
    assert parse_range("Bytes= 3-5 ", 100).length == 3


@given(st.text(max_size=60))
def test_no_header_breaks_it(header):
    for text in (header, f"bytes={header}"):
        try:
            part = parse_range(text, 100)
        except UnsatisfiableRangeError:
            continue
        assert part is None or 0 <= part.first <= part.last < 100
