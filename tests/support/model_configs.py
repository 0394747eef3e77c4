"""Shapes of some thousand parameters, and ids to train them with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.model.config import ModelConfig

__all__ = ["random_tokens", "small_config"]


def small_config(**changes: Any) -> ModelConfig:
    """Four layers of width 16 with grouped queries, 64 ids; ``changes`` replace fields."""
    fields = {
        "vocab_size": 64,
        "dim": 16,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 24,
        "max_seq_len": 32,
    }
    return ModelConfig(**(fields | changes))


def random_tokens(vocab_size: int, rows: int, num_tokens: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Input ids and the labels that follow them, int64[rows, num_tokens] each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (rows, num_tokens + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]
