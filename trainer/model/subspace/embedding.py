"""The fixed embedding of a subspace network, and the same network as an ordinary model.

A token's embedding is the one thing in the residual stream that is not of low rank. Here it is a fixed random row,
which every stage makes for itself from seed and row number, plus a learnable row within the subspace. Rotary positions
enter in attention, not in the stream, and need no such table.

The fixed rows have the standard deviation (0.2) that an ordinary model's embedding begins with. With re-ordered norms
they have 1, since nothing scales up there what a layer reads, and what it writes has a fixed size (`tiny`, rank 8 of
128, 200 steps on text: a loss of 4.69 instead of 5.44). Row n is the same whatever the size of the vocabulary. Cost:
vocabulary · dim · 4 bytes a stage (tiny: 16 MB; 2.1 GB for 128k ids of width 4,096), made at 7 ns a value.

The ordinary model of a network has fixed plus learnable rows as its embedding (the addition the network itself does, so
the logits are the same bits), and its constant gains as parameters. There is no way back: an ordinary model's weights
are in no subspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.model.config import ModelConfig
from trainer.model.init import fill_seeded_, init_std
from trainer.model.subspace.constraint import EMBEDDING

__all__ = ["SubspaceEmbedding", "fixed_table", "fixed_table_of", "make_embedding", "plain_config", "plain_state"]

_NAME = "subspace.fixed_embedding"
_STD_WITHOUT_INPUT_NORM = 1.0


def fixed_table(num_rows: int, dim: int, seed: int, std: float, device: torch.device | str = "cpu") -> Tensor:
    """Returns the fixed rows, fp32[num_rows, dim]."""
    table = torch.empty(num_rows, dim, dtype=torch.float32, device=device)
    if not table.is_meta:
        fill_seeded_(table.view(-1), seed, _NAME, std)
    return table


def fixed_table_of(config: ModelConfig, num_rows: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Returns the fixed rows of a subspace network's vocabulary, fp32[rows, dim]; by default all of the config's."""
    std = _STD_WITHOUT_INPUT_NORM if config.reorder_norm else init_std(EMBEDDING, config)
    return fixed_table(num_rows or config.vocab_size, config.dim, config.subspace_seed, std, device)


class SubspaceEmbedding(nn.Embedding):
    """Learnable rows (the parameter ``weight``, kept within the subspace) plus fixed ones (no part of the state)."""

    fixed: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.vocab_size, config.dim)
        self._config = config
        self.register_buffer("fixed", fixed_table_of(config, device=self.weight.device), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Maps ids[batch, tokens] to fp32[batch, tokens, dim]."""
        return functional.embedding(input, self.weight) + functional.embedding(input, self.fixed)

    def grow(self, num_rows: int) -> None:
        """Extends the fixed rows to those of a grown vocabulary; the old ones stay the same bits."""
        self.fixed = fixed_table_of(self._config, num_rows, self.fixed.device).to(self.fixed.dtype)


def make_embedding(config: ModelConfig) -> nn.Embedding:
    """Returns the embedding of a model: an ordinary one, or a subspace network's."""
    return SubspaceEmbedding(config) if config.subspace_rank else nn.Embedding(config.vocab_size, config.dim)


def plain_config(config: ModelConfig) -> ModelConfig:
    """Returns the shape of the ordinary model of which `plain_state` is the state."""
    return replace(config, subspace_rank=0, subspace_seed=0, subspace_free_layers=0)


def plain_state(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Returns the state of an ordinary model that computes the same; unchanged tensors are shared.

    Args:
        state: of the whole, or of one stage; not changed.
        config: its shape; the embedding may have grown since.
    """
    plain = dict(state)
    if config.subspace_rank == 0:
        return plain
    if EMBEDDING in plain:
        learned = plain[EMBEDDING].detach()
        plain[EMBEDDING] = learned + fixed_table_of(config, learned.shape[0], learned.device).to(learned.dtype)
    if config.reorder_norm:
        for number in filter(config.is_constrained, range(config.num_layers)):
            writer = plain.get(f"layers.{number}.attention.o_proj.weight")
            if writer is not None:
                gain = writer.new_full((config.dim,), config.subspace_gain)
                plain |= {f"layers.{number}.{part}_norm.weight": gain.clone() for part in ("attention", "feed_forward")}
    return plain
