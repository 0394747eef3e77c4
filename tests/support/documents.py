"""Text that is the same on every machine: seeded documents of a few hundred words, some of them not English."""

from __future__ import annotations

import gzip
import json
import random
import sys
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from genesis.sources import InputPlan, read_batches, tasks
from manifests import Cursor

TEXT = (
    "the of and to in a is that for it was as with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so said what up its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "me even most made after also did many off before must well back through years where much your way down should "
    "because long each just state people those too mr how little good world make very year still see own work men day "
    "get here old life both between being under three never know same last another while us might great go come since "
    "against right came take used himself few house use during without again place around however home small found "
    "naïve café Straße Москва 日本語 中文 한국어 مرحبا 🙂 e\u0301 <|eos|> 1234567 3.14159 foo_bar() {} \t -- don't I'll"
)
WORDS = TEXT.split(" ")


def documents(seed: int, count: int, mean_words: int = 120) -> list[str]:
    random_numbers = random.Random(seed)
    texts = []
    for _ in range(count):
        length = 1 + int(random_numbers.expovariate(1 / mean_words))
        words = [WORDS[int(random_numbers.random() ** 2 * len(WORDS))] for _ in range(length)]
        for position in range(9, length, 10):
            words[position] += random_numbers.choice([".\n", ",", ".", "\n\n", ";"])
        texts.append(" ".join(words))
    return texts


def write_parquet(path: Path, texts: list[str | None], row_group_size: int = 50) -> Path:
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=row_group_size)
    return path


def write_json_lines(path: Path, texts: list[str]) -> Path:
    data = "".join(json.dumps({"text": text, "meta": {}}, ensure_ascii=False) + "\n" for text in texts).encode()
    if path.suffix == ".zst":
        data = zstandard.compress(data)
    elif path.suffix == ".gz":
        data = gzip.compress(data)
    path.write_bytes(data)
    return path


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


@dataclass
class Reading:
    documents: list[bytes]
    cursors: list[Cursor]
    """Behind each document."""
    batch_ends: list[tuple[int, Cursor]]
    """After each batch: documents so far, and the cursor."""
    rows: int = 0
    error: Exception | None = None


def _read(plan: InputPlan, cursor: Cursor | None, reading: Reading) -> None:
    for task in tasks(plan, cursor):
        before = task.first_row
        for batch in read_batches(task):
            assert len(batch.texts) == len(batch.rows)
            assert all(batch.texts)
            assert batch.rows.tolist() == sorted(set(batch.rows.tolist()))
            assert all(before <= row < batch.end_row for row in batch.rows)
            reading.documents += batch.texts
            reading.cursors += [task.cursor(int(row) + 1, plan) for row in batch.rows]
            reading.batch_ends.append((len(reading.documents), task.cursor(batch.end_row, plan)))
            reading.rows += batch.end_row - before
            before = batch.end_row


def read_on(plan: InputPlan, cursor: Cursor | None = None) -> Reading:
    reading = Reading([], [], [])
    _read(plan, cursor, reading)
    return reading


def read_until_error(plan: InputPlan, expected: type[Exception]) -> Reading:
    reading = Reading([], [], [])
    try:
        _read(plan, None, reading)
    except expected as error:
        reading.error = error
        return reading
    raise AssertionError(f"expected {expected.__name__}, found {len(reading.documents)} documents and no error")
