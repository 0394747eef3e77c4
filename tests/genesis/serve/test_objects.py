"""Which paths name public objects."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.serve import ObjectKind, public_object
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


def test_what_is_overwritten_is_cached_briefly():
    brief = {key for key in PUBLIC if public_object(f"/{key}".encode()).cache is CachePolicy.SHORT}
    assert brief == {"manifest.json", "tokenizer.json", "hf/tokenizer.json", "tiktoken/genesis.tiktoken"}
    assert all(public_object(f"/{key}".encode()).cache is CachePolicy.IMMUTABLE for key in PUBLIC.keys() - brief)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "manifest.json",
        "//manifest.json",
        "/manifest.json/",
        "/./manifest.json",
        "/index/../manifest.json",
        "/checkpoints.json",
        "/%63heckpoints.json",
        "/.genesis.lock",
        "/.tmp-1-2",
        "/shard_0.pt.part",
        "/shard_00.pt",
        "/shard_-1.pt",
        "/shard_.pt",
        "/shard_1.pt\n",
        "/shard_1.pt%0a",
        "/shard_1.pt%00",
        "/shard_%d9%a1.pt",
        "/Manifest.json",
        "/..%2fstore/manifest.json",
        "/index%5csegment_00000-0123456789abcdef.json",
        "/index/segment_00000-0123456789ABCDEF.json",
        "/hf/a/b.json",
        "/hf/.secret.json",
        "/hf/model.safetensors",
        "http://host",
        "http://host/checkpoints.json",
        "*",
    ],
)
def test_nothing_else_is(path):
    assert public_object(path.encode()) is None


def test_an_absolute_url_counts_by_its_path():
    assert public_object(b"http://localhost:8080/manifest.json").key == "manifest.json"
    assert public_object(b"HTTPS://h/shard_3.pt").key == "shard_3.pt"


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


def test_a_very_long_path_is_none():
    assert public_object(b"/shard_" + b"1" * 1_000_000 + b".pt") is None
