"""A small Llama 3 with torchtitan's names and rotation: what its weights have to mean there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["torchtitan_logits"]


def torchtitan_logits(state: Mapping[str, Tensor], arguments: Mapping[str, object], ids: Tensor) -> Tensor:
    """Logits [rows, tokens, vocabulary] of a checkpoint's tensors; neighbouring values rotate as a complex number."""
    heads, kv_heads, dim = (int(str(arguments[name])) for name in ("n_heads", "n_kv_heads", "dim"))
    eps, theta = float(str(arguments["norm_eps"])), float(str(arguments["rope_theta"]))
    head_dim, tokens = dim // heads, ids.shape[1]
    speeds = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    turns = torch.polar(torch.ones(()), torch.outer(torch.arange(tokens), speeds))[None, :, None, :]

    def norm(hidden: Tensor, name: str) -> Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * state[name]

    def rotated(values: Tensor, count: int) -> Tensor:
        pairs = torch.view_as_complex(values.view(*ids.shape, count, head_dim // 2, 2))
        return torch.view_as_real(pairs * turns).flatten(3)

    hidden = state["tok_embeddings.weight"][ids]
    for layer in range(int(str(arguments["n_layers"]))):
        at = f"layers.{layer}."
        x = norm(hidden, f"{at}attention_norm.weight")
        query = rotated(x @ state[f"{at}attention.qkv_linear.wq.weight"].T, heads)
        key = rotated(x @ state[f"{at}attention.qkv_linear.wk.weight"].T, kv_heads)
        value = (x @ state[f"{at}attention.qkv_linear.wv.weight"].T).view(*ids.shape, kv_heads, head_dim)
        key, value = (each.repeat_interleave(heads // kv_heads, dim=2) for each in (key, value))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        scores = query @ key.transpose(2, 3) / head_dim**0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        hidden = hidden + mixed @ state[f"{at}attention.wo.weight"].T
        x = norm(hidden, f"{at}ffn_norm.weight")
        gate, up = x @ state[f"{at}feed_forward.w1.weight"].T, x @ state[f"{at}feed_forward.w3.weight"].T
        hidden = hidden + (functional.silu(gate) * up) @ state[f"{at}feed_forward.w2.weight"].T
    return norm(hidden, "norm.weight") @ state["lm_head.weight"].T
