"""The engines: equal ids on every text, any bytes back again, and memory that stays bounded."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import TokenizerError
from genesis.tokenizer import (
    EncodedBatch,
    GigatokenEngine,
    NeuroTokenizer,
    TiktokenEngine,
    hf_tokenizer_json,
    make_engine,
)
from genesis.tokenizer.engines import ENGINES, Engine
from genesis.tokenizer.learning import learn
from manifests import BYTE_OFFSET, VocabularyFile
from tests.support.documents import FRAGMENTS, UNICODE_17, adversarial_strings

fragments = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
strings = fragments | st.text(st.characters(exclude_categories=["Cs"], exclude_characters=sorted(UNICODE_17)))

NO_MERGES = VocabularyFile.from_pairs([], {})
TEN_MERGES = VocabularyFile.from_pairs(learn(NO_MERGES, [b"wordy words to tell the eos"] * 2, 10), {})


def assert_equal(left: EncodedBatch, right: EncodedBatch) -> None:
    np.testing.assert_array_equal(left.ids, right.ids)
    np.testing.assert_array_equal(left.offsets, right.offsets)


def by_hugging_face(vocabulary: VocabularyFile) -> Callable[[list[bytes]], EncodedBatch]:
    """Encodes as ``tokenizers`` does with the exported file."""
    tokenizer = tokenizers.Tokenizer.from_str(hf_tokenizer_json(vocabulary).decode())

    def encode(texts: list[bytes]) -> EncodedBatch:
        documents = [tokenizer.encode(text.decode(), add_special_tokens=False).ids for text in texts]
        ids = np.array([token_id for ids in documents for token_id in ids], dtype=np.uint32)
        return EncodedBatch(ids, np.cumsum([0, *map(len, documents)]))

    return encode


def assert_all_equal(vocabulary: VocabularyFile, texts: list[bytes]) -> None:
    fast = GigatokenEngine(hf_tokenizer_json(vocabulary)).encode_batch(texts)
    assert_equal(fast, TiktokenEngine(vocabulary).encode_batch(texts))
    assert_equal(fast, by_hugging_face(vocabulary)(texts))


@pytest.mark.slow
def test_engines_agree_on_source_code_adversarial_strings_and_every_plane(trained, python_sources):
    others = map(chr, [*range(0x10000, 0x20000), *range(0x20000, 0x110000, 16)])
    for texts in (
        python_sources[60:90],
        [text.encode() for text in adversarial_strings(5000, seed=2)],
        [CONTEXTS.replace("{c}", character).encode() for character in BASIC_PLANE if character not in UNICODE_17],
        [CONTEXTS.replace("{c}", character).encode() for character in others if character not in UNICODE_17],
    ):
        assert_all_equal(trained.to_file(), texts)


@pytest.mark.parametrize("vocabulary", [NO_MERGES, TEN_MERGES], ids=["no-merges", "ten-merges"])
def test_engines_agree_on_tiny_vocabularies(vocabulary):
    assert_all_equal(vocabulary, [text.encode() for text in [*adversarial_strings(300, seed=3), "a" * 1000, ""]])


CONTEXTS = "a{c}b {c}1{c}  {c}\n{c}'s"
BASIC_PLANE = [chr(point) for point in range(0x10000) if not 0xD800 <= point < 0xE000]


@pytest.fixture(scope="module")
def engines(trained: NeuroTokenizer) -> dict[str, Engine]:
    return {name: make_engine(name, trained.to_file()) for name in ENGINES}


@pytest.mark.slow
@pytest.mark.parametrize("engine", sorted(ENGINES))
@given(texts=st.lists(strings.map(str.encode) | st.binary(), max_size=6))
def test_engines_agree_and_any_bytes_come_back(engine, engines, trained, texts):
    ids, offsets = engines[engine].encode_batch(texts)
    assert (ids.dtype, offsets.dtype) == (np.uint32, np.int64)
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    assert not len(ids) or (ids.min() >= BYTE_OFFSET and ids.max() < trained.current_vocab_size)
    documents = [trained.decode_bytes(ids[start:end]) for start, end in pairwise(offsets)]
    assert documents == texts


@pytest.mark.slow
@given(texts=st.lists(strings.map(str.encode), max_size=6))
def test_engines_agree(engines, texts):
    assert_equal(engines["gigatoken"].encode_batch(texts), engines["tiktoken"].encode_batch(texts))


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_empty_texts_and_vocabularies_that_are_refused(engine, trained):
    built = make_engine(engine, trained.to_file())
    assert built.encode_batch([]).offsets.tolist() == [0]
    ids, offsets = built.encode_batch([b"", b"a", b""])
    assert (ids.tolist(), offsets.tolist()) == ([107], [0, 0, 1, 1])
    a, b, c = (BYTE_OFFSET + byte for byte in b"abc")
    vocabulary = VocabularyFile.from_pairs([(a, b), (b, c), (266, c), (a, 267)], {})
    with pytest.raises(TokenizerError, match="found b'abc' for ids 268 and 269"):
        make_engine(engine, vocabulary).encode_batch([b"abc"])
    doubling = [(107, 107), *((266 + order, 266 + order) for order in range(40))]
    with pytest.raises(TokenizerError, match="at most 1024 bytes, found 2048 bytes for id 276"):
        make_engine(engine, VocabularyFile.from_pairs(doubling, {})).encode_batch([b"a"])


@pytest.mark.parametrize("character", [b"a", b" ", b"\n", "中".encode(), b"1", b"!", b"\xff"])
def test_a_megabyte_without_a_split_point(character, trained):
    text = character * 1_000_000
    ids, _ = GigatokenEngine(hf_tokenizer_json(trained.to_file())).encode_batch([text])
    assert trained.decode_bytes(ids) == text


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("text", ["<|eos|>", "a<|pad|> <|reserved_4|>", "<|bos|><|unk|>"])
def test_the_name_of_a_special_token_is_text(engine, text, trained):
    ids, _ = make_engine(engine, trained.to_file()).encode_batch([text.encode()])
    assert ids.min() >= BYTE_OFFSET
    assert trained.decode(ids) == text


@pytest.mark.parametrize(
    ("resident", "num_builds"), [([100, 150, 200, 200], 1), ([500, 100, 201, 201], 2), ([100, 300, 900, 900, 900], 3)]
)
def test_when_the_encoder_is_rebuilt(resident, num_builds, trained, monkeypatch):
    readings: list[int] = []
    monkeypatch.setattr("genesis.tokenizer.engines.resident_bytes", lambda: readings[-1])
    engine = GigatokenEngine(hf_tokenizer_json(trained.to_file()), max_growth_bytes=100)
    for reading in resident:
        readings.append(reading)
        assert_equal(engine.encode_batch([b"text"]), trained.encode_batch([b"text"]))
    assert engine.num_builds == num_builds
