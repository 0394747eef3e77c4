"""What all members of a benchmark train: one model, one way to cut batches from a shard, one optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.model import Transformer, build_model, preset

_SEED = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its data.

    Attributes:
        shard: file of token ids.
        preset: shape of the model.
        vocab_rows: rows of its vocabulary; ids of the shard are below.
        batch_size: rows of a batch.
        seq_len: tokens of a row.
    """

    shard: str
    preset: str
    vocab_rows: int
    batch_size: int
    seq_len: int

    @property
    def tokens_per_step(self) -> int:
        """Of one member."""
        return self.batch_size * self.seq_len

    def model(self) -> Transformer:
        """The same weights at every member."""
        return build_model(preset(self.preset, self.vocab_rows), _SEED, device=torch.device("cpu"))

    def batches(self, rank: int, members: int) -> Iterator[dict[str, Tensor]]:
        """Endless; each member has windows of its own."""
        ids = torch.load(Path(self.shard), mmap=True, weights_only=True)
        size = self.batch_size * self.seq_len
        count = (len(ids) - 1) // size
        index = rank
        while True:
            start = index % count * size
            inputs, labels = ids[start : start + size], ids[start + 1 : start + size + 1]
            yield {name: each.view(self.batch_size, -1) for name, each in (("input_ids", inputs), ("labels", labels))}
            index += members


def plain_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW as ours has it by default."""
    return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
