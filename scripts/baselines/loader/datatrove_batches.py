"""datatrove's DatatroveFolderDataset over ``.ds`` files of uint16, as nanotron reads them.

It is made for reading one after the other what was shuffled when it was written, so it is read in order, the files
shuffled, without positions. Without a DataLoader the samples of a batch are stacked as they come (int64[T + 1] each);
inputs and labels are copied from that tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from contestant import batched, run, split
from datatrove.utils.dataset import DatatroveFolderDataset
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from contestant import Pass

_FILE_TOKENS = 2_500_000


def collate(samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Samples as int64[B, T + 1]."""
    return torch.stack([sample["input_ids"] for sample in samples])


def prepare(options: dict[str, Any]) -> Callable[[], Pass]:
    """A pass is an epoch."""
    size = options["batch_size"]
    dataset = DatatroveFolderDataset(
        options["data"], seq_len=options["seq_len"], filename_pattern="*.ds", token_size=2, shuffle=True
    )
    workers, views = options.get("workers"), options.get("views", False)
    if workers is None:
        return lambda: split(map(collate, batched((dataset[item] for item in range(len(dataset))), size)), views=views)
    loader = DataLoader(dataset, batch_size=size, num_workers=workers, collate_fn=collate, drop_last=True)
    return lambda: split(loader)


def convert(tokens: Path, out: Path, seq_len: int) -> None:
    """One file for every 2,500,000 tokens, as many files as the store has shards."""
    out.mkdir(parents=True, exist_ok=True)
    data = np.memmap(tokens, dtype=np.uint16, mode="r")
    for number, first in enumerate(range(0, len(data), _FILE_TOKENS)):
        data[first : first + _FILE_TOKENS].tofile(out / f"{number:05d}_tokens.ds")


if __name__ == "__main__":
    run(prepare, convert)
