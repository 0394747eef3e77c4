"""How many rows go through the model at once, by the memory there is: 000's rule, in bytes throughout.

000 compares megabytes with bytes and never subtracts the model, so it answers 1 nearly always (erratum E10). Here: what
is left beside the model's training state (16 bytes a parameter: fp32 weights, gradients and two moments), 30 % of it
for activations, 1 to 8 rows. To 000's activations the logits are added, which it forgets and which outweigh them: at
32,000 ids a row of 512 tokens has 131 MB of logits with their gradient, and 8 MB of activations at width 256 and 8
layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainer.errors import TrainerUsageError

if TYPE_CHECKING:
    from trainer.model import ModelConfig

__all__ = ["MAX_BATCH_SIZE", "batch_size_for"]

MAX_BATCH_SIZE: Final = 8
"""000's upper end; more rows a step come from accumulation."""

_STATE_BYTES_PER_PARAMETER: Final = 16
_ACTIVATION_BYTES: Final = 8
"""For each token, layer and channel."""
_LOGIT_BYTES: Final = 8
"""For each token and id: the logit and its gradient, fp32."""
_ACTIVATION_SHARE: Final = 0.3


def batch_size_for(available_memory_bytes: int, config: ModelConfig, seq_len: int) -> int:
    """Rows a micro-batch, 1 to 8; 1 also where the model hardly fits.

    Args:
        available_memory_bytes: for model and activations together, before the model is made.
        config: the model.
        seq_len: tokens of a row.

    Raises:
        TrainerUsageError: a length or size below 1.
    """
    from trainer.model import num_parameters

    if seq_len < 1 or available_memory_bytes < 1:
        raise TrainerUsageError(
            f"expected memory and seq_len of 1 or more, found {available_memory_bytes} bytes and {seq_len} tokens"
        )
    left_bytes = available_memory_bytes - _STATE_BYTES_PER_PARAMETER * num_parameters(config)
    row_bytes = seq_len * (config.dim * config.num_layers * _ACTIVATION_BYTES + config.vocab_size * _LOGIT_BYTES)
    return max(1, min(int(left_bytes * _ACTIVATION_SHARE) // row_bytes, MAX_BATCH_SIZE))
