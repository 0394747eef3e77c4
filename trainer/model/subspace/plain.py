"""A subspace network as an ordinary model: the same function, in the form everybody else reads.

The embedding becomes fixed plus learnable rows (the addition the network itself does, so the logits are the same bits),
constant gains become parameters. There is no way back: an ordinary model's weights are in no subspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from trainer.model.config import ModelConfig
from trainer.model.subspace.constraint import EMBEDDING
from trainer.model.subspace.embedding import fixed_table_of

__all__ = ["plain_config", "plain_state"]


def plain_config(config: ModelConfig) -> ModelConfig:
    """The shape of the ordinary model of which `plain_state` is the state; an ordinary model's shape as it is."""
    return replace(config, subspace_rank=0, subspace_seed=0, subspace_free_layers=0)


def plain_state(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state of an ordinary model that computes the same.

    Args:
        state: of the whole, or of one stage; not changed.
        config: its shape; the embedding may have grown since. An ordinary model's state is handed back as it is.

    Returns:
        A new dict; tensors that are not changed are shared.
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
