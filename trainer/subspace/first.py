"""First weights within a subspace: the same bits on every machine, without a matrix product.

Projecting an ordinary model's first weights would round differently on different processors, and nodes that have never
met would begin from different states. So column j of a matrix that writes to the stream is one column of the basis,
j mod rank, times a number of (seed, name, j): a single multiplication a value, and as long on average as an ordinary
model's column. The learnable part of the embedding begins, and grows, as zeros: tokens are told apart by the fixed one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainer.model.config import ModelConfig
from trainer.model.init import init_std, seeded_normal
from trainer.subspace.constraint import EMBEDDING, basis_for, writes_to_stream

__all__ = ["first_weights_"]


@torch.no_grad()
def first_weights_(module: nn.Module, config: ModelConfig, seed: int) -> None:
    """Gives every parameter that is kept within the subspace its first value, in place.

    Args:
        module: a `trainer.model.stages.Stage`.
        config: its shape; an ordinary model is left as it is.
        seed: the run's.
    """
    for name, parameter in module.named_parameters():
        if name == EMBEDDING and config.subspace_rank:
            parameter.zero_()
        elif writes_to_stream(name, config):
            _fill(parameter, basis_for(config).matrix, name, seed, init_std(name, config))


def _fill(parameter: Tensor, basis: Tensor, name: str, seed: int, std: float) -> None:
    dim, num_columns = parameter.shape
    lengths = torch.cat([*seeded_normal(seed, name, 0, num_columns, std * math.sqrt(dim))])
    chosen = torch.arange(num_columns, device="cpu") % basis.shape[1]
    columns = basis.to(parameter.device)[:, chosen.to(parameter.device)]
    parameter.copy_(columns.mul_(lengths.to(parameter.device)))
