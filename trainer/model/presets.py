"""Shapes by name, from one that two CPU cores train in a test to one for a swarm.

A name says the parameters at a vocabulary of 32,000, within 5 % (`tiny`: one million outside of embedding and output).
Each rung has 1.3 to 2.5 times the parameters of the one below, so a node uses its memory without every node having a
shape of its own. Heads have 32 values in `tiny`, 64 up to 500m and 128 above; grouped queries share a key head three to
seven to one; feed-forward is 2.5 to 4 times as wide as the residual stream, in multiples of 64. `7.5b` is the shape of
the run of spec T-2: OLMo-2's norms, feed-forward 14,336, 218.1 million parameters a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig

__all__ = ["PRESETS", "preset"]

_VOCAB_SIZE = 32_000


def _shape(dim: int, num_layers: int, num_heads: int, num_kv_heads: int, ffn_dim: int, seq_len: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=_VOCAB_SIZE,
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
    """A shape by name, for a vocabulary of ``vocab_size`` rows.

    Raises:
        TrainerUsageError: there is no such preset, or the vocabulary is empty.
    """
    if name not in PRESETS:
        raise TrainerUsageError(f"preset: expected one of {', '.join(PRESETS)}, found {name!r}")
    return replace(PRESETS[name], vocab_size=vocab_size)
