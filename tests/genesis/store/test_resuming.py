"""Putting a body together from several answers: whatever a server does, the result is one version of the object."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import StoreError
from genesis.store import RetryPolicy, Throttle
from genesis.store.download import Download
from genesis.store.policy import Deadline
from genesis.store.resuming import NOTHING, Answer, Held, Mismatch, place
from genesis.store.retrying import TransientError
from genesis.store.throttle import Meter

ETAG = '"v1"'
HELD = Held(5, ETAG, 20)
REST = Answer(206, ETAG, "15", "bytes 5-19/20")


def fresh(max_bytes: int = 1 << 20, policy: RetryPolicy | None = None, throttle: Throttle | None = None) -> Download:
    return Download(
        "k", policy or RetryPolicy(), Meter(throttle), max_bytes=max_bytes, deadline=Deadline.after(1_000_000)
    )


def test_the_rest_is_appended():
    assert place(HELD, REST) == HELD
    assert place(Held(5, ETAG, None), REST) == HELD
    assert place(HELD, replace(REST, content_length="")) == HELD
    assert place(HELD, Answer(206, ETAG, "5", "bytes 5-9/20")) == HELD, "a server may send less than was asked for"
    assert place(HELD, replace(REST, status=200)) == HELD, "as rclone serve s3 has it"


def test_the_whole_starts_over():
    for held in (HELD, NOTHING):
        assert place(held, Answer(200, '"v2"', "30")) == Held(0, '"v2"', 30)
        assert place(held, Answer(200, 'W/"v2"', "")) == Held(0, None, None)


@pytest.mark.parametrize(
    "answer",
    [
        replace(REST, etag='"v2"'),
        replace(REST, etag='W/"v1"'),
        replace(REST, etag=""),
        replace(REST, content_range=""),
        replace(REST, content_range="bytes 4-19/20", content_length="16"),
        replace(REST, content_range="bytes 6-19/20", content_length="14"),
        replace(REST, content_range="bytes 5-20/21", content_length="16"),
        replace(REST, content_range="bytes 5-19/*"),
        replace(REST, content_range="bytes */20"),
        replace(REST, content_range="bytes 5-20/20"),
        replace(REST, content_range="bytes=5-19/20"),
        replace(REST, content_length="14"),
        replace(REST, status=200, content_range="bytes 0-4/20", content_length="5"),
        replace(REST, status=412),
        replace(REST, status=416),
    ],
)
def test_anything_else_is_thrown_away(answer):
    assert isinstance(place(HELD, answer), Mismatch)


@pytest.mark.parametrize("held", [NOTHING, Held(5, None, 20), Held(0, ETAG, 20)])
def test_a_part_nobody_asked_for(held):
    assert isinstance(place(held, REST), Mismatch)
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


@dataclass(frozen=True, slots=True)
class Step:
    """How a server answers once: with which version, how, and how much of the body."""

    version: int
    manner: str
    share: float
    shift: int


VERSIONS = [bytes([number]) * size for number, size in ((1, 40), (2, 40), (3, 55), (4, 0), (5, 7))]
MANNERS = ["honest", "ignores ranges", "weak", "no length", "other start", "other total", "no ETag", "as 200", "416"]
STEPS = st.builds(
    Step, st.integers(0, len(VERSIONS) - 1), st.sampled_from(MANNERS), st.floats(0, 1), st.integers(-3, 3)
)


def answered(step: Step, held: Held) -> tuple[Answer, bytes]:
    """What a server in that manner answers to a request for the rest of what is held, or else for the whole."""
    body, etag = VERSIONS[step.version], f'"v{step.version}"'
    first = held.size_bytes
    if held.resumable_etag is None or step.manner == "ignores ranges" or held.resumable_etag != etag:
        weak = f"W/{etag}" if step.manner == "weak" else etag
        return Answer(200, weak, "" if step.manner == "no length" else str(len(body))), body
    if step.manner == "416" or first >= len(body):
        return Answer(416, etag), b"error"
    if step.manner == "other start":
        first = min(max(0, first + step.shift), len(body) - 1)
    total = len(body) + (step.shift if step.manner == "other total" else 0)
    last = max(first, len(body) - 1)
    status = 200 if step.manner == "as 200" else 206
    sent_etag = {"weak": f"W/{etag}", "no ETag": ""}.get(step.manner, etag)
    return Answer(status, sent_etag, "", f"bytes {first}-{last}/{total}"), body[first:]


@pytest.mark.slow
@given(steps=st.lists(STEPS, max_size=12), last=st.integers(0, len(VERSIONS) - 1))
def test_the_body_is_one_version_of_the_object(steps, last):
    """Cut anywhere, replaced at any time, answered in any manner that can be told from an honest one."""
    download = fresh()
    honest = Step(last, "honest", 1.0, 0)
    for step in [*steps, *[honest] * 3]:
        answer, body = answered(step, download.held)
        sent = body[: round(len(body) * step.share)]
        ended = len(sent) == len(body)
        try:
            download.begin(answer)
            for offset in range(0, len(sent), 6):
                download.append(sent[offset : offset + 6])
            if not ended:
                continue  # The connection was cut, which the client library notices.
            assert download.finish() == VERSIONS[step.version]
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


def test_a_shorter_object_after_a_longer_one():
    download = fresh()
    download.begin(Answer(200, ETAG, "100"))
    download.append(b"1" * 60)
    download.begin(Answer(200, '"v2"', "3"))
    download.append(b"abc")
    assert download.finish() == b"abc"
    assert download.moved_bytes == 60


def test_the_largest_size():
    with pytest.raises(StoreError, match="at most 10 bytes, found 11"):
        fresh(10).begin(Answer(200, ETAG, "11"))
    download = fresh(10)
    download.begin(Answer(200, ETAG))
    download.append(bytes(10))
    with pytest.raises(StoreError, match="at most 10 bytes, found 11"):
        download.append(b"1")


def test_a_length_that_is_a_lie_takes_little_memory():
    download = fresh(1 << 60)
    download.begin(Answer(200, ETAG, str(1 << 59)))
    download.append(b"1")
    assert download.held == Held(1, ETAG, 1 << 59)


def test_bytes_earn_time_once():
    """At a byte a second: what comes again earns nothing."""
    download = fresh(policy=RetryPolicy(slowest_bytes_per_s=0.001))
    start_s = download.remaining_s()
    for size, furthest in ((60, 60), (40, 60), (70, 70), (70, 70)):
        download.begin(Answer(200, 'W/"v"', "100"))
        download.append(bytes(size))
        assert download.moved_bytes == furthest
        assert download.remaining_s() - start_s == pytest.approx(furthest / 0.001, abs=900)


def test_time_in_the_throttle_is_given_back_once():
    """100 bytes/s: the slowest rate counted with is half of that, and 1,000 bytes wait 10 s."""
    throttle = Throttle(100, burst_bytes=1e-9, clock=lambda: 0.0, sleep=lambda seconds: None)
    download = fresh(policy=RetryPolicy(slowest_bytes_per_s=1e9), throttle=throttle)
    start_s = download.remaining_s()
    download.begin(Answer(200, 'W/"v"', "1000000"))
    download.append(bytes(100_000))
    earned_s = 100_000 / 50 + 100_000 / 100
    assert download.remaining_s() - start_s == pytest.approx(earned_s, abs=900)
    download.begin(Answer(200, 'W/"v"', "1000000"))
    download.append(bytes(100_000))
    assert download.remaining_s() - start_s == pytest.approx(earned_s, abs=900)


def test_a_body_costs_its_size_once():
    """The buffer becomes the body: no second copy, which a list of chunks would need."""
    import tracemalloc

    size, chunk = 8 << 20, bytes(1 << 16)
    download = fresh(size)
    tracemalloc.start()
    try:
        download.begin(Answer(200, ETAG, str(size)))
        for _ in range(size // len(chunk)):
            download.append(chunk)
        body = download.finish()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(body) == size
    assert peak_bytes < 1.1 * size
