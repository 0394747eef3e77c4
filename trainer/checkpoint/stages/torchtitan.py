"""Exports a model in the form of torchtitan's Llama 3: names, layout of queries and keys, and checkpoint folder.

torchtitan rotates neighbouring values of a head as one complex number; here, as in Hugging Face, a head's first half is
rotated with its second. So rows of ``wq`` and ``wk`` are interleaved head by head, without changing a bit. Beside the
weights are ``genesis_model.json``, the architecture with torchtitan's arguments for it (its Llama 3 stretches rotary
wavelengths by default, which has to be switched off), and ``assets/``, the tokenizer for ``model.hf_assets_path``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.checkpoint.stages.dcp import without_process_group
from trainer.errors import ExportError
from trainer.model import ModelConfig
from trainer.model.config import RopeScaling
from trainer.model.export import ExportType, exported_weights, new_folder, read_vocabulary, tokenizer_files
from trainer.model.init import EMBEDDING, OUTPUT
from trainer.model.subspace.constraint import plain_config, plain_state

MODEL_NAME: Final = "genesis_model.json"
RELEASE: Final = "0.3"  # The release of torchtitan whose names and arguments are written.

_NAMES: Final = {
    "attention.q_proj": "attention.qkv_linear.wq",
    "attention.k_proj": "attention.qkv_linear.wk",
    "attention.v_proj": "attention.qkv_linear.wv",
    "attention.o_proj": "attention.wo",
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.down_proj": "feed_forward.w2",
    "feed_forward.up_proj": "feed_forward.w3",
    "attention_norm": "attention_norm",
    "feed_forward_norm": "ffn_norm",
}


def torchtitan_names(config: ModelConfig) -> dict[str, str]:
    """Torchtitan's names by ours, in the model's order. Raises `ExportError`: its Llama 3 has no such model."""
    if config.qk_norm or config.reorder_norm:
        raise ExportError(
            "expected a model of the Llama form for torchtitan, found qk_norm or reorder_norm (OLMo-2), which its "
            "Llama 3 has not; export it --to hf"
        )
    variants = {"qkv_bias": config.qkv_bias, "o_bias": config.o_bias, "sliding_window": config.sliding_window}
    variants |= {"head_dim": config.query_dim != config.dim, "rope_scaling": config.rope_scaling != RopeScaling()}
    found = [name for name, is_used in variants.items() if is_used]
    if found:
        raise ExportError(
            f"expected a model of the Llama form for torchtitan, found {', '.join(found)}, which is not written in its "
            "form; export it --to hf"
        )
    if config.tie_embeddings:
        raise ExportError("expected a model whose output is not its embedding for torchtitan, found tie_embeddings")
    names = {EMBEDDING: "tok_embeddings.weight"}
    for number in range(config.num_layers):
        for ours, theirs in _NAMES.items():
            names[f"layers.{number}.{ours}.weight"] = f"layers.{number}.{theirs}.weight"
    return names | {"readout.norm.weight": "norm.weight", OUTPUT: "lm_head.weight"}


def rotated_heads(name: str, config: ModelConfig) -> int:
    """The number of rotated heads whose rows a matrix has; 0 for none."""
    if name.endswith("attention.q_proj.weight"):
        return config.num_heads
    return config.num_kv_heads if name.endswith("attention.k_proj.weight") else 0


def from_halves(matrix: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of [num_heads · head_dim, dim] so that partners in a rotation become neighbours; none of 0."""
    if num_heads == 0:
        return matrix
    rows, dim = matrix.shape
    return matrix.view(num_heads, 2, rows // num_heads // 2, dim).transpose(1, 2).reshape(rows, dim)


def to_halves(matrix: Tensor, num_heads: int) -> Tensor:
    """The inverse of `from_halves`."""
    if num_heads == 0:
        return matrix
    rows, dim = matrix.shape
    return matrix.view(num_heads, rows // num_heads // 2, 2, dim).transpose(1, 2).reshape(rows, dim)


def export_torchtitan(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer_json_path: Path,
    out_dir: Path,
    *,
    dtype: ExportType = "float32",
) -> list[Path]:
    """Writes a folder that torchtitan starts from (``checkpoint.initial_load_path``); returns its files.

    Arguments are those of `export_hf`. Raises `ExportError`: torchtitan cannot represent the model, a weight is
    missing, unknown, of the wrong shape or not finite, or the folder cannot be written.
    """
    state, config = plain_state(state, config), plain_config(config)
    vocabulary = read_vocabulary(tokenizer_json_path)
    num_ids = vocabulary.next_merge_id
    names = torchtitan_names(config)
    weights = exported_weights(state, config, names, num_ids, getattr(torch, dtype))
    weights = {names[ours]: from_halves(weights[names[ours]], rotated_heads(ours, config)) for ours in names}
    arguments = {
        "dim": config.dim,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "vocab_size": num_ids,
        "hidden_dim": config.ffn_dim,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": "none",
        "max_seq_len": config.max_seq_len,
    }
    described = config.to_dict() | {"vocab_size": num_ids}
    about = {"genesis": described, "torchtitan": arguments, "torchtitan_release": RELEASE}
    assets = tokenizer_files(vocabulary)
    with new_folder(out_dir) as folder:
        with without_process_group():
            save(weights, storage_writer=FileSystemWriter(folder), no_dist=True)
        (folder / MODEL_NAME).write_text(json.dumps(about, indent=2) + "\n")
        (folder / "assets").mkdir()
        for name, body in assets.items():
            (folder / "assets" / name).write_bytes(body)
    return sorted(path for path in out_dir.rglob("*") if path.is_file())
