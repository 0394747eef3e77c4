"""Words and their counts: those of the pattern over each whole text, however the counting gets there."""

from __future__ import annotations

from collections import Counter

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from genesis.tokenizer.words import MAX_WORD_CHARACTERS, count_words
from manifests.vocabulary import PATTERN
from tests.support.texts import FRAGMENTS, adversarial_strings

find_words = regex.compile(PATTERN).findall

fragments = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def plainly_counted(texts: list[str]) -> Counter[str]:
    return Counter(word for text in texts for word in find_words(text))


@pytest.mark.slow
@given(st.lists(fragments | st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_the_words_are_the_matches_of_the_pattern(texts: list[str]) -> None:
    assert count_words([text.encode() for text in texts]) == plainly_counted(texts)


@pytest.mark.slow
def test_the_words_of_thousands_of_adversarial_strings() -> None:
    texts = adversarial_strings(10_000, seed=1)
    assert count_words([text.encode() for text in texts]) == plainly_counted(texts)


@pytest.mark.slow
def test_every_pair_of_bytes_between_letters_and_spaces() -> None:
    texts = [
        f"a{chr(left)}{chr(right)}{tail}" for left in range(128) for right in range(128) for tail in ("b", " b", "")
    ]
    assert count_words([text.encode() for text in texts]) == plainly_counted(texts)


@pytest.mark.slow
def test_real_text(corpus_texts: list[bytes]) -> None:
    expected = plainly_counted([text.decode() for text in corpus_texts])
    short = {word: count for word, count in expected.items() if len(word) <= MAX_WORD_CHARACTERS}
    counted = count_words(corpus_texts)
    # Pieces of over-long words add to the others, so those may count more, by no more than there are pieces.
    pieces = sum(
        (len(word) // MAX_WORD_CHARACTERS + 1) * count for word, count in expected.items() if word not in short
    )
    assert 0 <= sum(counted[word] - count for word, count in short.items()) <= 2 * pieces
    assert all(counted[word] >= count for word, count in short.items())


@pytest.mark.slow
def test_the_order_of_texts_does_not_matter(python_sources: list[bytes]) -> None:
    assert count_words(python_sources) == count_words(reversed(python_sources))


@pytest.mark.slow
def test_blocks_of_text_add_up(monkeypatch: pytest.MonkeyPatch, python_sources: list[bytes]) -> None:
    whole = count_words(python_sources)
    monkeypatch.setattr("genesis.tokenizer.words._BLOCK_BYTES", 50_000)
    assert count_words(python_sources) == whole


@pytest.mark.parametrize("character", ["a", "中", "😀", "\n", "!", " \n"])
def test_a_megabyte_without_a_split_point_is_cut(character: str) -> None:
    words = count_words([(character * (1_000_000 // len(character))).encode()])
    assert max(map(len, words)) <= MAX_WORD_CHARACTERS
    assert sum(len(word) * count for word, count in words.items()) == 1_000_000


def test_words_with_bytes_that_are_not_utf8_count_for_nothing() -> None:
    words = count_words([b"good \xff\xfe bad \xffword \xed\xa0\x80 good", b"\xff", "naïve".encode()])
    assert words == Counter({"good": 1, " good": 1, " bad": 1, "word": 1, "naïve": 1})


def test_no_text_has_no_words() -> None:
    assert count_words([]) == count_words([b"", b""]) == Counter()
