"""A vocabulary file is its list of merges: dense ids, each joining two that are there before it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import FIRST_MERGE_ID, MAX_VOCABULARY, PATTERN, ContractError, InvalidDocumentError, VocabularyFile
from manifests.serialisation import canonical_json
from tests.support.contract_strategies import merges, vocabularies

EMPTY = {"next_merge_id": 266, "merges": {}, "sources_contributed": {}}


@pytest.mark.slow
@settings(deadline=None)
@given(merges())
def test_pairs_survive(pairs: list[tuple[int, int]]) -> None:
    file = VocabularyFile.from_pairs(pairs, {"a": len(pairs)})
    assert VocabularyFile.from_json(file.to_json()).pairs() == pairs
    assert file.next_merge_id == FIRST_MERGE_ID + len(pairs)


@pytest.mark.slow
@settings(deadline=None)
@given(vocabularies(), st.data())
def test_the_order_in_the_file_does_not_matter(file: VocabularyFile, data: st.DataObject) -> None:
    value = file.to_object()
    shuffled = dict(data.draw(st.permutations(list(value["merges"].items()))))
    assert VocabularyFile.from_object({**value, "merges": shuffled}).pairs() == file.pairs()


@pytest.mark.parametrize(
    "merges",
    [
        {"10_11": 267},
        {"10_11": 265},
        {"10_11": -1},
        {"9_11": 266},
        {"10_266": 266},
        {"267_10": 266},
        {"10": 266},
        {"_": 266},
        {"10_": 266},
        {"10_11_12": 266},
        {"-10_11": 266},
        {" 10_11": 266},
        {"1e1_11": 266},
        {"１０_11": 266},
        {"10_11": 266.0},
        {"10_11": "266"},
        {"10_11": True},
        {"10_11": None},
        {"9" * 5000 + "_11": 266},
        {"010_11": 266},
    ],
)
def test_a_merge_that_is_none_is_refused(merges: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        VocabularyFile.from_json(canonical_json({**EMPTY, "next_merge_id": 267, "merges": merges})).pairs()


def test_the_same_id_twice_is_refused() -> None:
    value = {**EMPTY, "next_merge_id": 268, "merges": {"10_11": 266, "11_10": 266}}
    with pytest.raises(InvalidDocumentError, match="expected merge id 267"):
        VocabularyFile.from_object(value).pairs()


@pytest.mark.parametrize(
    "changes",
    [
        {"next_merge_id": 267},
        {"next_merge_id": 265},
        {"next_merge_id": MAX_VOCABULARY + 1},
        {"vocab_size": MAX_VOCABULARY + 1},
        {"vocab_size": 10},
        {"pattern": ".*"},
        {"merges": []},
        {"sources_contributed": {"a": -1}},
        {"sources_contributed": {"A B": 1}},
    ],
)
def test_hostile_vocabularies_are_refused(changes: dict[str, object]) -> None:
    assert VocabularyFile.from_object(EMPTY).pattern == PATTERN
    with pytest.raises(InvalidDocumentError, match=r"tokenizer\.json"):
        VocabularyFile.from_object({**EMPTY, **changes})
