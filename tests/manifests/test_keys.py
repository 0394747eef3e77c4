"""Keys stay inside the store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests import InvalidDocumentError, check_key, packed_key, segment_key, shard_key, vocabulary_key
from tests.support.contract_strategies import DIGESTS, KEYS


@pytest.mark.slow
@given(KEYS)
def test_keys_are_accepted_as_they_are(key: str) -> None:
    assert check_key(key) == key


@given(number=st.integers(0, 2**53), digest=DIGESTS)
def test_the_keys_of_a_store_are_keys(number: int, digest: str) -> None:
    for key in (shard_key(number), packed_key(number), segment_key(number, digest), vocabulary_key(digest)):
        assert check_key(key) == key


@given(st.text())
def test_no_key_climbs_out(key: str) -> None:
    try:
        check_key(key)
    except InvalidDocumentError as error:
        assert len(str(error)) < 300
        return
    parts = key.split("/")
    assert all(part and not part.startswith(".") for part in parts)
    assert key.isascii()
    assert key.isprintable()
    assert not set(key) & set("\\:?*%~ ")


@pytest.mark.parametrize(
    "key",
    [
        *("", "/a", "a/", "a//b", "..", "a/..", "../a", "a/../b", ".hidden", "a/.b", "~/a", "-rf"),
        *("a b", "é", "s3://a/b", "a?b", "%2e%2e/a"),
        "C:\\a",
        "a\\b",
        "a\n",
        "a\0",
        "a" * 513,
    ],
)
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(InvalidDocumentError, match="expected an object key"):
        check_key(key)


def test_the_longest_key() -> None:
    assert check_key("a" * 512)


def test_names_of_the_format_page() -> None:
    assert shard_key(42) == "shard_42.pt"
    assert packed_key(42) == "packed/shard_42.zst"
    assert segment_key(3, "0123456789abcdef" * 4) == "index/segment_00003-0123456789abcdef.json"
    assert segment_key(123_456, "f" * 64) == "index/segment_123456-ffffffffffffffff.json"
    assert vocabulary_key("0123456789abcdef" * 4) == "vocabulary/0123456789abcdef.json"
