"""How often each word occurs: texts cut by the vocabulary's pattern.

Guarantees: the counts are those of the pattern run over each whole text, whatever the order of the texts and however
they are divided among processes (checked in the tests word for word). Two exceptions, for learning only:

- A word longer than `MAX_WORD_CHARACTERS` is cut there. A megabyte without a split point would otherwise be walked
  through once a merge, hours for 31,734 of them.
- Where a text is not UTF-8, the words that hold such bytes count for nothing.

The pattern costs 9 MB/s, so it runs once per *distinct* stretch between single spaces: text is first cut where a space
stands between two characters that are not white space, which is always a border of words, and of what is counted then
the stretches of letters alone are words already. That doubles the speed on English and costs nothing on Chinese.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import regex

__all__ = ["MAX_WORD_CHARACTERS", "count_words"]

MAX_WORD_CHARACTERS = 256
"""Code points; the longest word learned from."""

_BORDER = re.compile(r" (?<=\S )(?=\S)")
"""A space between two characters that are not white space: the one before it ends a word, whatever it is, and the
space begins the next. Python's white space includes all of Unicode's, so no longer run of it is ever cut."""

_INVALID = re.compile("[\udc80-\udcff]")

_Find = Callable[[str], list[str]]


def count_words(texts: Iterable[bytes], pattern: str) -> Counter[str]:
    """Counts the words of ``texts``.

    Args:
        texts: UTF-8; what is not is passed over.
        pattern: the regular expression whose matches are the words.

    Returns:
        Each word with the number of its occurrences, all valid Unicode.
    """
    find: _Find = regex.compile(pattern).findall
    words: Counter[str] = Counter()
    stretches: Counter[str] = Counter()
    for text in texts:
        first, *others = _BORDER.split(text.decode(errors="surrogateescape"))
        words.update(find(first))
        stretches.update(others)
    _count_stretches(stretches, find, words)
    _cut_long_words(words, find)
    for word in [word for word in words if not word.isascii() and _INVALID.search(word)]:
        del words[word]
    return words


def _count_stretches(stretches: Counter[str], find: _Find, words: Counter[str]) -> None:
    """Adds the words of all stretches, each of which has lost the space before it."""
    by_count: defaultdict[int, list[str]] = defaultdict(list)
    for stretch, count in stretches.items():
        if stretch.isalpha():
            words[f" {stretch}"] += count
        else:
            by_count[count].append(stretch)
    # Joined by the spaces they were cut at, so one call of the pattern does for all stretches of a count.
    for count, group in by_count.items():
        for word, times in Counter(find(f" {' '.join(group)}")).items():
            words[word] += times * count


def _cut_long_words(words: Counter[str], find: _Find) -> None:
    """Replaces words above the limit by their pieces; a piece the pattern would split further is split."""
    for word in [word for word in words if len(word) > MAX_WORD_CHARACTERS]:
        count = words.pop(word)
        for start in range(0, len(word), MAX_WORD_CHARACTERS):
            for piece in find(word[start : start + MAX_WORD_CHARACTERS]):
                words[piece] += count
