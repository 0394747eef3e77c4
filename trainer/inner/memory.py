"""A model of the memory that a step takes at its peak, for planning; `tests/trainer/inner/test_memory.py` measures it.

Weights, gradients and moments are fp32. What blocks keep for the backward pass is counted a token and layer
(`activation_bytes`), and so is what the loss holds of one chunk of logits. The peak is either in the loss, when
everything is kept and (unless batches are accumulated) no gradient is there, or at the end of the backward pass.
Within 10 % of what fp32 steps of 2 to 32 million parameters were measured to hold on a CPU; in bf16 on a GPU blocks
keep about half, so that this is an upper bound there.

On a GPU the largest preset that fits is found from this model (`largest_preset`); on a CPU by a share of memory a
parameter (`trainer.model.choose_architecture`), because there the rest of the node lies in the same memory: DiLoCo's
vectors, the copies of a round and of a checkpoint, the loader's cache. None of that is a step's, and all of it is by
the parameter.
"""

from __future__ import annotations

from typing import Final

from trainer.inner.config import InnerConfig, activation_bytes
from trainer.model.config import ModelConfig
from trainer.model.sizing import (
    PRESETS,
    layer_parameters,
    memory_tier_bytes,
    num_embedding_parameters,
    num_parameters,
    preset,
)

_BYTES: Final = 4
_CHUNK_LOGITS: Final = 1 << 24
_USABLE_PERCENT: Final = 90  # Of a GPU's memory: the model is within 10 %, and libraries have workspaces.


def peak_bytes(config: ModelConfig, inner: InnerConfig, rows: int, *, num_shards: int = 1) -> int:
    """Returns the bytes of tensors that training on micro-batches of so many rows holds at its peak, in fp32.

    With ``num_shards`` ranks that share the state (FSDP), those of one rank and its ``rows``: a share of the state,
    two blocks gathered, and what stays gathered through the step (counted, not measured).
    """
    weights = -(-_BYTES * num_parameters(config) // num_shards)
    moments = -(-moments_bytes(config, inner) // num_shards)
    gathered = 0
    if num_shards > 1:
        gathered = _BYTES * (num_embedding_parameters(config) + config.dim + 2 * layer_parameters(config))
    tokens = rows * inner.seq_len
    again = 0
    if inner.activation_checkpointing == "full":
        kept = tokens * _BYTES * config.dim * config.num_layers  # Their inputs; and one block's rest, behind the loss.
        again = tokens * activation_bytes(config)
    else:
        selective = inner.activation_checkpointing == "selective"
        kept = tokens * config.num_layers * activation_bytes(config, selective=selective)
    table = _BYTES * config.vocab_size * config.dim
    chunk = min(max(128, _CHUNK_LOGITS // config.vocab_size), tokens)
    loss = table + 3 * _BYTES * tokens * config.dim + 2 * _BYTES * chunk * config.vocab_size
    accumulated = weights if inner.accumulation_steps > 1 else 0
    at_peak = max(kept + max(loss, again + table) + accumulated, weights + table)
    return weights + moments + gathered + at_peak


def largest_preset(
    available_bytes: int,
    vocab_rows: int,
    inner: InnerConfig,
    *,
    num_ranks: int = 1,
    num_shards: int = 1,
    beside: int = 0,
) -> ModelConfig:
    """Returns the largest preset of which a step fits a GPU's memory, or `tiny` where none does.

    A step is over a rank's part of ``inner.micro_batch_size`` rows, or over one row where memory is to decide them.
    ``beside`` are bytes a parameter that the device holds as well. Memory is rounded down to tiers (spec T-27), so that
    a restart with a few MB less, and nodes of like GPUs, find the same.
    """
    usable = memory_tier_bytes(available_bytes) * _USABLE_PERCENT // 100
    rows = max(1, -(-inner.micro_batch_size // num_ranks))
    configs = [preset(name, vocab_rows) for name in PRESETS]
    fitting = [
        each
        for each in configs
        if peak_bytes(each, inner, rows, num_shards=num_shards) + beside * num_parameters(each) <= usable
    ]
    return max(fitting, key=num_parameters, default=configs[0])


def moments_bytes(config: ModelConfig, inner: InnerConfig) -> int:
    """Returns the bytes of the optimizer's moments: two of each parameter, one of a matrix that Muon moves."""
    twice = 2 * num_parameters(config)
    if inner.optimizer == "muon":
        norms = 2 * config.dim + (config.dim + config.kv_dim if config.qk_norm else 0)
        twice -= config.num_layers * (layer_parameters(config) - norms)
    return _BYTES * twice


def state_bytes(config: ModelConfig, inner: InnerConfig) -> int:
    """Returns the bytes of weights, gradients and moments, whatever the batch."""
    return 2 * _BYTES * num_parameters(config) + moments_bytes(config, inner)


def shortage(config: ModelConfig, inner: InnerConfig, available_bytes: int, beside_bytes: int = 0) -> str:
    """Returns what to tell where a step will hardly fit, with ``beside_bytes`` of other things; empty where it will."""
    needed = peak_bytes(config, inner, inner.micro_batch_size) + beside_bytes
    if needed <= available_bytes:
        return ""
    return (
        f"a step of {inner.micro_batch_size} rows takes up to {needed / 1e9:.2f} GB, {available_bytes / 1e9:.2f} GB "
        "are available; if memory runs out, take a smaller --batch-size, inner.activation_checkpointing=full, or a "
        "smaller --preset"
    )
