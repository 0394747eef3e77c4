"""HTTP header values, and what only looks like them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.store.resuming import (
    ContentRange,
    opaque_etag,
    parse_content_range,
    parse_date,
    parse_retry_after_s,
    parse_size,
    strong_etag,
)


@given(first=st.integers(0, 10**17), size=st.integers(1, 10**6), more=st.integers(0, 10**6))
def test_a_range_comes_back(first, size, more):
    last = first + size - 1
    part = parse_content_range(f"bytes {first}-{last}/{last + 1 + more}")
    assert part == ContentRange(first, last, last + 1 + more)
    assert part.size_bytes == size


@pytest.mark.parametrize(
    "value",
    ["", "bytes 0-9/*", "bytes */10", "bytes 5-4/10", "bytes 0-10/10", "bytes 0-1/2,3-4/5", "items 0-1/2",
     "bytes 0-1/" + "9" * 5000, "bytes ٠-١/٢", "bytes -1-2/3"],
)  # fmt: skip
def test_no_range(value):
    assert parse_content_range(value) is None


@pytest.mark.parametrize(
    ("value", "size"),
    [("0", 0), ("300", 300), ("", None), ("-1", None), ("1e3", None), ("٣", None), ("9" * 5000, None)],
)
def test_sizes(value, size):
    assert parse_size(value) == size


@pytest.mark.parametrize(
    ("value", "strong", "opaque"),
    [
        ('"a-1"', '"a-1"', '"a-1"'),
        ('W/"a-1"', None, '"a-1"'),
        ("a-1", None, '"a-1"'),
        ('w/"a"', None, None),
        ('""', None, None),
        ('W/""', None, None),
        ("", None, None),
        ('"a" "b"', None, None),
        ('"a', None, None),
    ],
)
def test_etags(value, strong, opaque):
    assert strong_etag(value) == strong
    assert opaque_etag(value) == opaque


def test_retry_after_in_both_forms():
    assert parse_retry_after_s("120") == 120.0
    later = datetime.now(UTC) + timedelta(hours=1)
    assert parse_retry_after_s(format_datetime(later, usegmt=True)) == pytest.approx(3600, abs=600)
    assert parse_retry_after_s(format_datetime(later - timedelta(days=1), usegmt=True)) == 0.0
    for junk in ("", "soon", "-5", "Fri, 99 Foo 2026 99:99:99 GMT", "1" * 400):
        assert parse_retry_after_s(junk) is None


@given(st.text(max_size=40))
def test_no_header_is_an_error(value):
    for parse in (parse_content_range, parse_size, strong_etag, opaque_etag, parse_date, parse_retry_after_s):
        parse(value)
