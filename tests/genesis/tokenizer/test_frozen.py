"""Vocabularies made elsewhere: what is taken, which ids text gets, what they spell, and what encodes it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import InvalidTextError, TokenizerError, UsageError, VocabularyMismatchError
from genesis.tokenizer import (
    EncoderSpec,
    FrozenTokenizer,
    GigatokenEngine,
    HuggingFaceEngine,
    NeuroTokenizer,
    choose_encoder,
    import_vocabulary,
    read_tokenizer,
    refuse_growth,
)
from genesis.tokenizer.agreement import check_texts
from genesis.tokenizer.export import export_files
from genesis.tokenizer.frozen import encoding_form, ids_of, is_lossless
from manifests import FrozenVocabularyFile, InvalidDocumentError, UnsupportedFormatError, VocabularyFile
from tests.support.documents import UNICODE_17, adversarial_strings, documents
from tests.support.foreign_tokenizers import EOS, FORMS, MULTILINGUAL, foreign_json, reference, write_foreign

ROOT = Path(__file__).resolve().parents[3]
CORPUS = ROOT.parent / "shared" / "corpus" / "multilingual" / "multi.parquet"
FAST = {"gpt2": "gigatoken", "llama3": "gigatoken", "qwen": "gigatoken", "olmo": "gigatoken", "digits": "tokenizers"}
"""What encodes each form with gigatoken 0.10.0."""


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FrozenVocabularyFile]:
    folder = tmp_path_factory.mktemp("foreign")
    return {name: import_vocabulary(str(write_foreign(folder / name, name))) for name in FORMS}


@pytest.fixture(scope="module")
def encoders(vocabularies: dict[str, FrozenVocabularyFile]) -> dict[str, EncoderSpec]:
    return {name: choose_encoder(vocabulary) for name, vocabulary in vocabularies.items()}


def assert_ids(encoder: EncoderSpec, name: str, texts: list[str]) -> None:
    """Ids document by document, in one batch as a worker encodes it."""
    engine = GigatokenEngine(encoder.hf_json) if encoder.name == "gigatoken" else HuggingFaceEngine(encoder.hf_json)
    ids, offsets = engine.encode_batch([text.encode() for text in texts])
    expected = reference(name)
    for order, text in enumerate(texts):
        assert ids[offsets[order] : offsets[order + 1]].tolist() == expected(text), repr(text[:200])


@pytest.mark.parametrize("name", FORMS)
def test_ids_are_those_of_tokenizers_document_by_document(encoders, name):
    texts = [*documents(seed=5, count=100), *adversarial_strings(600, seed=4), MULTILINGUAL, "", " ", "a" * 5000]
    assert_ids(encoders[name], name, texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_ids_are_those_of_tokenizers_on_the_multilingual_corpus(encoders, name):
    if not CORPUS.is_file():
        pytest.skip("the corpus is not beside the checkout")
    assert_ids(encoders[name], name, pq.read_table(CORPUS, columns=["text"])["text"].to_pylist()[::3])


@pytest.mark.parametrize("name", FORMS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=sorted(UNICODE_17)), max_size=40))
def test_any_text_has_the_ids_of_tokenizers_and_comes_back(encoders, vocabularies, name, text):
    assert_ids(encoders[name], name, [text])
    decoded = FrozenTokenizer(vocabularies[name]).decode(reference(name)(text))
    assert decoded == (unicodedata.normalize("NFC", text) if name == "qwen" else text)


@pytest.mark.parametrize("name", FORMS)
def test_the_engine_is_the_fast_one_where_it_agrees_and_the_log_says_which(vocabularies, name, caplog):
    with caplog.at_level(logging.INFO, "genesis"):
        encoder = choose_encoder(vocabularies[name])
    assert encoder.name == FAST[name]
    assert f"encoded by {FAST[name]}" in caplog.messages[-1]
    assert f"EOS {EOS[name]} ({vocabularies[name].eos_id})" in caplog.messages[-1]
    assert (encoder.eos_id, encoder.is_frozen) == (vocabularies[name].eos_id, True)


def test_an_engine_that_gives_other_ids_is_not_taken(vocabularies, caplog, monkeypatch):
    """One that is right about everything but a single check text."""
    real = GigatokenEngine.encode_batch

    def almost(self: GigatokenEngine, texts: list[bytes]) -> Any:
        return real(self, [b"x" if text == b"'s\xe2\x80\x83" else text for text in texts])

    monkeypatch.setattr(GigatokenEngine, "encode_batch", almost)
    with caplog.at_level(logging.INFO, "genesis"):
        assert choose_encoder(vocabularies["gpt2"]).name == "tokenizers"
    assert 'gives other ids for "\'s\\u2003"' in caplog.messages[-1]


def test_our_own_vocabulary_is_encoded_by_gigatoken():
    own = NeuroTokenizer.empty().to_file()
    encoder = choose_encoder(own)
    assert (encoder.name, encoder.eos_id, encoder.is_frozen) == ("gigatoken", 2, False)


@pytest.mark.parametrize("name", FORMS)
def test_a_document_that_spells_special_tokens_is_bytes(encoders, vocabularies, name):
    vocabulary = vocabularies[name]
    form = json.loads(vocabulary.tokenizer_json)
    special = {token["content"]: token["id"] for token in form["added_tokens"] if token["special"]}
    assert vocabulary.eos.token in special
    text = "".join(f"a {token}b{token}{token} \n{token}" for token in special)
    ids = FrozenTokenizer(vocabulary).encode(text)
    assert not set(special.values()) & set(ids.tolist())
    assert FrozenTokenizer(vocabulary).decode_bytes(ids) == text.encode()
    assert_ids(encoders[name], name, [text])


def test_added_tokens_that_are_not_special_are_matched(vocabularies):
    """OLMo's runs of spaces are how its models read code; Qwen's <tool_call> is a token of its text."""
    qwen = FrozenTokenizer(vocabularies["qwen"])
    assert qwen.encode("<tool_call>").tolist() == [vocabularies["qwen"].next_merge_id - 1]
    assert qwen.decode(qwen.encode("a<tool_call>b")) == "a<tool_call>b"
    assert len(FrozenTokenizer(vocabularies["olmo"]).encode("a" + " " * 8 + "b")) < 5


def test_special_tokens_spell_nothing_and_ids_beyond_are_refused(vocabularies):
    tokenizer = FrozenTokenizer(vocabularies["llama3"])
    ids = [*tokenizer.encode("a document").tolist(), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "a document"
    assert tokenizer.decode([]) == ""
    with pytest.raises(InvalidTextError, match=f"expected ids of 0…{tokenizer.next_merge_id - 1}, found"):
        tokenizer.decode([tokenizer.next_merge_id])
    with pytest.raises(InvalidTextError, match="lone surrogate"):
        tokenizer.encode("\ud800")
    with pytest.raises(InvalidTextError, match=r"expected UTF-8.* at byte 1"):
        tokenizer.encode(b"a\xff")


@pytest.mark.parametrize(("name", "lossless"), [("gpt2", True), ("llama3", True), ("olmo", True), ("qwen", False)])
def test_whether_text_comes_back_as_it_was_is_known(name, lossless):
    assert is_lossless(json.loads(foreign_json(name))) == lossless


def test_a_prefix_space_does_not_come_back():
    form = json.loads(foreign_json("gpt2"))
    form["pre_tokenizer"]["add_prefix_space"] = True
    assert not is_lossless(form)


def test_the_file_is_kept_verbatim_and_written_once(vocabularies, tmp_path):
    path = write_foreign(tmp_path, "qwen")
    vocabulary = vocabularies["qwen"]
    assert vocabulary.tokenizer_json == path.read_text(encoding="utf-8")
    assert import_vocabulary(str(tmp_path)) == vocabulary
    again = read_tokenizer(vocabulary.to_json())
    assert again.to_file() == vocabulary
    assert (
        again.next_merge_id
        == again.current_vocab_size
        == max(ids_of(json.loads(vocabulary.tokenizer_json)).values()) + 1
    )
    files = export_files(vocabulary, "hf")
    assert files["hf/tokenizer.json"] == path.read_bytes()
    assert json.loads(files["hf/tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    with pytest.raises(UsageError, match="expected an export to hf"):
        export_files(vocabulary, "tiktoken")


def test_a_changed_file_and_a_reader_of_the_other_kind_are_refused(vocabularies):
    vocabulary = vocabularies["gpt2"]
    value = vocabulary.to_object()
    with pytest.raises(InvalidDocumentError, match="tokenizer_sha256 is"):
        FrozenVocabularyFile.from_object({**value, "tokenizer_json": vocabulary.tokenizer_json + " "})
    with pytest.raises(InvalidDocumentError, match=r"eos\.id 5000 is not below next_merge_id"):
        FrozenVocabularyFile.from_object({**value, "eos": {"id": 5000, "token": "x"}})
    with pytest.raises(UnsupportedFormatError, match=r"found one made elsewhere .*read_tokenizer"):
        NeuroTokenizer.from_bytes(vocabulary.to_json())
    with pytest.raises(InvalidDocumentError, match="genesis populate --tokenizer"):
        read_tokenizer(vocabulary.tokenizer_json.encode())


def test_it_neither_learns_nor_grows(vocabularies):
    tokenizer = FrozenTokenizer(vocabularies["gpt2"])
    assert tokenizer.update_from_dict(vocabularies["gpt2"].to_object()) is False
    with pytest.raises(VocabularyMismatchError, match="which never changes"):
        tokenizer.update_from_dict(vocabularies["olmo"].to_object())
    with pytest.raises(UsageError, match="neither learns nor grows"):
        refuse_growth(tokenizer, "store")
    own = NeuroTokenizer.empty()
    assert refuse_growth(own, "store") is own


CONFIGS: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("gpt2", {}, None, "<|endoftext|>"),
    ("qwen", {"eos_token": "<|im_end|>"}, None, "<|im_end|>"),
    ("qwen", {"eos_token": {"content": "<|im_end|>", "special": True}}, None, "<|im_end|>"),
    ("qwen", {"eos_token": "<|im_end|>"}, "<|im_start|>", "<|im_start|>"),
    ("qwen", {"eos_token": None}, None, "<|endoftext|>"),
    ("llama3", {"eos_token": "<|of another|>"}, None, "<|end_of_text|>"),
    ("digits", {}, None, "</s>"),
]


@pytest.mark.parametrize(("name", "config", "asked", "expected"), CONFIGS)
def test_the_eos_is_the_one_asked_for_then_the_makers_then_a_usual_one(tmp_path, name, config, asked, expected):
    vocabulary = import_vocabulary(str(write_foreign(tmp_path, name, **config)), asked)
    assert vocabulary.eos.token == expected
    ids = {token["content"]: token["id"] for token in json.loads(foreign_json(name))["added_tokens"]}
    assert vocabulary.eos_id == ids[expected]


def test_the_other_special_tokens_are_the_makers(tmp_path):
    config = {"bos_token": "<|begin_of_text|>", "pad_token": "<|absent|>", "unk_token": None}
    vocabulary = import_vocabulary(str(write_foreign(tmp_path, "llama3", **config)))
    assert vocabulary.special_tokens.keys() == {"eos", "bos"}
    exported = json.loads(export_files(vocabulary, "hf")["hf/tokenizer_config.json"])
    assert (exported["bos_token"], exported["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")


def changed(**parts: Any) -> str:
    return json.dumps({**json.loads(foreign_json("gpt2")), **parts})


def with_model(**parts: Any) -> str:
    return changed(model={**json.loads(foreign_json("gpt2"))["model"], **parts})


def without(token: str) -> str:
    vocab = dict(json.loads(foreign_json("gpt2"))["model"]["vocab"])
    del vocab[token]
    return with_model(vocab=vocab)


REFUSED = [
    ("not JSON", "found no JSON"),
    ("[1]", "with a model in it"),
    (changed(model={"type": "Unigram", "vocab": [["a", 0.0]]}), "found a Unigram model"),
    (changed(model={"type": "WordPiece", "vocab": {"a": 0}}), "found a WordPiece model"),
    (with_model(byte_fallback=True), "byte_fallback"),
    (with_model(dropout=0.1), "dropout"),
    (with_model(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    (changed(pre_tokenizer=None), "the pre-tokenizer none"),
    (changed(pre_tokenizer={"type": "Metaspace"}), "the pre-tokenizer Metaspace"),
    (
        changed(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel"}]}
        ),
        "WhitespaceSplit throws text away",
    ),
    (
        changed(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": " "}, "behavior": "Removed", "invert": False},
                    {"type": "ByteLevel"},
                ],
            }
        ),
        "Split throws text away",
    ),
    (without("ÿ"), r"1 of the 256 bytes have no token \(0xff first\)"),
    (with_model(vocab={**json.loads(foreign_json("gpt2"))["model"]["vocab"], "twice": 7}), "found 7 given to two"),
    (with_model(vocab={**json.loads(foreign_json("gpt2"))["model"]["vocab"], "no": "id"}), "with ids, found TypeError"),
    (with_model(vocab={**json.loads(foreign_json("gpt2"))["model"]["vocab"], "far": 10**8}), "expected ids of 0 to"),
    (changed(added_tokens=[]), "name it by --eos"),
    (with_model(added="x" * 20_000_000), "save it without indentation"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_would_lose_text_or_ids_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((TokenizerError, UsageError), match=message) as refused:
        import_vocabulary(str(path))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_path_without_a_tokenizer_and_tokens_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--tokenizer: expected a tokenizer\.json, a folder .*no file .*gpt2"):
        import_vocabulary("gpt2")
    with pytest.raises(UsageError, match=r"no file .*tokenizer\.json"):
        import_vocabulary(str(tmp_path))
    path = write_foreign(tmp_path, "gpt2")
    with pytest.raises(UsageError, match="--eos <nowhere>: expected a token of"):
        import_vocabulary(str(path), "<nowhere>")
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: expected JSON"):
        import_vocabulary(str(path))


@pytest.mark.parametrize("eos", ["!", "Ġthe"])
def test_a_token_that_text_gives_is_no_eos(tmp_path, eos):
    vocabulary = import_vocabulary(str(write_foreign(tmp_path, "gpt2")), eos)
    with pytest.raises(TokenizerError, match=r"expected an EOS that text never gives, found .*name another"):
        choose_encoder(vocabulary)


def test_an_eos_that_its_maker_did_not_mark_as_special_is_bytes_in_text(tmp_path):
    form = json.loads(foreign_json("gpt2"))
    form["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(form), encoding="utf-8")
    vocabulary = import_vocabulary(str(tmp_path))
    encoder = choose_encoder(vocabulary)
    assert encoder.name == "gigatoken"
    assert vocabulary.eos_id not in FrozenTokenizer(vocabulary).encode("a<|endoftext|>b")
    assert vocabulary.eos_id not in GigatokenEngine(encoder.hf_json).encode_batch([b"a<|endoftext|>b"]).ids


def test_added_tokens_under_other_ids_than_tokenizers_gives_are_refused(tmp_path):
    form = json.loads(foreign_json("qwen"))
    form["added_tokens"][-1]["id"] += 100
    (tmp_path / "tokenizer.json").write_text(json.dumps(form), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"expected the id [0-9]+ for '<tool_call>'"):
        choose_encoder(import_vocabulary(str(tmp_path)))


def test_an_encoder_gets_nothing_that_adds_or_cuts(vocabularies):
    form = json.loads(encoding_form(vocabularies["llama3"]))
    assert form["post_processor"] is None and form["truncation"] is None and form["padding"] is None
    assert {token["content"] for token in form["added_tokens"]} >= {"<|end_of_text|>"}
    assert json.loads(encoding_form(vocabularies["llama3"], without_special=True))["added_tokens"] == []


def test_the_check_texts_are_the_same_each_time_and_of_many_scripts():
    texts = check_texts(("<|x|>",))
    check_texts.cache_clear()
    assert texts == check_texts(("<|x|>",))
    assert all(texts)
    assert b"a<|x|>b" in texts
    scripts = {
        unicodedata.name(character).split()[0]
        for text in texts[:120]
        for character in text.decode()
        if character.isalpha()
    }
    assert {"LATIN", "CYRILLIC", "ARABIC", "CJK", "HANGUL", "HIRAGANA", "DEVANAGARI", "THAI", "GREEK"} <= scripts
    assert 200_000 < sum(map(len, texts)) < 1_000_000
    assert not UNICODE_17 & {character for text in texts for character in text.decode()}


PLUGIN = r"""
from tiktoken_ext.openai_public import r50k_pat_str

CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    r"\s+(?!\S)|\s"
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    ]
)
TOKENS = [b"th", b"the", b" the", b"in", b"ing", b"aa", b"aaa", b"aaaa", b"  ", b"   ", b"\n\n", b" \n", b"\n ", b"12"]
TOKENS += [b"123", b"'s", b"'S", b"\xe4\xb8", b"\xe4\xb8\xad", b"a1", b"\r\n", b"\n  ", b"ab", b"abc", b"bc", b"ca"]
TOKENS += [b"cab", b"never reached by merges"]


def encoding(name, pattern):
    ranks = {bytes([byte]): 255 - byte for byte in range(256)}
    for token in TOKENS:
        ranks[token] = len(ranks)
    special = {"<|endoftext|>": len(ranks), "<|mark|>": len(ranks) + 5}
    return lambda: {"name": name, "pat_str": pattern, "mergeable_ranks": ranks, "special_tokens": special}


PATTERNS = {"tiny-r50k": r50k_pat_str, "tiny-cl100k": CL100K, "tiny-o200k": O200K, "tiny-words": r"\w+|\W+"}
ENCODING_CONSTRUCTORS = {name: encoding(name, pattern) for name, pattern in PATTERNS.items()}
"""

COMPARE = """
import json, sys
import tiktoken
from genesis.tokenizer import FrozenTokenizer, choose_encoder, import_vocabulary
from tests.support.documents import adversarial_strings

name = sys.argv[1]
vocabulary = import_vocabulary("tiktoken:" + name)
encoding, ours = tiktoken.get_encoding(name), FrozenTokenizer(vocabulary)
texts = [*adversarial_strings(1500, seed=9), "aaaaa aaa ab cabc abcab\\n  ", "<|endoftext|>", " \\n  \\n 1234"]
for text in texts:
    assert ours.encode(text).tolist() == encoding.encode_ordinary(text), repr(text)
    assert ours.decode(encoding.encode_ordinary(text)) == text
print(json.dumps([vocabulary.eos_id, vocabulary.eos.token, vocabulary.next_merge_id, vocabulary.origin,
    encoding.eot_token, choose_encoder(vocabulary).name]))
"""


def with_plugin(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, in which tiktoken has the encodings of `PLUGIN`."""
    (folder / "tiktoken_ext").mkdir(exist_ok=True)
    (folder / "tiktoken_ext" / "of_the_test.py").write_text(PLUGIN, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, text=True, capture_output=True, timeout=110, check=False,
        env={**os.environ, **environment, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tiny-r50k", marks=pytest.mark.slow),
        pytest.param("tiny-cl100k", marks=pytest.mark.slow),
        "tiny-o200k",
        "tiny-words",
    ],
)
def test_an_encoding_of_tiktoken_has_tiktokens_ids(tmp_path, name):
    done = with_plugin(tmp_path, "-c", COMPARE, name)
    assert done.returncode == 0, done.stderr
    eos_id, eos, next_merge_id, origin, eot, engine = json.loads(done.stdout)
    assert (eos, eos_id, origin) == ("<|endoftext|>", eot, f"tiktoken:{name}")
    assert next_merge_id == eos_id + 6
    assert engine in ("gigatoken", "tokenizers")


def test_encodings_that_are_not_there_cannot_be_had_or_expressed_are_refused(tmp_path):
    def refused(name: str, **environment: str) -> str:
        store = str(tmp_path / "store")
        arguments = ("-m", "genesis", "populate", "--source", "python-docs", "--store", store, "--tokenizer", name)
        done = with_plugin(tmp_path, *arguments, **environment)
        assert "Traceback" not in done.stderr
        assert done.returncode in (1, 2)
        return done.stderr

    assert "expected tiktoken: and one of" in refused("tiktoken:gpt-9")
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    message = refused("tiktoken:gpt2", TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"), **nowhere)
    assert "cannot get the files of 'gpt2' (ProxyError)" in message
    assert "run the same command with TIKTOKEN_CACHE_DIR=DIR" in message
    assert not (tmp_path / "store").exists()


def test_vocabulary_files_of_both_kinds_have_an_eos(vocabularies):
    assert VocabularyFile.from_pairs([], {}).eos_id == 2
    assert vocabularies["olmo"].eos_id == 0
    assert np.uint32(vocabularies["olmo"].eos_id) not in FrozenTokenizer(vocabularies["olmo"]).encode("any text")


def replacing(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "e"}, "content": content}


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        (changed(pre_tokenizer={"type": "Sequence", "pretokenizers": 5}), None, "pre-tokenizer"),
        (
            with_model(vocab={**json.loads(foreign_json("gpt2"))["model"]["vocab"], "\ud800": 2000}),
            None,
            "valid Unicode",
        ),
        (foreign_json("gpt2"), '{"a":' * 100_000, "expected JSON"),
        (changed(normalizer=replacing("e" * 100_000)), None, "a normalizer that can make text over 64 times as long"),
        (changed(normalizer={"type": "Sequence", "normalizers": [replacing("ee")] * 40}), None, "over 64 times"),
    ],
    ids=["no list", "surrogate", "deep", "long", "doubling"],
)
def test_hostile_files_are_one_line(tmp_path, text, config, message):
    (tmp_path / "tokenizer.json").write_text(text)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError, match=message):
        import_vocabulary(str(tmp_path))


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(TokenizerError, match="expected at most 128 MiB"):
        import_vocabulary(str(tmp_path))
