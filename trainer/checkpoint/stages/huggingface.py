"""Reads a Hugging Face folder of safetensors, and finds a folder's fingerprint without reading all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from trainer.model import ModelConfig
from trainer.model.huggingface import config_from_hf, differences, hf_names
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
_SUFFIX: Final = ".safetensors"
_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
_LARGEST_CONFIG_BYTES: Final = 1 << 20
_LARGEST_INDEX_BYTES: Final = 32 << 20


class HfFolder:
    """A model folder. Raises `CheckpointError`: the config or the weights are missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = _object(path / CONFIG_NAME, _LARGEST_CONFIG_BYTES)
        self._files = self._places()

    def require(self, config: ModelConfig) -> None:
        """Checks all but the vocabulary. Raises `CheckpointMismatchError`: the architecture differs, by its fields."""
        wrong = differences(self.config, config)
        if wrong:
            raise CheckpointMismatchError(
                f"{self._path}: expected the run's architecture, found {', '.join(wrong)}; change the run's model or "
                "take another checkpoint"
            )

    @property
    def config(self) -> ModelConfig:
        """The shape it states, with its own rows. Raises `CheckpointMismatchError`: it is of no family read here."""
        return config_from_hf(self._values, str(self._path / CONFIG_NAME))

    @property
    def files(self) -> list[Path]:
        """The files of weights, by name."""
        return [self._path / name for name in sorted(set(self._files.values()) or {_WEIGHTS})]

    def names(self, config: ModelConfig) -> dict[str, str]:
        """The tensors' names by our names of parameters."""
        names = hf_names(config)
        if self._values.get("tie_word_embeddings") and OUTPUT in names:
            # Stages have an output matrix of their own, which begins as the embedding's.
            names[OUTPUT] = names[EMBEDDING]
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it. Raises `CheckpointError`: it is missing or unreadable."""
        with self._opened(name) as opened:
            return tuple(opened.get_slice(name).get_shape())

    def stated(self, names: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of these tensors by name, each file opened once. Raises `CheckpointError`: see `shape`."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of(name), []).append(name)
        found = {}
        for group in by_file.values():
            with self._opened(group[0]) as opened:
                there = set(opened.keys())
                for name in group:
                    if name not in there:
                        raise CheckpointMismatchError(f"{self._path}: expected a tensor {name}, found none")
                    part = opened.get_slice(name)
                    found[name] = (str(part.get_dtype()), tuple(part.get_shape()))
        return found

    def all_names(self) -> set[str]:
        """The names of all tensors of all files. Raises `CheckpointError`: a file is missing or unreadable."""
        names: set[str] = set()
        for file in self.files:
            with self._reading(file, "header") as opened:
                names |= set(opened.keys())
        return names

    def read(self, name: str) -> Tensor:
        """Reads a tensor. Raises `CheckpointError`: it is missing or unreadable."""
        with self._opened(name) as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def _places(self) -> Mapping[str, str]:
        """The file of each tensor; empty if there is one file for all."""
        if not (self._path / _INDEX).is_file():
            if not (self._path / _WEIGHTS).is_file():
                pickled = next((name for name in _PICKLES if (self._path / name).exists()), "neither")
                raise CheckpointError(
                    f"{self._path}: expected {_WEIGHTS} or {_INDEX}, found {pickled}"
                    + ("" if pickled == "neither" else "; pickles can run code and are not read: convert it first")
                )
            return {}
        found = _object(self._path / _INDEX, _LARGEST_INDEX_BYTES).get("weight_map")
        if (
            not isinstance(found, dict)
            or not found
            or not all(
                isinstance(file, str) and Path(file).name == file and file.endswith(_SUFFIX) for file in found.values()
            )
        ):
            raise CorruptCheckpointError(f"{self._path / _INDEX}: expected a weight_map of {_SUFFIX} files beside it")
        return found

    def _file_of(self, name: str) -> str:
        if self._files and name not in self._files:
            raise CheckpointMismatchError(f"{self._path}: expected a tensor {name}, found none in {_INDEX}")
        return self._files.get(name, _WEIGHTS)

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """The file of a tensor, whose errors become ours."""
        with self._reading(self._path / self._file_of(name), f"tensor {name}") as opened:
            yield opened

    @contextmanager
    def _reading(self, file: Path, what: str) -> Iterator[Any]:
        try:
            if not file.is_file():  # A pipe would be waited for.
                raise FileNotFoundError(f"no file {file.name}")
            with safe_open(file, framework="pt") as opened:
                yield opened
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpointError(f"{self._path}: expected a whole {what}, found: {str(error)[:120]}") from error


def _object(path: Path, largest_bytes: int) -> dict[str, Any]:
    try:
        if path.stat().st_size > largest_bytes or not path.is_file():
            raise CorruptCheckpointError(f"{path}: expected a file of at most {largest_bytes} bytes, found another")
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
