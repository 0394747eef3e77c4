"""Strings that tokenizers have got wrong: every category of Unicode, exotic white space, contractions, line ends."""

from __future__ import annotations

import random
import sys
import unicodedata
from functools import cache

_UNICODE_17_RANGES = (
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9),
    (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED),
    (0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
)  # fmt: skip

UNICODE_17 = frozenset(chr(point) for first, last in _UNICODE_17_RANGES for point in range(first, last + 1))
"""Letters and digits new in Unicode 17 (September 2025): gigatoken 0.10.0 knows them, tiktoken 0.14.0 and tokenizers
0.23.3 do not, so these three cut ``{character}'s`` differently."""

FRAGMENTS = (
    "'s", "'S", "'ſ", "'LL", "'re", "'d", "don't", "I'M", "’s", "''", "'",
    "\r", "\n", "\r\n", "\n\n", "\n \n", " \n", "\t", "  ", "   ", " ", "\x0b", "\x0c", "\x1c", "\x1f", "\x7f", "\x00",
    "\u0085", "\u00a0", "\u1680", "\u180e", "\u2003", "\u2028", "\u202f", "\u205f", "\u3000", "\u200b", "\ufeff",
    "1", "12", "1234567", "½", "²", "Ⅷ", "٣", "a", "word", "Word", "ſ", "İ", "ß", "é", "e\u0301", "\u0301",
    "中文", "ไทย", "한", "Ж", "ا", "😀", "👩\u200d👩\u200d👧", "🇩🇪",
    ".", ",", "...", "!?", "--", "(", ")", "<|eos|>", "<|pad|>", "/tmp", "_", "€",
)  # fmt: skip


@cache
def characters_by_category() -> dict[str, list[str]]:
    """Up to 300 characters of each general category but surrogates, spread over it; none of `UNICODE_17`."""
    found: dict[str, list[str]] = {}
    for character in map(chr, range(sys.maxunicode + 1)):
        if character in UNICODE_17:
            continue
        found.setdefault(unicodedata.category(character), []).append(character)
    del found["Cs"]
    return {category: characters[:: max(1, len(characters) // 300)] for category, characters in found.items()}


def adversarial_strings(count: int, seed: int) -> list[str]:
    """``count`` strings of fragments known for trouble and characters of random categories."""
    rng = random.Random(seed)
    categories = list(characters_by_category().values())

    def piece() -> str:
        return rng.choice(FRAGMENTS) if rng.random() < 0.7 else rng.choice(rng.choice(categories))

    return ["".join(piece() for _ in range(rng.randrange(25))) for _ in range(count)]
