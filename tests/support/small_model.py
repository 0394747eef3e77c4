"""A model small enough for hundreds of steps in a test, and ids to train it on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.model import ModelConfig, Transformer, build_model

VOCAB_SIZE = 64

SMALL = ModelConfig(
    vocab_size=VOCAB_SIZE, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, max_seq_len=16
)


def small_model(seed: int = 0) -> Transformer:
    return build_model(SMALL, seed)


def batches(seed: int, num_rows: int = 4, seq_len: int = 8) -> Iterator[dict[str, Tensor]]:
    """Endless; each next id follows from the one before, so there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(0, VOCAB_SIZE, (num_rows, 1), generator=generator)
        rows = (first + 3 * torch.arange(seq_len + 1)) % VOCAB_SIZE
        yield {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
