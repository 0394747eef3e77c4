"""The limit to compare populate with: read parquet, encode with gigatoken, torch.save int64 shards; nothing else.

No order over processes, no manifest, no resume, no fsync. ``python limit.py TOKENIZER.json(HF) OUT PROCESSES FILE…``
"""

import multiprocessing
import sys
import time
from pathlib import Path

import gigatoken
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

SHARD = 2_500_000


def work(number: int, tokenizer_json: str, out: str, files: list[str]) -> int:
    """Encodes one process's files; returns the bytes of text read."""
    encoder = gigatoken.Tokenizer(tokenizer_json)
    pending, count, shards, text_bytes = [], 0, 0, 0
    for name in files:
        file = pq.ParquetFile(name)
        for group in range(file.num_row_groups):
            column = file.read_row_group(group, columns=["text"], use_threads=False).column(0)
            texts = column.cast(pa.binary()).to_pylist()
            text_bytes += sum(map(len, texts))
            layout = encoder.encode_batch(texts, parallel=False).layout
            ends = np.asarray(layout.offsets.data)[1:]
            pending.append(np.insert(np.asarray(layout.content.data), ends, 2))
            count += len(pending[-1])
            while count >= SHARD:
                ids = np.concatenate(pending)
                torch.save(torch.from_numpy(ids[:SHARD].astype(np.int64)), f"{out}/shard_{number}_{shards}.pt")
                pending, count, shards = [ids[SHARD:]], count - SHARD, shards + 1
    return text_bytes


def main() -> None:
    """Splits the files over the processes and prints: text bytes, seconds without imports."""
    tokenizer_json, out, processes, files = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    Path(out).mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    parts = [(number, tokenizer_json, out, files[number::processes]) for number in range(processes)]
    if processes == 1:
        text_bytes = work(*parts[0])
    else:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            text_bytes = sum(pool.starmap(work, parts))
    print(text_bytes, time.perf_counter() - started)


if __name__ == "__main__":
    main()
