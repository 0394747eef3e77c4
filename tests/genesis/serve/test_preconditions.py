"""Conditional requests."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.serve.preconditions import Precondition, UnsatisfiableRangeError, evaluate, parse_range, range_applies

ETAG = '"a-b-c"'
AT_S = 1_700_000_000
BEFORE, SAME, AFTER = (formatdate(AT_S + shift, usegmt=True) for shift in (-1, 0, 1))


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ({}, Precondition.SEND),
        ({"if-none-match": ETAG}, Precondition.NOT_MODIFIED),
        ({"if-none-match": f"W/{ETAG}"}, Precondition.NOT_MODIFIED),
        ({"if-none-match": f'"x", W/"y" ,{ETAG}'}, Precondition.NOT_MODIFIED),
        ({"if-none-match": "*"}, Precondition.NOT_MODIFIED),
        ({"if-none-match": '"x"'}, Precondition.SEND),
        ({"if-none-match": "a-b-c"}, Precondition.SEND),
        ({"if-none-match": '"x"', "if-modified-since": SAME}, Precondition.SEND),
        ({"if-modified-since": BEFORE}, Precondition.SEND),
        ({"if-modified-since": SAME}, Precondition.NOT_MODIFIED),
        ({"if-modified-since": AFTER}, Precondition.NOT_MODIFIED),
        ({"if-modified-since": "yesterday"}, Precondition.SEND),
        ({"if-match": ETAG}, Precondition.SEND),
        ({"if-match": "*"}, Precondition.SEND),
        ({"if-match": f"W/{ETAG}"}, Precondition.FAILED),
        ({"if-match": '"x"'}, Precondition.FAILED),
        ({"if-match": '"x"', "if-none-match": ETAG}, Precondition.FAILED),
        ({"if-match": ETAG, "if-unmodified-since": BEFORE}, Precondition.SEND),
        ({"if-unmodified-since": BEFORE}, Precondition.FAILED),
        ({"if-unmodified-since": SAME}, Precondition.SEND),
        ({"if-unmodified-since": SAME, "if-none-match": ETAG}, Precondition.NOT_MODIFIED),
        ({"if-unmodified-since": "1 Jan 99999999999 00:00:00 GMT"}, Precondition.SEND),
    ],
)
def test_the_order_of_the_rfc(headers, outcome):
    assert evaluate(headers, ETAG, AT_S) is outcome


@pytest.mark.parametrize(
    ("if_range", "applies"),
    [
        (None, True),
        (ETAG, True),
        (f"W/{ETAG}", False),
        ('"x"', False),
        (SAME, True),
        (BEFORE, False),
        (AFTER, False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_if_range(if_range, applies):
    assert range_applies(if_range, ETAG, AT_S, now_s=AT_S + 3600) is applies


def test_a_time_that_is_too_young_vouches_for_nothing():
    assert not range_applies(SAME, ETAG, AT_S, now_s=AT_S + 1)


@given(st.text(max_size=60))
def test_no_header_breaks_it(text):
    for name in ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since"):
        assert evaluate({name: text}, ETAG, AT_S) in Precondition
    assert range_applies(text, ETAG, AT_S, now_s=AT_S) in (True, False)


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
def test_no_range_header_breaks_it(header):
    for text in (header, f"bytes={header}"):
        try:
            part = parse_range(text, 100)
        except UnsatisfiableRangeError:
            continue
        assert part is None or 0 <= part.first <= part.last < 100
