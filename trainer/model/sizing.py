"""Sizes of models: presets by name, what a shape takes, and the largest preset that fits the memory there is.

A preset's name gives its parameters at a vocabulary of 32,000, within 5 % (`tiny`: one million outside embedding and
output). `7.5b` is the shape of spec T-2. There are 15 presets and not a size for every memory: nodes of similar memory
must arrive at one shape to train together. Memory is rounded down to tiers of 500 MB, so that a restart with a few MB
less finds the same architecture (spec T-27); 70 % of a tier is for the training state, 30 % for activations.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from genesis.memory import least_free_memory
from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig

logger = logging.getLogger(__name__)

TRAINING_BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and AdamW's two moments.
SHARED_BYTES_PER_PARAMETER = 32
"""On a CPU, where the anchor, momentum and reference of DiLoCo lie in the same memory."""
_MEMORY_TIER_BYTES = 500_000_000
_STATE_PERCENT = 70


def _shape(dim: int, num_layers: int, num_heads: int, num_kv_heads: int, ffn_dim: int, seq_len: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=32_000,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_dim=ffn_dim,
        max_seq_len=seq_len,
    )


PRESETS: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "tiny": _shape(128, 4, 4, 2, 512, 1024),
        "15m": _shape(192, 7, 3, 1, 512, 1024),
        "30m": _shape(320, 8, 5, 5, 832, 1024),
        "60m": _shape(512, 10, 8, 2, 1408, 2048),
        "125m": _shape(768, 12, 12, 4, 2048, 2048),
        "250m": _shape(1024, 16, 16, 4, 2816, 2048),
        "350m": _shape(1024, 24, 16, 4, 3072, 2048),
        "500m": _shape(1280, 24, 20, 5, 3456, 2048),
        "750m": _shape(1536, 26, 12, 4, 4096, 2048),
        "1b": _shape(2048, 20, 16, 4, 5504, 4096),
        "1.5b": _shape(2304, 24, 18, 6, 6144, 4096),
        "2b": _shape(2560, 26, 20, 4, 7168, 4096),
        "3b": _shape(3072, 28, 24, 8, 8192, 4096),
        "5b": _shape(3584, 36, 28, 4, 9728, 4096),
        "7.5b": replace(_shape(4096, 32, 32, 8, 14336, 4096), qk_norm=True, reorder_norm=True),
    }
)
"""By name, smallest first, for a vocabulary of 32,000."""


def preset(name: str, vocab_size: int) -> ModelConfig:
    """Returns a preset's shape for so many rows. Raises `TrainerUsageError`: no such preset, or no rows."""
    if name not in PRESETS:
        raise TrainerUsageError(f"preset: expected one of {', '.join(PRESETS)}, found {name!r}")
    return replace(PRESETS[name], vocab_size=vocab_size)


def layer_parameters(config: ModelConfig) -> int:
    """Counts the parameters of one layer whose norms are all learned."""
    of_heads = 2 * config.head_dim if config.qk_norm_per_head else config.query_dim + config.kv_dim
    norms = 2 * config.dim + (of_heads if config.qk_norm else 0)
    attention = 2 * config.dim * config.query_dim + 2 * config.dim * config.kv_dim
    biases = (config.query_dim + 2 * config.kv_dim if config.qkv_bias else 0) + (config.dim if config.o_bias else 0)
    return norms + attention + biases + 3 * config.dim * config.ffn_dim


def num_parameters(config: ModelConfig) -> int:
    """Counts the trained parameters of the whole model; the constants of a subspace network are none."""
    constant = 2 * config.dim * sum(map(config.is_constrained, range(config.num_layers))) if config.reorder_norm else 0
    layers = config.num_layers * layer_parameters(config) - constant
    return num_embedding_parameters(config) + layers + config.dim


def num_embedding_parameters(config: ModelConfig) -> int:
    """Counts the parameters of embedding and output together (once where they are tied)."""
    return (1 if config.tie_embeddings else 2) * config.vocab_size * config.dim


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Counts the floating-point operations of the forward and backward pass for one token of such a sequence.

    By the usual convention of model FLOPs utilisation: 6 for each weight a token is multiplied with, plus 12 · layers ·
    values of all heads · seq_len for attention, counted as if it were not causal. Recomputation does not count.
    """
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.dim
    return 6 * (num_parameters(config) - looked_up) + 12 * config.num_layers * config.query_dim * seq_len


def stage_flops_per_token(config: ModelConfig, layers: range, *, has_output: bool, seq_len: int) -> int:
    """Counts what `flops_per_token` does for a stage of these layers; stages add up to the model.

    The head looks its ids up and multiplies nothing for that; the tail ``has_output``, the norm and matrix before the
    loss.
    """
    constant = 2 * config.dim * sum(map(config.is_constrained, layers)) if config.reorder_norm else 0
    weights = len(layers) * layer_parameters(config) - constant
    weights += (config.vocab_size + 1) * config.dim if has_output else 0
    return 6 * weights + 12 * len(layers) * config.query_dim * seq_len


def memory_bytes(config: ModelConfig, *, bytes_per_parameter: int = TRAINING_BYTES_PER_PARAMETER) -> int:
    """Returns the bytes of the training state, without activations."""
    return num_parameters(config) * bytes_per_parameter


def memory_tier_bytes(available_memory_bytes: int) -> int:
    """Rounds memory down to a multiple of 500 MB."""
    return max(0, available_memory_bytes) // _MEMORY_TIER_BYTES * _MEMORY_TIER_BYTES


def choose_architecture(
    available_memory_bytes: int, vocab_size: int, *, bytes_per_parameter: int = TRAINING_BYTES_PER_PARAMETER
) -> ModelConfig:
    """Returns the largest preset whose training state fits, or `tiny` where none does.

    A parameter takes 16 bytes where DiLoCo's vectors lie elsewhere (a GPU's node), 32 where they share this memory.
    """
    budget = memory_tier_bytes(available_memory_bytes) * _STATE_PERCENT // 100
    configs = [preset(name, vocab_size) for name in PRESETS]
    fitting = [each for each in configs if memory_bytes(each, bytes_per_parameter=bytes_per_parameter) <= budget]
    return max(fitting, key=num_parameters, default=configs[0])


def available_memory_bytes(
    device_type: str = "cpu", *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Returns the bytes this process may still allocate: of the current GPU (``cuda``), else of main memory.

    On a CPU the least counts of its own limit (``ulimit -v``), the limits of its control group and of every group above
    it (version 1 and 2), and what the machine has available. A group's inactive page cache counts as free, since the
    kernel gives it up before it kills. Raises `TrainerUsageError`: procfs and control groups do not tell.
    """
    if device_type == "cuda":
        import torch  # a second and a half, for nothing else here

        return int(torch.cuda.mem_get_info()[0])
    found = least_free_memory(proc, cgroups)
    if found is None:
        raise TrainerUsageError(f"expected {proc / 'meminfo'} to say how much memory there is; name a --preset instead")
    logger.debug("memory available: %.0f MB (%s)", found.free_bytes / 1e6, found.source)
    return found.free_bytes
