"""A vocabulary file is its list of merges, and keys stay inside the store."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import (
    FIRST_MERGE_ID,
    MAX_VOCABULARY,
    PATTERN,
    ContractError,
    InvalidDocumentError,
    VocabularyFile,
    check_key,
    packed_key,
    segment_key,
    shard_key,
    vocabulary_key,
)
from manifests.serialisation import canonical_json
from tests.support.contract_strategies import DIGESTS, merges, vocabularies

EMPTY = {"next_merge_id": 266, "merges": {}, "sources_contributed": {}}


@pytest.mark.slow
@settings(deadline=None)
@given(merges())
def test_pairs_survive(pairs):
    file = VocabularyFile.from_pairs(pairs, {"a": len(pairs)})
    assert VocabularyFile.from_json(file.to_json()).pairs() == pairs
    assert file.next_merge_id == FIRST_MERGE_ID + len(pairs)


@pytest.mark.slow
@settings(deadline=None)
@given(vocabularies(), st.data())
def test_the_order_in_the_file_does_not_matter(file, data):
    value = file.to_object()
    shuffled = dict(data.draw(st.permutations(list(value["merges"].items()))))
    assert VocabularyFile.from_object({**value, "merges": shuffled}).pairs() == file.pairs()


NO_PAIRS = ("9_11", "10_266", "267_10", "10", "_", "10_", "10_11_12", "-10_11", " 10_11", "1e1_11", "１０_11", "010_11")


@pytest.mark.parametrize(
    "merges",
    [
        *({"10_11": number} for number in (267, 265, -1, 266.0, "266", True, None)),
        *({pair: 266} for pair in (*NO_PAIRS, "9" * 5000 + "_11")),
        {"10_11": 266, "11_10": 266},
    ],
)
def test_a_merge_that_is_none_is_refused(merges):
    value = {**EMPTY, "next_merge_id": 266 + len(merges), "merges": merges}
    with pytest.raises(ContractError, match="expected merge id 267" if len(merges) > 1 else None):
        VocabularyFile.from_json(canonical_json(value)).pairs()


HOSTILE: dict[str, list[object]] = {
    "next_merge_id": [267, 265, MAX_VOCABULARY + 1],
    "vocab_size": [MAX_VOCABULARY + 1, 10],
    "pattern": [".*"],
    "merges": [[]],
    "sources_contributed": [{"a": -1}, {"A B": 1}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in HOSTILE for value in HOSTILE[name]])
def test_hostile_vocabularies_are_refused(name, value):
    assert VocabularyFile.from_object(EMPTY).pattern == PATTERN
    with pytest.raises(InvalidDocumentError, match=r"tokenizer\.json"):
        VocabularyFile.from_object({**EMPTY, name: value})


@given(number=st.integers(0, 2**53), digest=DIGESTS)
def test_the_keys_of_a_store_are_keys(number, digest):
    for key in (shard_key(number), packed_key(number), segment_key(number, digest), vocabulary_key(digest)):
        assert check_key(key) == key


@given(st.text())
def test_no_key_climbs_out(key):
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
def test_what_is_no_key(key):
    with pytest.raises(InvalidDocumentError, match="expected an object key"):
        check_key(key)


def test_names_of_the_format_page():
    assert shard_key(42) == "shard_42.pt"
    assert packed_key(42) == "packed/shard_42.zst"
    assert segment_key(3, "0123456789abcdef" * 4) == "index/segment_00003-0123456789abcdef.json"
    assert segment_key(123_456, "f" * 64) == "index/segment_123456-ffffffffffffffff.json"
    assert vocabulary_key("0123456789abcdef" * 4) == "vocabulary/0123456789abcdef.json"
    assert check_key("a" * 512)
