"""Strings that tokenizers have got wrong: every category of Unicode, exotic white space, contractions, line ends."""

from __future__ import annotations

import random
import sys
import unicodedata
from functools import cache

__all__ = ["adversarial_strings", "characters_by_category"]

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
    """Up to 300 characters of each general category but surrogates, spread over it."""
    found: dict[str, list[str]] = {}
    for point in range(sys.maxunicode + 1):
        character = chr(point)
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
