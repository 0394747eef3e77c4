"""Reads a folder of torch.distributed.checkpoint, torchtitan's, without running anything in it.

Its ``.metadata`` is a pickle, which torch loads without restrictions; here only the dozen classes that describe tensors
are allowed. Tensors are read by ``weights_only``, and only those that are wanted.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from trainer.checkpoint.stages.huggingface import METADATA_NAME
from trainer.errors import CheckpointError, CorruptCheckpointError
from trainer.network.transfer.descriptor import MAX_EXTENT

_MAX_METADATA_BYTES: Final = 256 << 20
_MAX_DIMENSIONS: Final = 16

_LAYOUTS: Final = {"torch.strided": torch.strided, "strided": torch.strided}


def _layout(name: str) -> torch.layout:
    if name not in _LAYOUTS:
        raise pickle.UnpicklingError(f"a tensor of layout {name[:40]}")
    return _LAYOUTS[name]


def _member(encoding: object, name: object) -> Any:
    """The ``getattr`` as which Python 3.11.0 to 3.11.3 pickle a member of an enumeration, here of one alone."""
    formats = dcp_metadata._MEM_FORMAT_ENCODING
    if encoding is not formats or not isinstance(name, str) or name not in formats.__members__:
        raise pickle.UnpicklingError("an attribute, which describes no tensor")
    return formats[name]


_ALLOWED: Final[Mapping[tuple[str, str], Any]] = {
    **{
        (dcp_metadata.__name__, name): getattr(dcp_metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("builtins", "getattr"): _member,
    **{(module, name): PurePosixPath for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "Path")},
}


@contextmanager
def without_process_group() -> Iterator[None]:
    """Silences the warning of torch's save and load about one process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


class _DescriptionUnpickler(pickle.Unpickler):
    """Builds descriptions of tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Resolves the allowed names, or raises `pickle.UnpicklingError`."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module[:60]}.{name[:60]}, which describes no tensor")


class _Reader(FileSystemReader):
    """torch's reader with a given description."""

    def __init__(self, path: Path, description: Metadata) -> None:
        super().__init__(path)
        self._description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description."""
        return self._description


class DcpFolder:
    """The tensors of a folder, by name. Raises `CorruptCheckpointError`: its description is missing or invalid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._description = _described(path)
        self._tensors = {
            name: entry
            for name, entry in self._description.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors."""
        return {name: tuple(entry.size) for name, entry in self._tensors.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads tensors. Raises `CheckpointError`: one is missing; `CorruptCheckpointError`: one is unreadable."""
        wanted = list(names)
        missing = [name for name in wanted if name not in self._tensors]
        if missing:
            raise CheckpointError(f"{self._path}: expected the tensors {', '.join(missing[:3])}, found none")
        try:
            state: dict[str, Tensor] = {
                name: torch.empty(self._tensors[name].size, dtype=self._tensors[name].properties.dtype)
                for name in wanted
            }
            with without_process_group():
                load(state, storage_reader=_Reader(self._path, self._description), no_dist=True)
        except (Exception, CheckpointException) as error:
            # Damage causes any of a dozen errors; torch's own is not an Exception.
            raise CorruptCheckpointError(
                f"{self._path}: expected whole tensors, found {type(error).__name__}; copy the folder again"
            ) from error
        return state


def _described(path: Path) -> Metadata:
    source = path / METADATA_NAME
    try:
        if source.stat().st_size > _MAX_METADATA_BYTES:
            raise CorruptCheckpointError(f"{source}: expected at most {_MAX_METADATA_BYTES} bytes, found more")
        found = _DescriptionUnpickler(io.BytesIO(source.read_bytes())).load()
    except CorruptCheckpointError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{source}: expected a description of tensors, found {str(error)[:120] or type(error).__name__}"
        ) from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CorruptCheckpointError(f"{source}: expected a description of tensors, found {type(found).__name__}")
    entries = found.state_dict_metadata
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        raise CorruptCheckpointError(f"{source}: expected descriptions by the tensors' names, found others")
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and not _is_possible(entry):
            raise CorruptCheckpointError(f"{source}: expected {name[:60]!r} of a type and shape, found neither")
    if not all(isinstance(info, _StorageInfo) and _is_beside(info) for info in found.storage_data.values()):
        raise CorruptCheckpointError(f"{source}: expected tensors in files beside it, found them elsewhere")
    if found.storage_meta is None:
        found.storage_meta = StorageMeta()
    return found


def _is_possible(entry: TensorStorageMetadata) -> bool:
    """Whether a described tensor is possible; a pickle may set attributes to anything, or leave them out."""
    shape = getattr(entry, "size", None)
    properties = getattr(entry, "properties", None)
    if not isinstance(shape, tuple) or len(shape) > _MAX_DIMENSIONS or not all(type(each) is int for each in shape):
        return False
    extent = math.prod(filter(None, shape))
    return (
        min(shape, default=0) >= 0
        and extent < MAX_EXTENT
        and isinstance(getattr(properties, "dtype", None), torch.dtype)
    )


def _is_beside(info: _StorageInfo) -> bool:
    """Whether it names a file in the folder, and possible bytes of a file."""
    name, offset, length = (getattr(info, field, None) for field in ("relative_path", "offset", "length"))
    if type(offset) is not int or type(length) is not int or offset < 0 or not 0 <= length < MAX_EXTENT:
        return False
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name
