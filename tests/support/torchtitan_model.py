"""torchtitan's own Llama 3 over an exported checkpoint, in a process that has torchtitan; and one as small as its.

    python -m tests.support.torchtitan_model FOLDER IDS.pt LOGITS.pt

The model is built by torchtitan's own configuration, with its fused projection of queries, keys and values, and loaded
as torchtitan loads ``checkpoint.initial_load_path``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn import functional

REQUIREMENTS = ("torchtitan==0.3.0", "spmd_types==0.2.3", "einops", "tyro", "docstring_parser", "typeguard", "triton")
"""What its model needs beside this project's own requirements, installed without their dependencies."""


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


def main(folder: Path, ids_path: Path, logits_path: Path) -> None:
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    about = json.loads((folder / "genesis_model.json").read_text())["torchtitan"]
    dim, rows = about["dim"], about["vocab_size"]
    rope = ComplexRoPE.Config(
        dim=dim // about["n_heads"],
        max_seq_len=about["max_seq_len"],
        theta=about["rope_theta"],
        scaling=about["rope_scaling"],
    )
    layers = llama3._build_llama3_layers(
        n_layers=about["n_layers"],
        dim=dim,
        n_heads=about["n_heads"],
        n_kv_heads=about["n_kv_heads"],
        hidden_dim=about["hidden_dim"],
        rope=rope,
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # Causal; needs no compiler on a CPU.
        layer.attention_norm.eps = layer.ffn_norm.eps = about["norm_eps"]
    config = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=rows,
        tok_embeddings=Embedding.Config(
            num_embeddings=rows, embedding_dim=dim, param_init={"weight": torch.nn.init.ones_}
        ),
        norm=RMSNorm.Config(normalized_shape=dim, eps=about["norm_eps"], param_init={"weight": torch.nn.init.ones_}),
        lm_head=Linear.Config(in_features=dim, out_features=rows, param_init={"weight": torch.nn.init.ones_}),
        layers=layers,
    )
    model = config.build()
    model.init_states()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    model.load_state_dict(state)
    with torch.no_grad():
        torch.save(model(torch.load(ids_path)), logits_path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
