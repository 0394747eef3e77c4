"""How Megatron's preprocessing goes about it: Pool, Hugging Face tokenizers, lists of ids to one writer.

``python megatron_way.py TOKENIZER.json(HF) OUT PROCESSES FILE…``
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer


def start(tokenizer_json: str) -> None:
    """Gives each process its tokenizer."""
    global encoder
    encoder = Tokenizer.from_file(tokenizer_json)


def encode(text: str) -> tuple[list[int], int]:
    """One document's ids and its size."""
    return [*encoder.encode(text).ids, 2], len(text.encode())


def documents(files: list[str]) -> Iterator[str]:
    """The text column, row by row."""
    for name in files:
        for batch in pq.ParquetFile(name).iter_batches(columns=["text"]):
            yield from batch.column(0).to_pylist()


def main() -> None:
    """Writes one .bin of uint16 and prints: text bytes, seconds."""
    tokenizer_json, out, processes, files = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    Path(out).mkdir(parents=True, exist_ok=True)
    started, text_bytes, lengths = time.perf_counter(), 0, []
    with multiprocessing.Pool(processes, start, (tokenizer_json,)) as pool, Path(out, "text.bin").open("wb") as file:
        for ids, size in pool.imap(encode, documents(files), 32):
            file.write(np.array(ids, dtype=np.uint16).tobytes())
            lengths.append(len(ids))
            text_bytes += size
    np.save(Path(out, "text.idx.npy"), np.array(lengths))
    print(text_bytes, time.perf_counter() - started)


if __name__ == "__main__":
    main()
