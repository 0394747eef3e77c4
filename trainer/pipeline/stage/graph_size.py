"""`GraphSizes`: how many bytes a forward pass keeps for its backward pass.

Measured, not estimated, since it depends on norms, precision and checkpointing: everything autograd saves, each piece
of memory once, without what is there anyway (parameters, tables, the input). Once for each shape of input, because
watching costs a tenth of a forward pass; a GPU's or kernel's scratch memory is not in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["GraphSizes"]

_MAX_SHAPES = 256
"""Remembered; strangers choose the shapes."""


class GraphSizes:
    """Bytes by shape of input.

    Args:
        module: what is run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._by_shape: dict[torch.Size, int] = {}

    def measured(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        """Runs the module; returns its output, and the bytes its graph keeps beside ``x``."""
        known = self._by_shape.get(x.shape)
        if known is not None:
            return run(x), known
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _unchanged):
            y = run(x)
        for there_anyway in (x, *self._module.parameters(), *self._module.buffers()):
            kept.pop(there_anyway.untyped_storage().data_ptr(), None)
        if len(self._by_shape) >= _MAX_SHAPES:
            self._by_shape.clear()
        self._by_shape[x.shape] = sum(kept.values())
        return y, self._by_shape[x.shape]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
