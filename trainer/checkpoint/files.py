"""Checkpoint files: written whole or not at all, and believed only if their digest fits.

A file is what ``torch.save`` makes of tensors and plain values, with ``format`` and ``sha256`` added, and is read by
``torch.load(weights_only=True)``, which runs nothing. The digest is one sha256 over names, types, dtypes, shapes and
values, each preceded by its kind and length, so that no two different trees have the same bytes; some 1.8 GB/s.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import stat
import struct
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from typing_extensions import Buffer

from genesis.store.durable import sync_folder
from trainer.errors import CheckpointMismatchError, CorruptCheckpointError

if TYPE_CHECKING:
    from hashlib import _Hash

logger = logging.getLogger(__name__)

FORMAT_KEY: Final = "format"
_FORMAT: Final = "genesis-checkpoint-1"
DIGEST: Final = "sha256"

_WRITE_BYTES: Final = 1 << 30  # Linux writes at most 2 GiB a call.
_ARCHIVE: Final = b"PK\x03\x04"


def write_file(path: Path, contents: dict[str, object], *, second_name: Path | None = None) -> None:
    """Writes tensors on the CPU and plain values with their digest; by one process at a time for each path.

    The order is everything: a temporary file is written and fsynced, linked under its second name (if the file system
    has hard links), and renamed; then the folder is fsynced. Killed between any two of these, the file is the one
    before or this one, both whole. Raises `OSError`: it cannot be written, and what was there before is unchanged.
    """
    temporary, twin = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.twin.tmp")
    # Never written into: a process killed half-way may have left a checkpoint's second name.
    temporary.unlink(missing_ok=True)
    try:
        _write_synced(temporary, contents)
        if second_name is not None:
            twin.unlink(missing_ok=True)
            try:
                os.link(temporary, twin)
            except OSError as error:
                logger.warning("%s: only the newest is kept, since a file cannot have two names there: %s", path, error)
            else:
                twin.replace(second_name)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _write_synced(path: Path, contents: dict[str, object]) -> None:
    document = {FORMAT_KEY: _FORMAT, DIGEST: tree_digest(contents), **contents}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    sink = _Sink(descriptor)
    try:
        torch.save(document, cast(IO[bytes], sink))
        os.fsync(descriptor)
    except (OSError, RuntimeError):
        # torch finishes its archive even on a full disk, and reports that: the first error is the cause.
        if sink.error is not None:
            raise sink.error from None
        raise
    finally:
        os.close(descriptor)


class _Sink:
    """A file object for torch that writes every byte, or keeps the error that the system gave."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.error: OSError | None = None

    def write(self, body: Buffer) -> int:
        view = memoryview(body).cast("B")
        written = 0
        try:
            while written < len(view):
                written += os.write(self._descriptor, view[written : written + _WRITE_BYTES])
        except OSError as error:
            self.error = self.error or error
            raise
        return written

    def flush(self) -> None:
        """Nothing is held back."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of one file, tensors on the CPU.

    Raises `CorruptCheckpointError`: it is damaged, or no checkpoint; `CheckpointMismatchError`: of a later release.
    """
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damage causes any of a dozen errors; torch's advice to load a refused pickle all the same is left out.
        found = "a pickle that is no tree of tensors and plain values"
        if not isinstance(error, pickle.UnpicklingError):
            found = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        raise _corrupt(path, found) from error
    if not isinstance(document, dict) or not isinstance(document.get(FORMAT_KEY), str):
        raise _corrupt(path, "a file of another kind")
    if document[FORMAT_KEY] != _FORMAT:
        raise CheckpointMismatchError(
            f"{path}: expected a checkpoint of format {_FORMAT}, found {document[FORMAT_KEY][:40]!r}; "
            "use the release that wrote it"
        )
    contents = {key: value for key, value in document.items() if key not in (FORMAT_KEY, DIGEST)}
    try:
        digest = tree_digest(contents)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _corrupt(path, str(error)) from error
    if digest != document.get(DIGEST):
        raise _corrupt(path, f"contents of {digest[:12]} under the digest {str(document.get(DIGEST))[:12]}")
    return contents


def _corrupt(path: Path, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: expected a whole checkpoint, found {found}")


def what_is_wrong(path: Path) -> str:
    """Describes what is wrong with a file, as far as can be seen without reading its tensors; empty for an archive.

    torch's own errors for damaged files are obscure, and it reads on for ever if the name leads to a device.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return "a folder"
        if not stat.S_ISREG(status.st_mode):
            return "a device or pipe"
        if not status.st_size:
            return "an empty file"
        with path.open("rb") as file:
            begin = file.read(len(_ARCHIVE))
            if zipfile.is_zipfile(file):
                return ""
    except FileNotFoundError:
        return "a link that leads nowhere" if path.is_symlink() else "no file any more"
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"
    if begin == _ARCHIVE:
        return f"one cut short, of {status.st_size:,} bytes"
    return "a file of another kind"


def tree_digest(tree: object) -> str:
    """The digest of a tree of CPU tensors and plain values in hex. Raises `TypeError`: another type."""
    digest = hashlib.sha256()
    _add(digest, tree)
    return digest.hexdigest()


def _add(digest: _Hash, value: object) -> None:
    kind = type(value)
    if isinstance(value, Tensor):
        values = value.detach().contiguous().reshape(-1)
        head = f"{value.dtype} {tuple(value.shape)}".encode()
        digest.update(b"t%d;%s" % (len(head), head))
        digest.update(values.view(torch.uint8).numpy().data)
    elif kind is dict and isinstance(value, dict):
        digest.update(b"d%d;" % len(value))
        for key, item in value.items():
            _add_plain(digest, key)
            _add(digest, item)
    elif kind in (list, tuple) and isinstance(value, list | tuple):
        digest.update(b"%c%d;" % (b"l" if kind is list else b"u", len(value)))
        for item in value:
            _add(digest, item)
    else:
        _add_plain(digest, value)


def _add_plain(digest: _Hash, value: object) -> None:
    kind = type(value)
    if value is None:
        spelled = b""
    elif kind is str and isinstance(value, str):
        spelled = value.encode("utf-8", "surrogatepass")
    elif kind is float and isinstance(value, float):
        spelled = struct.pack("<d", value)
    elif kind in (int, bool) and isinstance(value, int):
        spelled = hex(value).encode()
    else:
        raise TypeError(f"expected tensors and plain values, found {kind.__name__}")
    digest.update(b"%s%d;" % (kind.__name__.encode(), len(spelled)))
    digest.update(spelled)
