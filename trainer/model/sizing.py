"""What a model of a given shape takes: parameters, operations, memory. Arithmetic only; nothing is built.

FLOPs follow the usual convention of model FLOPs utilisation: 6 for each weight a token is multiplied with, plus 12 ·
layers · width · sequence length for attention, counted as if it were not causal; recomputation does not count.
"""

from __future__ import annotations

from trainer.model.config import ModelConfig

__all__ = [
    "OUTER_BYTES_PER_PARAMETER",
    "TRAINING_BYTES_PER_PARAMETER",
    "flops_per_token",
    "memory_bytes",
    "num_embedding_parameters",
    "num_parameters",
]

TRAINING_BYTES_PER_PARAMETER = 16
"""fp32 weight, gradient and AdamW's two moments."""
OUTER_BYTES_PER_PARAMETER = 16
"""What DiLoCo keeps in main memory, in fp32: anchor, momentum, reference, and the vector of a round."""


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the whole model; what a subspace network holds fixed is none."""
    norms = 2 * config.dim + (config.dim + config.kv_dim if config.qk_norm else 0)
    attention = 2 * config.dim * config.dim + 2 * config.dim * config.kv_dim
    feed_forward = 3 * config.dim * config.ffn_dim
    layers = config.num_layers * (norms + attention + feed_forward)
    constant = 2 * config.dim * sum(map(config.is_constrained, range(config.num_layers))) if config.reorder_norm else 0
    return num_embedding_parameters(config) + layers + config.dim - constant


def num_embedding_parameters(config: ModelConfig) -> int:
    """Parameters of embedding and output together (counted once where they are tied)."""
    return (1 if config.tie_embeddings else 2) * config.vocab_size * config.dim


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward pass for one token of a sequence of this length."""
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.dim
    multiplied = num_parameters(config) - looked_up
    return 6 * multiplied + 12 * config.num_layers * config.dim * seq_len


def memory_bytes(config: ModelConfig, *, bytes_per_parameter: int = TRAINING_BYTES_PER_PARAMETER) -> int:
    """Bytes of the training state, activations not included."""
    return num_parameters(config) * bytes_per_parameter
