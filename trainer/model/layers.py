"""What a block is made of: norm, rotary positions, attention, feed-forward.

Norms are computed in the type of their weights and rotations in that of their tables, also under autocast: fp32, but
for norms whose weights FSDP gathers in bf16. Queries and keys are rotated by halves, as Hugging Face does, so that an
export only renames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig, Recomputation
from trainer.model.documents import Mask, attend, block_mask, dense_mask, document_numbers
from trainer.model.rope import rotary_tables


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in the weight's type.

    With a ``constant_gain`` the weight is fixed and no part of the state; else it is learned, from 1.
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


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class _Attention(nn.Module):
    """Causal attention over query heads that share key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_grouped = config.num_kv_heads != config.num_heads
        self.norm_per_head = config.qk_norm_per_head
        self.sliding_window = config.sliding_window
        self.q_proj = nn.Linear(config.dim, config.query_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, config.kv_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, config.kv_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.query_dim, config.dim, bias=config.o_bias)
        of_query, of_key = (config.head_dim,) * 2 if config.qk_norm_per_head else (config.query_dim, config.kv_dim)
        self.q_norm = RMSNorm(of_query, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(of_key, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        by_head = (*hidden.shape[:-1], -1, self.head_dim)
        normed = by_head if self.norm_per_head else (*hidden.shape[:-1], -1)
        value = self.v_proj(hidden).view(by_head)
        query = _rotate(self.q_norm(self.q_proj(hidden).view(normed)).view(by_head), cos, sin).to(value.dtype)
        key = _rotate(self.k_norm(self.k_proj(hidden).view(normed)).view(by_head), cos, sin).to(value.dtype)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if 0 < self.sliding_window < hidden.shape[1]:
            mask = _window(hidden.shape[1], self.sliding_window, hidden.device)
        mixed = attend(query, key, value, mask, is_grouped=self.is_grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _window(num_tokens: int, width: int, device: torch.device) -> Tensor:
    """Returns which tokens (columns) each token attends to: itself and those before it, ``width`` in all."""
    everything = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device)
    return everything.tril() & everything.triu(1 - width)


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


class _Block(nn.Module):
    """One layer: Llama's h + part(norm(h)) for attention and feed-forward, or OLMo-2's h + norm(part(h)).

    One that ``is_constrained`` writes within a subspace, so a norm behind its parts may only scale a whole position.
    """

    def __init__(self, config: ModelConfig, *, is_constrained: bool = False) -> None:
        super().__init__()
        self.run: Callable[..., Tensor] = _run
        """What is compiled, once for all blocks. It is within the hooks that FSDP sets on a block, and not around them:
        none of them can be compiled, and what encloses one would run uncompiled with it."""
        self.reorder_norm = config.reorder_norm
        self.attention = _Attention(config)
        self.feed_forward = _FeedForward(config)
        gain = config.subspace_gain if is_constrained and config.reorder_norm else None
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, constant_gain=gain)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps, constant_gain=gain)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None = None,
        recomputation: Recomputation = "off",
    ) -> Tensor:
        """Maps hidden[batch, tokens, dim] to the same shape; cos and sin are the rows of the tokens' positions."""
        return self.run(self, recomputation, hidden, cos, sin, mask)

    def computed(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        """Returns what `forward` does, and keeps everything for the backward pass."""
        if self.reorder_norm:
            hidden = hidden + self.attention_norm(self.attention(hidden, cos, sin, mask))
            out: Tensor = hidden + self.feed_forward_norm(self.feed_forward(hidden))
        else:
            hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin, mask)
            out = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return out


def make_blocks(config: ModelConfig, numbers: Iterable[int]) -> dict[str, nn.Module]:
    """Builds the layers of these numbers, by number."""
    return {str(number): _Block(config, is_constrained=config.is_constrained(number)) for number in numbers}


_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What selective activation checkpointing does not compute again: it is most of the time."""
_selective = partial(create_selective_checkpoint_contexts, list(_KEPT))


def _run(
    block: _Block, recomputation: Recomputation, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None
) -> Tensor:
    """Runs one block, and keeps as much of it as it is told to."""
    out: Tensor
    inputs = (hidden, cos, sin, mask)
    if recomputation == "off" or not torch.is_grad_enabled():
        out = block.computed(*inputs)
    elif recomputation == "full":
        out = checkpoint(block.computed, *inputs, use_reentrant=False, preserve_rng_state=False)
    else:
        out = checkpoint(block.computed, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=_selective)
    return out


class Layers(nn.ModuleDict):
    """Consecutive blocks, by their number in the whole model, and the positions they share.

    With ``activation_checkpointing: full`` only each block's input is kept, and the block runs again in the backward
    pass: about a third more compute for the activations of one block instead of all. True means full.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: ModelConfig, numbers: Iterable[int], *, activation_checkpointing: Recomputation | bool
    ) -> None:
        super().__init__(make_blocks(config, numbers))
        if isinstance(activation_checkpointing, bool):
            activation_checkpointing = "full" if activation_checkpointing else "off"
        self.activation_checkpointing: Recomputation = activation_checkpointing
        self._is_compiled = False
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def compile_regions(self) -> None:
        """Compiles a block at its first call; all blocks use the same code."""
        if not self._is_compiled:
            compiled = torch.compile(_run)
            for block in self.values():
                if isinstance(block, _Block):
                    block.run = compiled
            self._is_compiled = True

    def document_mask(self, ids: Tensor, end_id: int) -> Mask:
        """Returns the mask that keeps attention within documents, in the form that is fastest here."""
        numbers = document_numbers(ids, end_id)
        return block_mask(numbers) if self._is_compiled and ids.device.type == "cuda" else dense_mask(numbers)

    def forward(self, hidden: Tensor, mask: Mask | None = None) -> Tensor:
        """Maps hidden[batch, tokens, dim]; without a mask attention is causal.

        Raises `TrainerUsageError`: more tokens than the longest sequence.
        """
        num_tokens = hidden.shape[1]
        if num_tokens > self.cos.shape[0]:
            raise TrainerUsageError(
                f"expected sequences of at most max_seq_len = {self.cos.shape[0]} tokens, found {num_tokens}; "
                "lower seq_len or choose a model with a longer max_seq_len"
            )
        cos, sin = self.cos[:num_tokens], self.sin[:num_tokens]
        for block in self.values():
            hidden = block(hidden, cos, sin, mask, self.activation_checkpointing)
        return hidden
