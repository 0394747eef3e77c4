"""Putting a body together from several answers: whatever a server does, the result is one version of the object."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import StoreError
from genesis.store import RetryPolicy, Throttle
from genesis.store.limits import Deadline, Meter
from genesis.store.resuming import (
    NOTHING,
    Answer,
    ContentRange,
    Download,
    Held,
    Mismatch,
    opaque_etag,
    parse_content_range,
    parse_date,
    parse_retry_after_s,
    parse_size,
    place,
    strong_etag,
)
from genesis.store.retrying import TransientError

ETAG = '"v1"'
HELD = Held(5, ETAG, 20)
REST = Answer(206, ETAG, "15", "bytes 5-19/20")


def fresh(max_bytes: int = 1 << 20, policy: RetryPolicy | None = None, throttle: Throttle | None = None) -> Download:
    return Download(
        "k", policy or RetryPolicy(), Meter(throttle), max_bytes=max_bytes, deadline=Deadline.after(1_000_000)
    )


def test_the_rest_is_appended_and_the_whole_starts_over():
    assert place(HELD, REST) == HELD
    assert place(Held(5, ETAG, None), REST) == HELD
    assert place(HELD, replace(REST, content_length="")) == HELD
    assert place(HELD, Answer(206, ETAG, "5", "bytes 5-9/20")) == HELD, "a server may send less than was asked for"
    assert place(HELD, replace(REST, status=200)) == HELD, "as rclone serve s3 has it"
    for held in (HELD, NOTHING):
        assert place(held, Answer(200, '"v2"', "30")) == Held(0, '"v2"', 30)
        assert place(held, Answer(200, 'W/"v2"', "")) == Held(0, None, None)


OTHERS: list[dict[str, str | int]] = [
    *({"etag": etag} for etag in ('"v2"', 'W/"v1"', "")),
    *({"content_range": found} for found in ("", "bytes 5-19/*", "bytes */20", "bytes 5-20/20", "bytes=5-19/20")),
    {"content_range": "bytes 4-19/20", "content_length": "16"},
    {"content_range": "bytes 6-19/20", "content_length": "14"},
    {"content_range": "bytes 5-20/21", "content_length": "16"},
    {"content_length": "14"},
    {"status": 200, "content_range": "bytes 0-4/20", "content_length": "5"},
    *({"status": status} for status in (412, 416)),
]


@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_anything_else_is_thrown_away(fields):
    assert isinstance(place(HELD, replace(REST, **fields)), Mismatch)
    for held in (NOTHING, Held(5, None, 20), Held(0, ETAG, 20)):
        assert isinstance(place(held, REST), Mismatch), "a part nobody asked for"
        assert isinstance(place(held, replace(REST, status=200)), Mismatch)


@given(
    held=st.builds(Held, st.integers(0, 30), st.sampled_from([None, '"a"', '"b"']), st.none() | st.integers(0, 30)),
    answer=st.builds(
        Answer,
        st.sampled_from([200, 206, 206, 206, 412, 416]),
        st.sampled_from(["", '"a"', '"b"', 'W/"a"', "a"]),
        st.sampled_from(["", "7", "junk", "-1"]) | st.integers(0, 30).map(str),
        st.just("") | st.builds(lambda a, b, c: f"bytes {a}-{b}/{c}", *[st.integers(0, 30)] * 3),
    ),
)
def test_only_the_very_next_bytes_of_the_very_same_object_are_appended(held, answer):
    placed = place(held, answer)
    if isinstance(placed, Mismatch) or placed.size_bytes == 0:
        return
    first, last, total = (int(part) for part in answer.content_range[6:].replace("/", "-").split("-"))
    assert (placed.size_bytes, placed.etag) == (held.size_bytes, held.etag)
    assert answer.etag == held.etag
    assert first == held.size_bytes <= last < total == placed.total_bytes
    assert held.total_bytes in (None, total)


VERSIONS = [bytes([number]) * size for number, size in ((1, 40), (2, 40), (3, 55), (4, 0), (5, 7))]
MANNERS = ["honest", "ignores ranges", "weak", "no length", "other start", "other total", "no ETag", "as 200", "416"]
STEPS = st.tuples(st.integers(0, len(VERSIONS) - 1), st.sampled_from(MANNERS), st.integers(-3, 3), st.floats(0, 1))
"""How a server answers once: with which version, how, by how much it is wrong, and what share of the body it sends."""


def answered(version: int, manner: str, shift: int, held: Held) -> tuple[Answer, bytes]:
    """What a server in that manner answers to a request for the rest of what is held, or else for the whole."""
    body, etag = VERSIONS[version], f'"v{version}"'
    first = held.size_bytes
    if held.resumable_etag is None or manner == "ignores ranges" or held.resumable_etag != etag:
        weak = f"W/{etag}" if manner == "weak" else etag
        return Answer(200, weak, "" if manner == "no length" else str(len(body))), body
    if manner == "416" or first >= len(body):
        return Answer(416, etag), b"error"
    if manner == "other start":
        first = min(max(0, first + shift), len(body) - 1)
    total = len(body) + (shift if manner == "other total" else 0)
    last = max(first, len(body) - 1)
    status = 200 if manner == "as 200" else 206
    sent_etag = {"weak": f"W/{etag}", "no ETag": ""}.get(manner, etag)
    return Answer(status, sent_etag, "", f"bytes {first}-{last}/{total}"), body[first:]


@pytest.mark.slow
@given(steps=st.lists(STEPS, max_size=12), last=st.integers(0, len(VERSIONS) - 1))
def test_the_body_is_one_version_of_the_object(steps, last):
    """Cut anywhere, replaced at any time, answered in any manner that can be told from an honest one."""
    download = fresh()
    for version, manner, shift, share in [*steps, *[(last, "honest", 0, 1.0)] * 3]:
        answer, body = answered(version, manner, shift, download.held)
        sent = body[: round(len(body) * share)]
        ended = len(sent) == len(body)
        try:
            download.begin(answer)
            for offset in range(0, len(sent), 6):
                download.append(sent[offset : offset + 6])
            if not ended:
                continue  # The connection was cut, which the client library notices.
            assert download.finish() == VERSIONS[version]
        except TransientError:
            continue
        return
    raise AssertionError("three honest answers did not do")


def test_lengths_are_held_to():
    download = fresh()
    download.begin(Answer(200, ETAG, "5"))
    download.append(b"123")
    with pytest.raises(TransientError, match="expected 5 bytes, 3 came"):
        download.finish()
    with pytest.raises(TransientError, match="expected 5 bytes, 6 or more came"):
        download.append(b"456")
    assert download.held == NOTHING
    download = fresh()
    download.begin(Answer(200, ETAG, "100"))
    download.append(b"1" * 60)
    download.begin(Answer(200, '"v2"', "3"))
    download.append(b"abc")
    assert download.finish() == b"abc"
    assert download.moved_bytes == 60
    with pytest.raises(StoreError, match="at most 10 bytes, found 11"):
        fresh(10).begin(Answer(200, ETAG, "11"))
    download = fresh(10)
    download.begin(Answer(200, ETAG))
    download.append(bytes(10))
    with pytest.raises(StoreError, match="at most 10 bytes, found 11"):
        download.append(b"1")


def test_bytes_and_time_in_the_throttle_earn_time_once():
    # At a byte a second: what comes again earns nothing.
    download = fresh(policy=RetryPolicy(slowest_bytes_per_s=0.001))
    start_s = download.remaining_s()
    for size, furthest in ((60, 60), (40, 60), (70, 70), (70, 70)):
        download.begin(Answer(200, 'W/"v"', "100"))
        download.append(bytes(size))
        assert download.moved_bytes == furthest
        assert download.remaining_s() - start_s == pytest.approx(furthest / 0.001, abs=900)
    # 100 bytes/s: the slowest rate counted with is half of that, and 1,000 bytes wait 10 s.
    throttle = Throttle(100, burst_bytes=1e-9, clock=lambda: 0.0, sleep=lambda seconds: None)
    download = fresh(policy=RetryPolicy(slowest_bytes_per_s=1e9), throttle=throttle)
    start_s = download.remaining_s()
    download.begin(Answer(200, 'W/"v"', "1000000"))
    download.append(bytes(100_000))
    earned_s = 100_000 / 50 + 100_000 / 100
    assert download.remaining_s() - start_s == pytest.approx(earned_s, abs=900)


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
    [('"a-1"', '"a-1"', '"a-1"'), ('W/"a-1"', None, '"a-1"'), ("a-1", None, '"a-1"')]
    + [(value, None, None) for value in ('w/"a"', '""', 'W/""', "", '"a" "b"', '"a')],
)
def test_etags(value, strong, opaque):
    assert strong_etag(value) == strong
    assert opaque_etag(value) == opaque


def test_retry_after_in_both_forms():
    assert parse_retry_after_s("120") == 120.0
    later = datetime.now(UTC) + timedelta(hours=1)
    assert parse_retry_after_s(format_datetime(later, usegmt=True)) == pytest.approx(3600, abs=600)
    assert parse_retry_after_s(format_datetime(later - timedelta(days=1), usegmt=True)) == 0.0
    beyond_the_calendar = "Fri, 31 Dec 9999 23:59:59 -0100"
    for junk in ("", "soon", "-5", "Fri, 99 Foo 2026 99:99:99 GMT", "1" * 400, beyond_the_calendar):
        assert parse_retry_after_s(junk) is None


@given(st.text(max_size=40))
def test_no_header_is_an_error(value):
    for parse in (parse_content_range, parse_size, strong_etag, opaque_etag, parse_date, parse_retry_after_s):
        parse(value)
