"""Which size of model a node trains when nobody says: the largest preset that fits its memory.

Memory counts in tiers of 500 MB, rounded down, so that a restart with a few MB less finds the same architecture (6,568
and 6,622 MB both are 6,500). A tier's edge can still be crossed; hence a saved architecture wins over this choice. 70 %
of a tier is for the training state, 30 % for activations, as for the batch size (spec T-8). The ladder has 15
rungs, not a size for every tier: nodes of similar memory must arrive at one shape to train together.
"""

from __future__ import annotations

from trainer.model.config import ModelConfig
from trainer.model.presets import PRESETS, preset
from trainer.model.sizing import TRAINING_BYTES_PER_PARAMETER, memory_bytes

__all__ = ["MEMORY_TIER_BYTES", "choose_architecture", "memory_tier_bytes"]

MEMORY_TIER_BYTES = 500_000_000
_STATE_PERCENT = 70


def memory_tier_bytes(available_memory_bytes: int) -> int:
    """Memory rounded down to a multiple of 500 MB."""
    return max(0, available_memory_bytes) // MEMORY_TIER_BYTES * MEMORY_TIER_BYTES


def choose_architecture(
    available_memory_bytes: int, vocab_size: int, *, bytes_per_parameter: int = TRAINING_BYTES_PER_PARAMETER
) -> ModelConfig:
    """The largest preset whose training state fits; never a smaller one for more memory.

    Args:
        available_memory_bytes: what training may use, such as `trainer.model.memory.available_memory_bytes` finds.
        vocab_size: rows of embedding and output.
        bytes_per_parameter: 16 where DiLoCo's vectors lie elsewhere (a GPU's node); 32 where they share this memory.

    Returns:
        The shape; `tiny` where nothing larger fits, also when `tiny` does not.
    """
    budget = memory_tier_bytes(available_memory_bytes) * _STATE_PERCENT // 100
    configs = [preset(name, vocab_size) for name in PRESETS]
    sizes = [memory_bytes(config, bytes_per_parameter=bytes_per_parameter) for config in configs]
    fitting = [pair for pair in zip(sizes, configs, strict=True) if pair[0] <= budget]
    return max(fitting, key=lambda pair: pair[0], default=(sizes[0], configs[0]))[1]
