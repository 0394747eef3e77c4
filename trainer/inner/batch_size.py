"""How many rows go through the model at once, by available memory (spec T-8), in bytes throughout.

The literal formula compares megabytes with bytes and leaves the model out, so it answers 1 nearly always. Here: 30 % of
what is left beside the model's training state (16 bytes a parameter) is for activations of 8 bytes a token, layer and
channel, 1 to 8 rows.

Those 8 bytes are what activation checkpointing keeps (9 at width 128). Without it the blocks keep ten times as much, 79
to 105 bytes in fp32 for widths of 768 to 128, so the rows are also limited by what the blocks do keep. Logits need no
memory of their own: the loss makes them in chunks.
"""

from __future__ import annotations

from typing import Final

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig
from trainer.model.sizing import TRAINING_BYTES_PER_PARAMETER, num_parameters

__all__ = ["activation_bytes", "batch_size_for"]

_MAX_BATCH_SIZE: Final = 8
"""Spec T-8; more rows a step come from accumulation."""
_SPECIFIED_BYTES: Final = 8
"""Activations for each token, layer and channel (spec T-8)."""
_SPECIFIED_SHARE: Final = 0.3
"""Share of memory for them (spec T-8)."""
_FITTING_SHARE: Final = 0.7
"""Of what is left, for what the blocks keep; the rest for the loss's chunks, the allocator and the batches."""


def batch_size_for(
    available_memory_bytes: int, config: ModelConfig, seq_len: int, *, activation_checkpointing: bool = False
) -> int:
    """Returns the rows of a micro-batch, 1 to 8; 1 also where the model hardly fits.

    Args:
        available_memory_bytes: for model and activations together, before the model is made.
        config: the model.
        seq_len: tokens of a row.
        activation_checkpointing: as the model is built.

    Raises:
        TrainerUsageError: memory or length is below 1.
    """
    if seq_len < 1 or available_memory_bytes < 1:
        raise TrainerUsageError(
            f"expected memory and seq_len of 1 or more, found {available_memory_bytes} bytes and {seq_len} tokens"
        )
    left_bytes = available_memory_bytes - TRAINING_BYTES_PER_PARAMETER * num_parameters(config)
    row_layers = seq_len * config.num_layers
    rows = int(left_bytes * _SPECIFIED_SHARE) // (row_layers * config.dim * _SPECIFIED_BYTES)
    if not activation_checkpointing:
        rows = min(rows, int(left_bytes * _FITTING_SHARE) // (row_layers * activation_bytes(config)))
    return max(1, min(rows, _MAX_BATCH_SIZE))


def activation_bytes(config: ModelConfig) -> int:
    """Returns the bytes one block keeps of one token for the backward pass, within 4 % for tiny to 125m in fp32."""
    return 4 * (8 * config.dim + 4 * config.ffn_dim + 3 * config.kv_dim)
