"""A trained model in Hugging Face's form: a folder that ``AutoModelForCausalLM.from_pretrained`` loads.

transformers gives the same logits for the same ids, which are exactly the tokenizer's: rows that only pad the
vocabulary are left out, so nothing can be generated that cannot be decoded. The class is that of `huggingface`: the one
a model came from, or the one that computes the same. transformers itself is not needed. A vocabulary made elsewhere
leaves as the file its maker published, with its own EOS.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from genesis.errors import GenesisError
from genesis.tokenizer.export import export_files
from manifests import EOS_ID, SPECIAL_TOKENS, Vocabulary, VocabularyFile, read_vocabulary_file
from manifests.errors import ContractError
from trainer.errors import ExportError
from trainer.model.config import ModelConfig
from trainer.model.huggingface import hf_config, hf_names
from trainer.model.init import EMBEDDING, OUTPUT
from trainer.model.stages import Transformer, model_shapes
from trainer.model.subspace.constraint import plain_config, plain_state

ExportType = Literal["float32", "bfloat16", "float16"]

_OUR_SPECIAL_IDS = {
    "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
    "bos_token_id": SPECIAL_TOKENS.index("<|bos|>"),
    "eos_token_id": EOS_ID,
}


def export_hf(
    model: Transformer | Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer_json_path: Path,
    out_dir: Path,
    *,
    dtype: ExportType = "float32",
    max_file_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files; returns their paths.

    The ``vocab_size`` of the config may be older than the state, whose rows count. A subspace network is written as the
    ordinary model that computes the same. ``out_dir`` is made whole or not at all; an existing one must be empty.
    Weights larger than ``max_file_bytes`` are split over several files, with an index. Raises `ExportError`: no class
    of transformers reads such a model, a weight is missing, unknown, of the wrong shape or not finite, the tokenizer
    has more ids than the model rows, or the folder cannot be written.
    """
    from huggingface_hub import save_torch_state_dict  # Half a second, for exports alone.

    state = plain_state(model.state_dict() if isinstance(model, Transformer) else model, config)
    config = plain_config(config)
    vocabulary = read_vocabulary(tokenizer_json_path)
    num_ids = vocabulary.next_merge_id
    files = tokenizer_files(vocabulary)
    tokenizer_config = json.loads(files["tokenizer_config.json"]) | {"model_max_length": config.max_seq_len}
    files |= {
        "tokenizer_config.json": _json(tokenizer_config),
        "generation_config.json": _json(_special_ids(vocabulary)),
        "config.json": _json(hf_config(config, num_ids, dtype, _special_ids(vocabulary))),
    }
    weights = exported_weights(state, config, hf_names(config), num_ids, getattr(torch, dtype))
    with new_folder(out_dir) as folder:
        for name, body in files.items():
            (folder / name).write_bytes(body)
        save_torch_state_dict(weights, folder, max_shard_size=max_file_bytes)
        for file in folder.iterdir():  # Some are written as private temporary files.
            file.chmod(0o644)
    return sorted(out_dir.iterdir())


def _special_ids(vocabulary: Vocabulary) -> dict[str, int | None]:
    """Returns the ids by their names in a config; null, where its maker names none, keeps out a class's default."""
    if isinstance(vocabulary, VocabularyFile):
        return dict(_OUR_SPECIAL_IDS)
    roles = {"pad_token_id": vocabulary.pad, "bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.eos}
    return {name: token.id if token is not None else None for name, token in roles.items()}


def read_vocabulary(path: Path) -> Vocabulary:
    """Reads a store's tokenizer.json. Raises `ExportError`: it cannot be read, or is no vocabulary."""
    try:
        return read_vocabulary_file(path.read_bytes())
    except (OSError, ContractError) as error:
        raise ExportError(f"expected the store's tokenizer.json at {path}: {error}") from error


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """Returns a tokenizer's two files in Hugging Face's form by name. Raises `ExportError`: it has none."""
    try:
        files = export_files(vocabulary, "hf")
    except GenesisError as error:
        raise ExportError(f"the tokenizer cannot be exported: {error}") from error
    return {Path(name).name: body for name, body in files.items()}


def exported_weights(
    state: Mapping[str, Tensor], config: ModelConfig, names: Mapping[str, str], num_ids: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns a whole model's weights by their ``names`` elsewhere, on the CPU, without rows that pad the vocabulary.

    Raises `ExportError`: a weight is missing, unknown, of the wrong shape or not finite.
    """
    tied = {OUTPUT} if config.tie_embeddings else set()
    missing, unknown = names.keys() - state.keys(), state.keys() - names.keys() - tied
    if missing or unknown:
        raise ExportError(
            f"expected the weights of a model of {config.num_layers} layers; missing {sorted(missing)[:3]}, unknown "
            f"{sorted(unknown)[:3]}; give the whole model's state and its own config"
        )
    shapes = model_shapes(config)
    weights = {}
    for ours, theirs in names.items():
        tensor, expected = state[ours].detach(), shapes[ours]
        if ours in (EMBEDDING, OUTPUT):
            if tensor.shape[0] < num_ids:
                raise ExportError(
                    f"{ours}: expected a row for each of the tokenizer's {num_ids} ids, found {tensor.shape[0]}; give "
                    "the tokenizer.json the model was trained with"
                )
            # A view would drag the padding rows into the file.
            tensor, expected = tensor[:num_ids].clone(), (num_ids, config.dim)
        if tuple(tensor.shape) != expected:
            raise ExportError(f"{ours}: expected the shape {expected}, found {tuple(tensor.shape)}")
        tensor = tensor.to(device="cpu", dtype=dtype).contiguous()
        if not torch.isfinite(tensor).all():
            raise ExportError(f"{ours}: expected finite weights in {dtype}, found NaN or infinity; take an older state")
        weights[theirs] = tensor
    return weights


@contextmanager
def new_folder(out_dir: Path) -> Iterator[Path]:
    """A folder that gets its name once it is filled. Raises `ExportError`: the name is taken, or it is not writable."""
    folder = None
    try:
        if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            raise ExportError(f"expected {out_dir} to be a new or empty folder; name another, or remove what is there")
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        yield folder
        folder.chmod(0o755)
        folder.replace(out_dir)
    except OSError as error:
        raise ExportError(f"cannot write the export {out_dir}: {error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
