"""LitData's TokensLoader: chunks of tokens that it maps, blocks of T + 1, shuffled.

As its documentation has it for pre-training: ``optimize`` with a TokensLoader and chunks of 64 MB, then
``StreamingDataset(item_loader=TokensLoader(block_size=T + 1), shuffle=True, drop_last=True)``. The tokens are uint16,
half of what its examples use (int32) and so faster. Without a DataLoader the blocks of a batch are stacked and widened
at once; inputs and labels are copied from that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from contestant import batched, run, split
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

if TYPE_CHECKING:
    from contestant import Pass

_DOCUMENT_TOKENS = 1_000_000


def collate(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Blocks as int64[B, T + 1]."""
    return torch.stack(blocks).to(torch.int64)


def prepare(options: dict[str, Any]) -> Callable[[], Pass]:
    """A pass is an epoch."""
    size, loader = options["batch_size"], TokensLoader(block_size=options["seq_len"] + 1)
    dataset = StreamingDataset(options["data"], item_loader=loader, shuffle=True, drop_last=True)
    workers, views = options.get("workers"), options.get("views", False)
    if workers is None:
        return lambda: split(map(collate, batched(dataset, size)), views=views)
    batches = StreamingDataLoader(dataset, batch_size=size, num_workers=workers, collate_fn=collate, drop_last=True)
    return lambda: split(batches)


def documents(part: tuple[str, int]) -> Iterator[torch.Tensor]:
    """One part of the token file."""
    path, first = part
    data = np.memmap(path, dtype=np.uint16, mode="r")
    yield torch.from_numpy(np.array(data[first : first + _DOCUMENT_TOKENS]))


def convert(tokens: Path, out: Path, seq_len: int) -> None:
    """Chunks of 64 MB."""
    parts = [(str(tokens), first) for first in range(0, tokens.stat().st_size // 2, _DOCUMENT_TOKENS)]
    loader = TokensLoader(block_size=seq_len + 1)
    chunk_tokens = 32_000_000 // (seq_len + 1) * (seq_len + 1)
    optimize(documents, parts, output_dir=str(out), chunk_size=chunk_tokens, item_loader=loader, num_workers=1)


if __name__ == "__main__":
    run(prepare, convert)
