"""`NeuroTokenizer`: texts come back, ids keep their meaning, files are refused or loaded; exports give our ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.load
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from genesis.errors import (
    InvalidTextError,
    StoreAccessError,
    StoreError,
    TokenizerError,
    VocabularyMismatchError,
)
from genesis.tokenizer import NeuroTokenizer, export_tokenizer, hf_tokenizer_json
from manifests import BYTE_OFFSET, FIRST_MERGE_ID, SPECIAL_TOKENS, VocabularyFile
from manifests.errors import ContractError, UnsupportedFormatError
from tests.support.documents import adversarial_strings


def as_object(tokenizer: NeuroTokenizer) -> dict[str, object]:
    value: dict[str, object] = json.loads(tokenizer.to_file().to_json())
    return value


@given(st.text(st.characters(exclude_categories=["Cs"])), st.binary())
def test_text_and_bytes_come_back(trained, text, data):
    assert trained.decode(trained.encode(text)) == text
    ids = trained.encode(data)
    assert trained.decode_bytes(ids) == data
    assert trained.decode(ids) == data.decode(errors="replace")


def test_strings_bytes_and_batches_have_the_same_ids(trained, python_sources):
    text = "naïve café 世界"
    np.testing.assert_array_equal(trained.encode(text), trained.encode(text.encode()))
    ids, offsets = trained.encode_batch([text, text.encode(), bytearray(text.encode())])
    assert offsets.tolist() == [0, len(ids) // 3, 2 * len(ids) // 3, len(ids)]
    ids, offsets = trained.encode_batch(python_sources[:20])
    for order, text in enumerate(python_sources[:20]):
        np.testing.assert_array_equal(ids[offsets[order] : offsets[order + 1]], trained.encode(text))


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff", "a\udc80b"])
def test_a_lone_surrogate_is_refused(text, trained):
    with pytest.raises(InvalidTextError, match=r"text 1: expected valid Unicode, found the lone surrogate '\\ud"):
        trained.encode_batch(["good", text])
    with pytest.raises(InvalidTextError, match="text 1"):
        trained.learn_merges(["good", text], 10, source="s")


@pytest.mark.parametrize("wrong", [-1, 266, 2**31])
def test_an_id_outside_the_vocabulary_is_refused(wrong):
    with pytest.raises(InvalidTextError, match=rf"expected ids of 0…265, found {wrong}"):
        NeuroTokenizer.empty().decode([107, wrong])


def test_an_empty_vocabulary_is_the_bytes_and_special_tokens_are_dropped(trained):
    tokenizer = NeuroTokenizer.empty()
    assert tokenizer.current_vocab_size == tokenizer.next_merge_id == FIRST_MERGE_ID
    assert tokenizer.encode("é<").tolist() == [BYTE_OFFSET + byte for byte in "é<".encode()]
    assert tokenizer.merges == []
    ids = [1, *trained.encode("a document").tolist(), 2, 0, 9]
    assert trained.decode(ids) == "a document"
    assert trained.decode([]) == ""
    with pytest.raises(UnsupportedFormatError, match="install a newer release"):
        NeuroTokenizer.from_bytes(b'{"format": 7}')


def test_saved_is_loaded_and_a_failure_leaves_the_old_file(trained, tmp_path):
    path = tmp_path / "new" / "tokenizer.json"
    trained.save(path)
    loaded = NeuroTokenizer.load(path)
    assert loaded.to_file() == trained.to_file()
    assert loaded.sources_contributed == {"python-docs": 1500}
    assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]
    with pytest.raises(StoreAccessError, match="cannot write"):
        trained.save(path / "below-a-file.json")
    assert NeuroTokenizer.load(path).next_merge_id == trained.next_merge_id
    with pytest.raises(StoreError, match=r"cannot read .*/absent\.json: No such file"):
        NeuroTokenizer.load(tmp_path / "absent.json")


def test_a_corrupt_file_is_refused_with_one_line(tmp_path):
    """`tests/manifests` has the many ways a file is corrupt."""
    value = as_object(NeuroTokenizer.empty()) | {"merges": {"107-107": 266}, "next_merge_id": 267}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(value))
    for read in (lambda: NeuroTokenizer.load(path), lambda: NeuroTokenizer.empty().update_from_dict(value)):
        with pytest.raises(ContractError, match="expected a merge such as '266_111'") as refused:
            read()
        assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_growth_keeps_old_ids_and_what_was_encoded_with_them(trained, python_sources):
    grown = NeuroTokenizer.from_file(trained.to_file())
    old_ids = grown.encode(python_sources[70])
    added = grown.learn_merges(python_sources[60:100], 400, source="more")
    assert added == 400
    assert grown.merges[:1500] == trained.merges
    assert grown.current_vocab_size == grown.next_merge_id == trained.next_merge_id + 400
    assert grown.decode_bytes(old_ids) == python_sources[70]
    assert len(grown.encode(python_sources[70])) < len(old_ids)
    assert grown.sources_contributed == {"python-docs": 1500, "more": 400}
    assert trained.sources_contributed == {"python-docs": 1500}


def test_a_source_that_adds_nothing_and_the_cap():
    tokenizer = NeuroTokenizer.empty()
    assert tokenizer.learn_merges(["no two"], 5, source="small") == 0
    assert tokenizer.sources_contributed == {"small": 0}
    full = VocabularyFile.from_pairs([], {}).model_copy(update={"vocab_size": FIRST_MERGE_ID + 2})
    tokenizer = NeuroTokenizer.from_file(full)
    assert tokenizer.learn_merges(["abcdef " * 9], 10, source="s") == 2
    assert tokenizer.learn_merges(["abcdef " * 9], 10, source="s") == 0
    assert tokenizer.next_merge_id == tokenizer.to_file().vocab_size == FIRST_MERGE_ID + 2


def test_a_newer_file_is_taken_over_and_an_older_one_changes_nothing(trained):
    old = NeuroTokenizer.from_file(VocabularyFile.from_pairs(list(trained.merges[:700]), {"python-docs": 700}))
    before = old.encode("def function(self): return None")
    assert old.update_from_dict(as_object(trained))
    assert old.to_file() == trained.to_file()
    assert old.decode(before) == "def function(self): return None"
    np.testing.assert_array_equal(old.encode("import os"), trained.encode("import os"))
    tokenizer = NeuroTokenizer.from_file(trained.to_file())
    assert not tokenizer.update_from_dict(as_object(trained))
    assert not tokenizer.update_from_dict(as_object(NeuroTokenizer.empty()))
    assert tokenizer.to_file() == trained.to_file()


def test_a_file_of_another_lineage_is_refused(trained):
    tokenizer = NeuroTokenizer.from_file(trained.to_file())
    pairs = list(trained.merges)
    pairs[3] = (250, 251)
    other = NeuroTokenizer.from_file(VocabularyFile.from_pairs([*pairs, (252, 253)], {}))
    left, right = trained.merges[3]
    with pytest.raises(VocabularyMismatchError, match=f"for id 269: 250_251 instead of {left}_{right}"):
        tokenizer.update_from_dict(as_object(other))
    assert tokenizer.to_file() == trained.to_file()


NAMED = "a <|eos|><|pad|> and <|reserved_4|>"


@pytest.fixture(scope="module")
def hf_folder(trained: NeuroTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    paths = export_tokenizer(trained.to_file(), "hf", folder)
    assert paths == [folder / "hf" / "tokenizer.json", folder / "hf" / "tokenizer_config.json"]
    return folder / "hf"


@pytest.mark.slow
def test_transformers_gives_our_ids(hf_folder, trained):
    theirs = PreTrainedTokenizerFast.from_pretrained(hf_folder)
    for text in [*adversarial_strings(500, seed=7), " leading", "trailing ", "it 's , n't . spaced !", NAMED]:
        ids = theirs(text)["input_ids"]
        assert ids == trained.encode(text).tolist()
        assert theirs.decode(ids) == text


def test_transformers_knows_the_special_tokens_whose_names_in_text_are_text(hf_folder, trained, tmp_path):
    theirs = AutoTokenizer.from_pretrained(hf_folder)
    named = (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id)
    assert named == (0, 1, 2, 3)
    assert theirs.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(BYTE_OFFSET))
    assert len(theirs) == trained.current_vocab_size
    ids = theirs("text")["input_ids"]
    assert theirs.decode([1, *ids, 2, 0], skip_special_tokens=True) == "text"
    assert theirs(["a", "a longer text"], padding=True)["input_ids"][0][-1] == 0
    PreTrainedTokenizerFast.from_pretrained(hf_folder).save_pretrained(tmp_path)
    for folder in (hf_folder, tmp_path):
        ids = PreTrainedTokenizerFast.from_pretrained(folder)(NAMED)["input_ids"]
        assert min(ids) >= BYTE_OFFSET
    parsing = PreTrainedTokenizerFast.from_pretrained(hf_folder, split_special_tokens=False)
    assert parsing("<|bos|>a<|eos|>")["input_ids"] == [1, 107, 2]


def test_tiktoken_gives_our_ids(trained, tmp_path):
    paths = export_tokenizer(trained.to_file(), "tiktoken", tmp_path)
    description = json.loads((tmp_path / "tiktoken" / "genesis.json").read_bytes())
    ranks = tmp_path / "tiktoken" / description["ranks"]
    assert paths == [ranks, tmp_path / "tiktoken" / "genesis.json"]
    digest = hashlib.sha256(ranks.read_bytes()).hexdigest()
    encoding = tiktoken.Encoding(
        description["name"],
        pat_str=description["pat_str"],
        mergeable_ranks=tiktoken.load.load_tiktoken_bpe(str(ranks), expected_hash=digest),
        special_tokens=description["special_tokens"],
    )
    assert encoding.n_vocab == trained.current_vocab_size
    for text in [*adversarial_strings(500, seed=8), NAMED]:
        assert encoding.encode_ordinary(text) == trained.encode(text).tolist()
    assert encoding.encode("<|eos|>", allowed_special="all") == [2]


def test_what_cannot_be_exported(trained, tmp_path):
    ids = [BYTE_OFFSET + byte for byte in b"<|eos|>"]
    pairs = [(ids[0], ids[1]), *((265 + order, byte) for order, byte in enumerate(ids[2:], start=1))]
    with pytest.raises(TokenizerError, match=r"found '<\|eos\|>'"):
        hf_tokenizer_json(VocabularyFile.from_pairs(pairs, {}))
    (tmp_path / "hf").write_text("a file in the way")
    with pytest.raises(StoreAccessError, match=r"hf/tokenizer\.json"):
        export_tokenizer(trained.to_file(), "hf", tmp_path)
