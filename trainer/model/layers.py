"""What a block is made of: norm, rotary positions, attention, feed-forward.

Norms and rotations are computed in the type of the master weights (fp32), also under autocast. Queries and keys are
rotated by halves, as Hugging Face does, so that an export only renames.

With ``reorder_norm`` a block is OLMo-2's: h + norm(attention(h)), then h + norm(feed_forward(h)), and ``qk_norm``
normalises queries and keys over all heads together. Without: Llama's h + attention(norm(h)).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig

__all__ = ["Block", "Layers", "RMSNorm", "make_blocks", "rotary_table"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, in the weight's type.

    Args:
        num_values: of the last dimension.
        eps: added to the mean square.
        constant_gain: value of a weight that is fixed and no part of the state; None: the weight is learned, from 1.
    """

    weight: Tensor

    def __init__(self, num_values: int, eps: float, *, constant_gain: float | None = None) -> None:
        super().__init__()
        self.eps = eps
        if constant_gain is None:
            self.weight = nn.Parameter(torch.ones(num_values))
        else:
            self.register_buffer("weight", torch.full((num_values,), constant_gain), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return functional.rms_norm(hidden.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


def rotary_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of every position, fp32[max_seq_len, 1, head_dim]; halves repeat."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_seq_len, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / (config.rope_theta**half)).repeat(1, 2).unsqueeze(1)
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class _Attention(nn.Module):
    """Causal attention over query heads that share key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_grouped = config.num_kv_heads != config.num_heads
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.kv_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        by_head = (*hidden.shape[:-1], -1, self.head_dim)
        value = self.v_proj(hidden).view(by_head)
        query = _rotate(self.q_norm(self.q_proj(hidden)).view(by_head), cos, sin).to(value.dtype)
        key = _rotate(self.k_norm(self.k_proj(hidden)).view(by_head), cos, sin).to(value.dtype)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.is_grouped,
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class _FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to the residual stream.

    Args:
        config: the model's shape.
        is_constrained: it writes within a subspace, so a norm behind its parts may only scale a whole position.
    """

    def __init__(self, config: ModelConfig, *, is_constrained: bool = False) -> None:
        super().__init__()
        self.reorder_norm = config.reorder_norm
        self.attention = _Attention(config)
        self.feed_forward = _FeedForward(config)
        gain = config.subspace_gain if is_constrained and config.reorder_norm else None
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, constant_gain=gain)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps, constant_gain=gain)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps hidden[batch, tokens, dim] to the same shape; cos and sin are `rotary_table`'s rows of the tokens."""
        if self.reorder_norm:
            hidden = hidden + self.attention_norm(self.attention(hidden, cos, sin))
            out: Tensor = hidden + self.feed_forward_norm(self.feed_forward(hidden))
        else:
            hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin)
            out = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return out


def make_blocks(config: ModelConfig, numbers: Iterable[int]) -> dict[str, Block]:
    """Builds the layers of these numbers, by number, as `Layers` takes them."""
    return {str(number): Block(config, is_constrained=config.is_constrained(number)) for number in numbers}


class Layers(nn.ModuleDict):
    """Consecutive blocks, by their number in the whole model, and the positions they share.

    Args:
        config: the model's shape.
        blocks: by number, as decimal strings, in order; may be empty.
        activation_checkpointing: keep only each block's input and run the block again in the backward pass: about a
            third more compute for the activations of one block instead of all.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, blocks: dict[str, Block], *, activation_checkpointing: bool) -> None:
        super().__init__(blocks)
        self.activation_checkpointing = activation_checkpointing
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Runs all blocks over hidden[batch, tokens, dim].

        Raises:
            TrainerUsageError: the sequence is longer than the model's longest.
        """
        num_tokens = hidden.shape[1]
        if num_tokens > self.cos.shape[0]:
            raise TrainerUsageError(
                f"expected sequences of at most max_seq_len = {self.cos.shape[0]} tokens, found {num_tokens}; "
                "lower seq_len or choose a model with a longer max_seq_len"
            )
        cos, sin = self.cos[:num_tokens], self.sin[:num_tokens]
        for block in self.values():
            if self.activation_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = block(hidden, cos, sin)
        return hidden
