"""torchtitan's own Llama 3 over an exported checkpoint, in a process that has torchtitan.

    python -m tests.support.torchtitan_model FOLDER IDS.pt LOGITS.pt

The model is built by torchtitan's own configuration, with its fused projection of queries, keys and values, and loaded
as torchtitan loads ``checkpoint.initial_load_path``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

REQUIREMENTS = ("torchtitan==0.3.0", "spmd_types==0.2.3", "einops", "tyro", "docstring_parser", "typeguard", "triton")
"""What its model needs beside this project's own requirements, installed without their dependencies."""


def main(folder: Path, ids_path: Path, logits_path: Path) -> None:
    """Writes the logits of the ids."""
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
