"""How build-nanogpt goes about it: Pool, tiktoken, uint16 arrays gathered into .npy shards by one writer.

``python nanogpt_way.py RANKS.tiktoken OUT PROCESSES FILE…``
"""

import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from manifests import PATTERN

SHARD = 2_500_000


def start(ranks: str) -> None:
    """Gives each process its encoding."""
    global encoding
    encoding = tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=load_tiktoken_bpe(ranks), special_tokens={})


def encode(text: str) -> tuple[npt.NDArray[np.uint16], int]:
    """One document's ids and its size."""
    return np.array([2, *encoding.encode_ordinary(text)], dtype=np.uint16), len(text.encode())


def documents(files: list[str]) -> Iterator[str]:
    """The text column, row by row."""
    for name in files:
        for batch in pq.ParquetFile(name).iter_batches(columns=["text"]):
            yield from batch.column(0).to_pylist()


def main() -> None:
    """Writes .npy shards and prints: text bytes, seconds."""
    ranks, out, processes, files = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    Path(out).mkdir(parents=True, exist_ok=True)
    started, text_bytes, shards, filled = time.perf_counter(), 0, 0, 0
    shard = np.empty(SHARD, dtype=np.uint16)
    with multiprocessing.Pool(processes, start, (ranks,)) as pool:
        for ids, size in pool.imap(encode, documents(files), chunksize=16):
            text_bytes += size
            while len(ids):
                take = min(len(ids), SHARD - filled)
                shard[filled : filled + take] = ids[:take]
                ids, filled = ids[take:], filled + take
                if filled == SHARD:
                    np.save(Path(out, f"shard_{shards}.npy"), shard)
                    shards, filled = shards + 1, 0
    print(text_bytes, time.perf_counter() - started)


if __name__ == "__main__":
    main()
