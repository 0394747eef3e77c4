"""Reads a Hugging Face folder of safetensors, and finds a folder's fingerprint without reading all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from trainer.model import ModelConfig
from trainer.model.export import hf_names
from trainer.model.init import EMBEDDING, OUTPUT

CONFIG_NAME: Final = "config.json"
METADATA_NAME: Final = ".metadata"
"""Of a folder of torch.distributed.checkpoint; `dcp` itself takes a third of a worker's start to import."""
_WHOLE_BYTES: Final = 64 << 20
_EDGE_BYTES: Final = 1 << 20
_NUM_BLOCKS: Final = 256
_BLOCK_BYTES: Final = 1 << 16
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_CLASSES: Final = {"LlamaForCausalLM": False, "Olmo2ForCausalLM": True}
"""Whether queries, keys and outputs are normalised."""


class HfFolder:
    """A model folder. Raises `CheckpointError`: the config or the weights are missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = _object(path / CONFIG_NAME)
        self._files = self._places()

    def require(self, config: ModelConfig) -> None:
        """Checks all but the vocabulary. Raises `CheckpointMismatchError`: the architecture differs, by its fields."""
        classes = self._config.get("architectures") or ["none"]
        named = str(classes[0] if isinstance(classes, list) else classes)
        if named not in _CLASSES:
            raise CheckpointMismatchError(f"{self._path}: expected one of {', '.join(_CLASSES)}, found {named[:60]}")
        expected = _fields(config)
        found = self._stated(_CLASSES[named], expected)
        wrong = [f"{name} {found[name]!r} (here {value!r})" for name, value in expected.items() if found[name] != value]
        if wrong:
            raise CheckpointMismatchError(
                f"{self._path}: expected the run's architecture, found {', '.join(wrong)}; change the run's model or "
                "take another checkpoint"
            )

    @property
    def files(self) -> list[Path]:
        """The files of weights, by name."""
        return [self._path / name for name in sorted(set(self._files.values()) or {_WEIGHTS})]

    def names(self, config: ModelConfig) -> dict[str, str]:
        """The tensors' names by our names of parameters."""
        names = hf_names(config)
        if self._config.get("tie_word_embeddings") and OUTPUT in names:
            # Stages have an output matrix of their own, which begins as the embedding's.
            names[OUTPUT] = names[EMBEDDING]
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it. Raises `CheckpointError`: it is missing or unreadable."""
        with self._opened(name) as opened:
            return tuple(opened.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Reads a tensor. Raises `CheckpointError`: it is missing or unreadable."""
        with self._opened(name) as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def _places(self) -> Mapping[str, str]:
        """The file of each tensor; empty if there is one file for all."""
        if not (self._path / _INDEX).is_file():
            if not (self._path / _WEIGHTS).is_file():
                raise CheckpointError(f"{self._path}: expected {_WEIGHTS} or {_INDEX}, found neither")
            return {}
        found = _object(self._path / _INDEX).get("weight_map")
        if not isinstance(found, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in found.values()
        ):
            raise CorruptCheckpointError(f"{self._path / _INDEX}: expected a weight_map of files in this folder")
        return found

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """The file of a tensor, whose errors become ours."""
        if self._files and name not in self._files:
            raise CheckpointMismatchError(f"{self._path}: expected a tensor {name}, found none in {_INDEX}")
        try:
            with safe_open(self._path / self._files.get(name, _WEIGHTS), framework="pt") as opened:
                yield opened
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpointError(
                f"{self._path}: expected a whole tensor {name}, found: {str(error)[:120]}"
            ) from error

    def _stated(self, is_olmo2: bool, expected: Mapping[str, object]) -> dict[str, object]:
        """The same fields in the folder's config, with transformers' defaults."""
        config = self._config
        # transformers 5 has it in rope_parameters, 4 beside it.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope = rope if isinstance(rope, dict) else {}
        heads, dim = config.get("num_attention_heads"), config.get("hidden_size")
        fallback = dim // heads if isinstance(heads, int) and isinstance(dim, int) and heads > 0 else None
        found: dict[str, object] = {name: config.get(name) for name in expected}
        return found | {
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or fallback,
            "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            "rope_type": rope.get("rope_type") or rope.get("type") or "default",
            "hidden_act": config.get("hidden_act", "silu"),
            "attention_bias": bool(config.get("attention_bias")),
            "mlp_bias": bool(config.get("mlp_bias")),
            "qk_norm": is_olmo2,
            "reorder_norm": is_olmo2,
        }


def _fields(config: ModelConfig) -> dict[str, object]:
    """The fields that must agree, by the config's names."""
    return {
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": float(config.rope_theta),
        "rope_type": "default",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": config.qk_norm,
        "reorder_norm": config.reorder_norm,
    }


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: expected JSON, found: {str(error)[:120]}") from error
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path}: expected an object, found {type(found).__name__}")
    return found


def fingerprint(path: str | Path) -> str:
    """16 hexadecimal digits for the weights of a folder that `load_initial_state` reads.

    They cover each file's size and its bytes: all up to 64 MiB, else the first and last MiB (where safetensors has the
    tensors' places) and 256 blocks of 64 KiB at even distances. Another model, or another step of the same, differs in
    nearly every block; this guards against mistakes, not forgery. Raises `CheckpointError`: the folder has another
    form; `CorruptCheckpointError`: a file is unreadable.
    """
    folder = Path(path).expanduser()
    digest = hashlib.blake2b(digest_size=8)
    try:
        if (folder / METADATA_NAME).is_file():
            files = sorted(folder.glob("*.distcp"))
        elif (folder / CONFIG_NAME).is_file():
            files = HfFolder(folder).files
        else:
            raise no_model(folder)
        for file in files:
            with file.open("rb") as opened:
                size_bytes = os.fstat(opened.fileno()).st_size
                digest.update(size_bytes.to_bytes(8, "big"))
                for offset, num_bytes in _samples(size_bytes):
                    opened.seek(offset)
                    digest.update(opened.read(num_bytes))
    except OSError as error:
        raise CorruptCheckpointError(f"{folder}: expected files that can be read, found: {error}") from error
    return digest.hexdigest()


def no_model(folder: Path) -> CheckpointError:
    """The error for a folder that has weights in neither form."""
    return CheckpointError(
        f"{folder}: expected a Hugging Face folder ({CONFIG_NAME} and safetensors) or a torchtitan checkpoint "
        f"({METADATA_NAME}), found neither; name the folder of one step"
    )


def _samples(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of the blocks of a file."""
    if size_bytes <= _WHOLE_BYTES:
        yield from ((offset, _EDGE_BYTES) for offset in range(0, size_bytes, _EDGE_BYTES))
        return
    yield 0, _EDGE_BYTES
    for number in range(_NUM_BLOCKS):
        yield number * (size_bytes - _BLOCK_BYTES) // (_NUM_BLOCKS - 1), _BLOCK_BYTES
    yield size_bytes - _EDGE_BYTES, _EDGE_BYTES
