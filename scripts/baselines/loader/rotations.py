"""A node that leaves its shards again and again, and what its memory holds meanwhile.

``python rotations.py STORE CACHE CACHE_BYTES ROTATIONS``: the plateau rule fires at every second loss, so that each
shard is opened, read a little and left. Prints one line of JSON: memory in bytes before the dataset is made and at
rotations 10, 100, 1,000 …, the peak, and the most that cached shards had in memory at once.
"""

import gc
import json
import logging
import sys
from pathlib import Path

import torch

from loader import GenesisDataset, PlateauRule

_FIRES_ALWAYS = PlateauRule("absolute", history=3, window=2, max_variance=1.0, max_mean=1.0, min_steps=0)


def memory() -> dict[str, int]:
    """This process's memory as the kernel has it, in bytes; shares of shared pages in `pss`."""
    fields = {"Rss:": "rss", "Pss:": "pss", "Pss_Anon:": "anonymous", "Pss_File:": "file"}
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return {fields[line[0]]: int(line[1]) * 1024 for line in lines if line[0] in fields}


def shard_pages(cache: str) -> int:
    """Bytes of cached shards that are mapped and in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=5)
        if "-" in head[0] and not head[0].endswith(":"):
            inside = len(head) == 6 and head[5].startswith(cache)
        elif inside and head[0] == "Rss:":
            total += int(head[1]) * 1024
    return total


def high_water() -> int:
    """The most memory the process ever had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Rotates and measures."""
    store, cache, cache_bytes, rotations = sys.argv[1:5]
    logging.getLogger("loader").setLevel(logging.ERROR)
    torch.zeros(8, 1024).sum()
    gc.collect()
    found = {"0": memory()}
    dataset = GenesisDataset(
        store, "bench", seq_len=128, batch_size=1, cache_dir=cache, cache_bytes=int(cache_bytes), plateau=_FIRES_ALWAYS
    )
    most_shard_bytes, rotated = 0, 0
    marks = {10**power for power in range(1, 7)} | {int(rotations)}
    for _ in dataset:
        dataset.report_loss(0.0)
        if len(dataset.rotations) > rotated:
            rotated = len(dataset.rotations)
            most_shard_bytes = max(most_shard_bytes, shard_pages(cache))
            if rotated in marks:
                found[str(rotated)] = memory()
            if rotated >= int(rotations):
                break
    opened = dataset.stats
    print(
        json.dumps(
            {
                "memory": found,
                "peak_bytes": high_water(),
                "most_shard_bytes": most_shard_bytes,
                "shards_opened": opened.shards_opened,
                "shards_from_cache": opened.shards_from_cache,
            }
        )
    )


if __name__ == "__main__":
    main()
