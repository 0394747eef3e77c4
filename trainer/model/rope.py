"""Rotary positions: by which angle each pair of values of a head turns from one token to the next.

The frequencies are computed in fp32 in the order of operations that transformers has, so that models of either agree to
rounding (1e-5 of the logits). Stretched frequencies are those of the papers: linear interpolation, Llama 3.1's by
wavelength, and YaRN's by turns (arXiv 2309.00071), which also scales queries and keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.model.config import ModelConfig, RopeScaling


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, fp32[max_seq_len, 1, head_dim] each, whose halves repeat."""
    positions = torch.arange(config.max_seq_len, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(config)).repeat(1, 2).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    scaling = config.rope_scaling
    if scaling.rope_type != "yarn":
        return cos, sin
    scale = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return cos * scale, sin * scale


def _frequencies(config: ModelConfig) -> Tensor:
    """Returns the radians a token of each pair of values, fp32[head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    if scaling.rope_type == "llama3":
        return _by_wavelength(plain, scaling)
    if scaling.rope_type == "yarn":
        return _by_turns(plain, config)
    return plain  # Dynamic scaling begins behind max_seq_len.


def _by_wavelength(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's: slow frequencies are divided, fast ones kept, those between are mixed."""
    turns = scaling.original_max_seq_len * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _by_turns(plain: Tensor, config: ModelConfig) -> Tensor:
    """YaRN's: the same with a ramp over the numbers of the pairs, between those of ``beta_fast`` and ``beta_slow``."""
    scaling, head_dim = config.rope_scaling, config.head_dim

    def pair_of(turns: float) -> float:
        ratio = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    numbers = torch.arange(head_dim // 2, dtype=torch.float32)
    divided = ((numbers - first) / width).clamp(0.0, 1.0)
    return plain / scaling.factor * divided + plain * (1 - divided)
