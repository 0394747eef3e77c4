"""Products of the blocks in fp8, by torchao's float8 training (extra ``fp8``); weights and moments stay fp32.

Inputs, weights and gradients are scaled by their greatest value at each product. What that scaling costs is earned back
by products of 1B parameters and more; smaller models stay in bf16 with a line that says so. Embedding, output and
norms are never fp8. Names of parameters and checkpoints are the same with and without.
"""

from __future__ import annotations

import logging
from typing import Final

import torch
from torch import nn

from trainer.errors import TrainerUsageError

LEAST_PARAMETERS: Final = 1_000_000_000
_MULTIPLE: Final = 16  # Of rows and columns, for the kernels.

logger = logging.getLogger(__name__)


def use_fp8(model: nn.Module, num_parameters: int, device: torch.device) -> bool:
    """Makes the products of a model's blocks fp8 where that pays; returns whether it did.

    Raises:
        TrainerUsageError: the GPU has no fp8 (compute capability 8.9), or torchao is not installed.
    """
    if num_parameters < LEAST_PARAMETERS:
        logger.warning(
            "inner.fp8: the model has %s parameters; below %s products stay bf16",
            f"{num_parameters:,}",
            f"{LEAST_PARAMETERS:,}",
        )
        return False
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {device}"
        raise TrainerUsageError(f"inner.fp8: expected a GPU of compute capability 8.9 or later, found {found}")
    convert(model)
    return True


def convert(model: nn.Module, *, emulate: bool = False) -> None:
    """Replaces the matrices of the blocks; with ``emulate`` fp8 is rounded to but computed in fp32, on any device."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise TrainerUsageError(
            "inner.fp8: expected torchao, which is not installed; pip install 'genesis-training[fp8]'"
        ) from error

    def is_chosen(module: nn.Module, name: str) -> bool:
        shape = module.weight.shape if isinstance(module, nn.Linear) else ()
        return name.startswith("layers.") and all(size % _MULTIPLE == 0 for size in shape)

    convert_to_float8_training(model, module_filter_fn=is_chosen, config=Float8LinearConfig(emulate=emulate))
