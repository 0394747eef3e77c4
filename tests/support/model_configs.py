"""Models of some thousand parameters, ids to train them with, and a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manifests import FIRST_MERGE_ID, VocabularyFile
from trainer.model import ModelConfig, Transformer, build_model
from trainer.model.subspace import SubspaceConstraint

_MERGES = [(114 + 10, 111), (266, 118), (42, 126)]
NUM_IDS = FIRST_MERGE_ID + len(_MERGES)


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


def random_model(config: ModelConfig, seed: int = 3) -> Transformer:
    """A model no weight of which is at a value that hides a mistake, such as norms of one."""
    model = build_model(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    if config.subspace_rank:
        SubspaceConstraint(model, config).project_()
    return model


def write_tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_bytes(VocabularyFile.from_pairs(_MERGES, {"tiny": len(_MERGES)}).to_json())
    return path


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
