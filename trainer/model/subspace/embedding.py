"""The fixed embedding: what of a token's identity needs all dimensions, and so never travels.

A token's embedding is the one thing in the residual stream that is not of low rank. Here it is a fixed random row,
which every stage makes for itself from seed and row number, plus a learnable row within the subspace. Positions need no
such table: rotary positions enter in attention, not in the stream.

The fixed rows have the standard deviation (0.2) that an ordinary model's embedding begins with; where norms are
re-ordered they have 1, since nothing scales up there what a layer reads, and what it writes has a fixed size (`tiny`,
rank 8 of 128, 200 steps on text: a loss of 4.69 instead of 5.44). Row n is the same whatever the size of the
vocabulary, so that it grows without changing a bit. Cost: vocabulary · dim · 4 bytes a stage (tiny: 16 MB; 2.1 GB for
128k ids of width 4,096), made at 7 ns a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.model.config import ModelConfig
from trainer.model.init import init_std, seeded_normal

__all__ = ["SubspaceEmbedding", "fixed_table", "fixed_table_of", "make_embedding"]

_NAME = "subspace.fixed_embedding"
_STD_WITHOUT_INPUT_NORM = 1.0


def fixed_table(num_rows: int, dim: int, seed: int, std: float, device: torch.device | str = "cpu") -> Tensor:
    """The fixed rows, fp32[num_rows, dim]."""
    table = torch.empty(num_rows, dim, dtype=torch.float32, device=device)
    if table.is_meta:
        return table
    flat, offset = table.view(-1), 0
    for values in seeded_normal(seed, _NAME, 0, flat.numel(), std):
        flat[offset : offset + values.numel()].copy_(values)
        offset += values.numel()
    return table


def fixed_table_of(config: ModelConfig, num_rows: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """The fixed rows of a model's vocabulary, fp32[rows, dim].

    Args:
        config: of a subspace network.
        num_rows: rows, where the vocabulary has grown; 0: the config's.
        device: where to.
    """
    std = _STD_WITHOUT_INPUT_NORM if config.reorder_norm else init_std("embedding.weight", config)
    return fixed_table(num_rows or config.vocab_size, config.dim, config.subspace_seed, std, device)


class SubspaceEmbedding(nn.Embedding):
    """Learnable rows (the parameter ``weight``, kept within the subspace) plus fixed ones (no part of the state).

    Args:
        config: of a subspace network.
    """

    fixed: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.vocab_size, config.dim)
        self._config = config
        self.register_buffer("fixed", fixed_table_of(config, device=self.weight.device), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """ids[batch, tokens] to fp32[batch, tokens, dim]."""
        return functional.embedding(input, self.weight) + functional.embedding(input, self.fixed)

    def grow(self, num_rows: int) -> None:
        """Makes the fixed rows as many as a grown vocabulary has; the old ones stay the same bits."""
        self.fixed = fixed_table_of(self._config, num_rows, self.fixed.device).to(self.fixed.dtype)


def make_embedding(config: ModelConfig) -> nn.Embedding:
    """The embedding of a model: an ordinary one, or a subspace network's."""
    return SubspaceEmbedding(config) if config.subspace_rank else nn.Embedding(config.vocab_size, config.dim)
