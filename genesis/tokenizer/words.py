"""How often each word occurs: texts cut by the vocabulary's pattern.

Guarantees: the counts are those of the pattern run over each whole text (the tests compare them), whatever the order
of the texts. Two exceptions, for learning only:

- A word longer than `MAX_WORD_CHARACTERS` is cut there. A megabyte without a split point would otherwise be walked
  through once a merge, hours for 31,734 of them.
- Where a text is not UTF-8, the words that hold such bytes count for nothing.

The pattern reads 9 MB/s, and there are 30 times as many words as distinct words. So texts are first cut at borders
that two neighbouring bytes give away (`_BORDERS`), by whole-array operations; the stretches between are counted by
Arrow; and the pattern runs once per distinct stretch that is not plainly one word. In English that makes 1.3 s of 4.5
for 39 MB. Text without ASCII letters and spaces, such as Chinese, has few such borders and goes at the pattern's speed.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import regex

from manifests.vocabulary import PATTERN

MAX_WORD_CHARACTERS = 256
"""Code points; the longest word learned from."""

_BLOCK_BYTES = 32 << 20
"""Text counted at once; the arrays over it take some three times as much."""

_LETTERS = string.ascii_letters.encode()
_DIGITS = string.digits.encode()
_ASCII = bytes(range(0x80))
_VISIBLE = bytes(range(0x21, 0x7F))
# The bytes that the UTF-8 of no white space ends in, or begins with (U+0085, U+00A0, U+1680, U+2000…, U+3000).
_HIGH_ENDS = bytes({*range(0x80, 0xC0)} - {0x85, 0x9F, 0xA0, 0xA8, 0xA9, 0xAF, *range(0x80, 0x8B)})
_HIGH_STARTS = bytes({*range(0xC3, 0xF5)} - {0xE1, 0xE2, 0xE3})


class _Border(NamedTuple):
    """A border of words lies between any of ``left`` and any of ``right``, whatever is around them.

    Two things make it so: no match of the pattern holds such a neighbourhood, and what a match before it holds does not
    depend on what comes after (only white space looks ahead, so ``left`` has none but line ends before visible text).
    """

    left: bytes
    right: bytes


def _without(characters: bytes, others: bytes) -> bytes:
    return bytes(character for character in characters if character not in others)


_BORDERS = (
    # Letters follow at most one other character, and nothing follows them in a match.
    _Border(_LETTERS, _without(_ASCII, _LETTERS)),
    # Digits stand alone, in threes from the first; white space before them looks ahead.
    _Border(_DIGITS, _without(_ASCII, _DIGITS)),
    _Border(_without(_VISIBLE, _DIGITS), _DIGITS),
    # White space other than line ends begins a match.
    _Border(_VISIBLE + _HIGH_ENDS, b" \t\v\f"),
    # Line ends end one, unless white space follows.
    _Border(b"\r\n", _VISIBLE + _HIGH_STARTS),
)


def _side_masks(sides: Sequence[bytes]) -> bytes:
    """A table for `bytes.translate`: which of ``sides`` each byte is in, a bit for each."""
    return bytes(sum(1 << bit for bit, side in enumerate(sides) if byte in side) for byte in range(256))


_LEFT = _side_masks([border.left for border in _BORDERS])
_RIGHT = _side_masks([border.right for border in _BORDERS])

_BEFORE_LETTERS = frozenset(" \t" + string.punctuation.replace("'", ""))
"""Characters that make one word with letters after them; an apostrophe may begin a contraction instead."""

_INVALID = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as ``surrogateescape`` decodes them."""

_Find = Callable[[str], list[str]]


def count_words(texts: Iterable[bytes]) -> Counter[str]:
    """Counts the words of ``texts``.

    Args:
        texts: UTF-8; what is not is passed over.

    Returns:
        Each word with the number of its occurrences, all valid Unicode.
    """
    find: _Find = regex.compile(PATTERN).findall
    words: Counter[str] = Counter()
    for block in _blocks(texts):
        for stretch, count in _count_stretches(block):
            if stretch[1:].isalpha() and (stretch[0] in _BEFORE_LETTERS or stretch[0].isalpha()):
                words[stretch] += count
            else:
                for word in find(stretch):
                    words[word] += count
    _cut_long_words(words, find)
    for word in [word for word in words if not word.isascii() and _INVALID.search(word)]:
        del words[word]
    return words


def _blocks(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    block: list[bytes] = []
    size_bytes = 0
    for text in texts:
        block.append(text)
        size_bytes += len(text)
        if size_bytes >= _BLOCK_BYTES:
            yield block
            block, size_bytes = [], 0
    yield block


def _count_stretches(texts: list[bytes]) -> Iterator[tuple[str, int]]:
    """The distinct stretches between borders, with the number of their occurrences; none is empty."""
    text = b"".join(texts)
    if not text:
        return
    edges = _edges(text, np.cumsum([0, *map(len, texts)]))
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(text)]
    counted = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(edges) - 1, buffers).value_counts()
    stretches, counts = counted.field("values").to_pylist(), counted.field("counts").to_pylist()
    for stretch, count in zip(stretches, counts, strict=True):
        if stretch:
            yield stretch.decode(errors="surrogateescape"), count


def _edges(text: bytes, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where stretches begin and end: at borders within the texts, and at ``starts``, the texts' own ends; ascending."""
    left = np.frombuffer(text.translate(_LEFT), dtype=np.uint8)
    right = np.frombuffer(text.translate(_RIGHT), dtype=np.uint8)
    borders = np.flatnonzero(left[:-1] & right[1:]) + 1
    edges = np.concatenate([borders, starts])
    # A merge of two ascending runs; edges that occur twice make empty stretches, which are passed over.
    edges.sort(kind="stable")
    return edges


def _cut_long_words(words: Counter[str], find: _Find) -> None:
    """Replaces words above the limit by their pieces; a piece the pattern would split further is split."""
    for word in [word for word in words if len(word) > MAX_WORD_CHARACTERS]:
        count = words.pop(word)
        for start in range(0, len(word), MAX_WORD_CHARACTERS):
            for piece in find(word[start : start + MAX_WORD_CHARACTERS]):
                words[piece] += count
