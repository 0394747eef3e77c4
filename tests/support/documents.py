"""Text that is the same on every machine: seeded documents of a few hundred words, some of them not English."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

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
    """``count`` documents; the same for the same seed."""
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
    """A parquet file with the column ``text``."""
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=row_group_size)
    return path


def write_json_lines(path: Path, texts: list[str]) -> Path:
    """A .jsonl, .jsonl.zst, .jsonl.gz or .json.gz file, by its ending."""
    data = "".join(json.dumps({"text": text, "meta": {}}, ensure_ascii=False) + "\n" for text in texts).encode()
    if path.suffix == ".zst":
        data = zstandard.compress(data)
    elif path.suffix == ".gz":
        data = gzip.compress(data)
    path.write_bytes(data)
    return path
