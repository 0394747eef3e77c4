"""Which paths name public objects, and conditional requests."""

from __future__ import annotations

import contextlib
from email.utils import formatdate
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.serve import ObjectKind, public_object
from genesis.serve.preconditions import Precondition, UnsatisfiableRangeError, evaluate, parse_range, range_applies
from genesis.store import CachePolicy
from manifests import check_key, packed_key, segment_key, shard_key, vocabulary_key

DIGEST = "0123456789abcdef" * 4
PUBLIC = {
    "manifest.json": ObjectKind.MANIFEST,
    "tokenizer.json": ObjectKind.TOKENIZER,
    shard_key(0): ObjectKind.SHARD,
    shard_key(599_999): ObjectKind.SHARD,
    packed_key(12): ObjectKind.PACKED,
    segment_key(3, DIGEST): ObjectKind.SEGMENT,
    segment_key(123_456, DIGEST): ObjectKind.SEGMENT,
    vocabulary_key(DIGEST): ObjectKind.VOCABULARY,
    "hf/tokenizer.json": ObjectKind.EXPORT,
    "tiktoken/genesis.tiktoken": ObjectKind.EXPORT,
}


@pytest.mark.parametrize(("key", "kind"), PUBLIC.items())
def test_the_layout_is_public(key, kind):
    found = public_object(f"/{key}".encode())
    assert found is not None
    assert (found.key, found.kind) == (key, kind)


def test_caching_absolute_urls_and_long_paths():
    brief = {key for key in PUBLIC if public_object(f"/{key}".encode()).cache is CachePolicy.SHORT}
    assert brief == {"manifest.json", "tokenizer.json", "hf/tokenizer.json", "tiktoken/genesis.tiktoken"}
    assert all(public_object(f"/{key}".encode()).cache is CachePolicy.IMMUTABLE for key in PUBLIC.keys() - brief)
    assert public_object(b"http://localhost:8080/manifest.json").key == "manifest.json"
    assert public_object(b"HTTPS://h/shard_3.pt").key == "shard_3.pt"
    assert public_object(b"/shard_" + b"1" * 1_000_000 + b".pt") is None


def test_nothing_else_is():
    """Nor what `test_http` asks a server for."""
    names = ("", "manifest.json", "http://host", "/Manifest.json", "/hf/a/b.json", "/hf/model.safetensors")
    shards = ("/shard_00.pt", "/shard_-1.pt", "/shard_.pt", "/shard_1.pt\n", "/shard_1.pt%0a", "/shard_%d9%a1.pt")
    segments = ("/index%5csegment_00000-0123456789abcdef.json", "/index/segment_00000-0123456789ABCDEF.json")
    for path in (*names, *shards, *segments):
        assert public_object(path.encode()) is None, path


@pytest.mark.slow
@given(st.sampled_from(sorted(PUBLIC)), st.randoms(use_true_random=False))
def test_escaping_changes_nothing(key, random):
    escaped = "".join(quote(char, safe="") if random.random() < 0.5 else char for char in key)
    hexed = "".join(f"%{ord(char):02X}" if random.random() < 0.3 and char != "%" else char for char in key)
    for path in (escaped, hexed):
        assert public_object(f"/{path}".encode()).key == key


@given(st.binary(max_size=80) | st.text(alphabet="/.%20e5cshard_pt019", max_size=40).map(str.encode))
def test_whatever_is_let_through_is_a_key_of_the_layout(path):
    found = public_object(b"/" + path)
    if found is not None:
        assert check_key(found.key) == found.key
        assert found.key != "checkpoints.json"
        assert not any(part.startswith(".") for part in found.key.split("/"))


ETAG = '"a-b-c"'
AT_S = 1_700_000_000
BEFORE, SAME, AFTER = (formatdate(AT_S + shift, usegmt=True) for shift in (-1, 0, 1))


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ({}, Precondition.SEND),
        ({"if-none-match": f"W/{ETAG}"}, Precondition.NOT_MODIFIED),
        ({"if-none-match": f'"x", W/"y" ,{ETAG}'}, Precondition.NOT_MODIFIED),
        ({"if-none-match": "*"}, Precondition.NOT_MODIFIED),
        ({"if-none-match": '"x"'}, Precondition.SEND),
        ({"if-none-match": '"x"', "if-modified-since": SAME}, Precondition.SEND),
        ({"if-modified-since": BEFORE}, Precondition.SEND),
        ({"if-modified-since": SAME}, Precondition.NOT_MODIFIED),
        ({"if-match": ETAG}, Precondition.SEND),
        ({"if-match": f"W/{ETAG}"}, Precondition.FAILED),
        ({"if-match": '"x"'}, Precondition.FAILED),
        ({"if-match": '"x"', "if-none-match": ETAG}, Precondition.FAILED),
        ({"if-match": ETAG, "if-unmodified-since": BEFORE}, Precondition.SEND),
        ({"if-unmodified-since": BEFORE}, Precondition.FAILED),
        ({"if-unmodified-since": SAME, "if-none-match": ETAG}, Precondition.NOT_MODIFIED),
        ({"if-unmodified-since": "1 Jan 99999999999 00:00:00 GMT"}, Precondition.SEND),
    ],
)
def test_the_order_of_the_rfc(headers, outcome):
    assert evaluate(headers, ETAG, AT_S) is outcome


@pytest.mark.parametrize("if_range", [None, ETAG, SAME, f"W/{ETAG}", '"x"', BEFORE, AFTER, "nonsense", ""])
def test_if_range(if_range):
    assert range_applies(if_range, ETAG, AT_S, now_s=AT_S + 3600) is (if_range in (None, ETAG, SAME))


def test_young_times_and_units_in_capitals():
    assert not range_applies(SAME, ETAG, AT_S, now_s=AT_S + 1)
    assert parse_range("Bytes= 3-5 ", 100).length == 3


@given(st.text(max_size=60))
def test_no_header_breaks_it(text):
    for name in ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since"):
        assert evaluate({name: text}, ETAG, AT_S) in Precondition
    assert range_applies(text, ETAG, AT_S, now_s=AT_S) in (True, False)
    for header in (text, f"bytes={text}"):
        with contextlib.suppress(UnsatisfiableRangeError):
            part = parse_range(header, 100)
            assert part is None or 0 <= part.first <= part.last < 100


sizes = st.integers(0, 300)
positions = st.integers(0, 400)


@given(sizes, st.none() | positions, st.none() | positions)
def test_a_range_is_a_slice(size, first, last):
    body = bytes(index % 251 for index in range(size))
    header = "bytes={}-{}".format(*("" if place is None else place for place in (first, last)))
    expected = body[-last:] if first is None and last else body[first : None if last is None else last + 1]
    if (first is None and last is None) or (None not in (first, last) and last < first):
        assert parse_range(header, size) is None
    elif not expected or (first is None and last == 0):
        with pytest.raises(UnsatisfiableRangeError):
            parse_range(header, size)
    else:
        part = parse_range(header, size)
        assert body[part.first : part.last + 1] == expected
        assert part.length == len(expected)
        assert part.content_range == f"bytes {part.first}-{part.last}/{size}"


def test_what_is_no_single_range_is_ignored():
    several = ("bytes=1-2,4-5", "bytes=1-2, bytes=3-4")
    numbers = ("a-b", "+1-2", "1--2", "0x1-2", "9" * 5000 + "-", "\u0661-\u0662")
    others = (f"bytes={number}" for number in numbers)
    for header in (None, "", "bytes", "bytes=", "bytes=-", "items=0-1", *several, *others):
        assert parse_range(header, 100) is None, header
