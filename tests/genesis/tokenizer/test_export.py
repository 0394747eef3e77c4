"""Exports: other libraries read them and give our ids, also for text that spells a special token."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import tiktoken
import tiktoken.load
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from genesis.errors import StoreAccessError, TokenizerError, UsageError
from genesis.tokenizer import NeuroTokenizer, export_tokenizer, hf_tokenizer_config, hf_tokenizer_json, tiktoken_ranks
from manifests import BYTE_OFFSET, SPECIAL_TOKENS, VocabularyFile
from tests.support.texts import adversarial_strings

NAMED = "a <|eos|><|pad|> and <|reserved_4|>"


@pytest.fixture(scope="module")
def hf_folder(trained: NeuroTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    paths = export_tokenizer(trained.to_file(), "hf", folder)
    assert paths == [folder / "hf" / "tokenizer.json", folder / "hf" / "tokenizer_config.json"]
    return folder / "hf"


@pytest.mark.slow
def test_transformers_gives_our_ids(hf_folder: Path, trained: NeuroTokenizer) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(hf_folder)
    for text in [*adversarial_strings(500, seed=7), " leading", "trailing ", "it 's , n't . spaced !", NAMED]:
        ids = theirs(text)["input_ids"]
        assert ids == trained.encode(text).tolist()
        assert theirs.decode(ids) == text


def test_transformers_knows_the_special_tokens_whose_names_in_text_are_text(
    hf_folder: Path, trained: NeuroTokenizer, tmp_path: Path
) -> None:
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


def test_tiktoken_gives_our_ids(trained: NeuroTokenizer, tmp_path: Path) -> None:
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


def test_the_exported_files(trained: NeuroTokenizer) -> None:
    lines = tiktoken_ranks(trained.to_file()).splitlines()
    assert lines[0] == b"AA== 10"
    assert [int(line.split()[1]) for line in lines] == list(range(BYTE_OFFSET, trained.current_vocab_size))
    again = NeuroTokenizer.from_bytes(trained.to_file().to_json())
    for write in (hf_tokenizer_json, hf_tokenizer_config, tiktoken_ranks):
        assert write(trained.to_file()) == write(again.to_file())
    value = json.loads(hf_tokenizer_json(trained.to_file()))
    assert value["added_tokens"] == []
    assert [value["model"]["vocab"][name] for name in SPECIAL_TOKENS] == list(range(BYTE_OFFSET))


def test_what_cannot_be_exported(trained: NeuroTokenizer, tmp_path: Path) -> None:
    ids = [BYTE_OFFSET + byte for byte in b"<|eos|>"]
    pairs = [(ids[0], ids[1]), *((265 + order, byte) for order, byte in enumerate(ids[2:], start=1))]
    with pytest.raises(TokenizerError, match=r"found '<\|eos\|>'"):
        hf_tokenizer_json(VocabularyFile.from_pairs(pairs, {}))
    a, b, c = (BYTE_OFFSET + byte for byte in b"abc")
    vocabulary = VocabularyFile.from_pairs([(a, b), (b, c), (266, c), (a, 267)], {})
    for write in (hf_tokenizer_json, tiktoken_ranks):
        with pytest.raises(TokenizerError, match="ids 268 and 269"):
            write(vocabulary)
    with pytest.raises(UsageError, match="expected an export to hf or tiktoken, found 'onnx'"):
        export_tokenizer(trained.to_file(), "onnx", tmp_path)  # type: ignore[arg-type]
    (tmp_path / "hf").write_text("a file in the way")
    with pytest.raises(StoreAccessError, match=r"hf/tokenizer\.json"):
        export_tokenizer(trained.to_file(), "hf", tmp_path)
