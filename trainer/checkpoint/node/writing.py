"""A checkpoint file on the disk, whole or not at all.

The order is everything: the temporary file is written and fsynced; linked under the name of its step; renamed over the
newest; the folder is fsynced; then the oldest go. Killed between any two of these, the newest is the one before or this
one, both whole. Room is needed for one more than are kept.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import IO, Final, cast

import torch
from typing_extensions import Buffer

from genesis.store.durable import sync_folder
from trainer.checkpoint.node.digest import tree_digest
from trainer.checkpoint.node.naming import kept_path, kept_paths, set_aside_later, temporary_path, twin_path

__all__ = ["DIGEST", "FORMAT", "FORMAT_KEY", "write_checkpoint", "write_whole"]

FORMAT_KEY: Final = "format"
FORMAT: Final = "genesis-checkpoint-1"
DIGEST: Final = "sha256"

_WRITE_BYTES: Final = 1 << 30
"""Linux writes at most 2 GiB a call."""

logger = logging.getLogger(__name__)


def write_checkpoint(newest: Path, contents: dict[str, object], step: int, keep: int) -> None:
    """Makes contents the newest checkpoint; by one process at a time.

    Args:
        newest: of `checkpoint_path`; its folder is there.
        contents: tensors on the CPU and plain values; ``format`` and ``sha256`` are added.
        step: which it is of.
        keep: how many there are in the end.

    Raises:
        OSError: it cannot be written. What was there before is as it was.
    """
    temporary, twin = temporary_path(newest), twin_path(newest)
    for leftover in (temporary, twin):
        # Never written into: it may be a kept checkpoint under another name, where a process was killed half-way.
        leftover.unlink(missing_ok=True)
    try:
        write_whole(temporary, contents)
        _keep(temporary, twin, kept_path(newest, step))
        temporary.replace(newest)
    finally:
        temporary.unlink(missing_ok=True)
    set_aside = set_aside_later(newest, step)
    sync_folder(newest.parent)
    if set_aside:
        logger.warning(
            "the run went back to step %d: checkpoints of later steps are set aside as %s",
            step,
            ", ".join(path.name for path in set_aside),
        )
    for path in kept_paths(newest)[keep:]:
        path.unlink()


def write_whole(path: Path, contents: dict[str, object]) -> None:
    """Writes contents and their digest to a new file, and waits until all of it is on the disk.

    Args:
        path: where nothing is yet; it has to be renamed to be a checkpoint.
        contents: tensors on the CPU and plain values; ``format`` and ``sha256`` are added.

    Raises:
        OSError: it cannot be written, or something is there.
    """
    document = {FORMAT_KEY: FORMAT, DIGEST: tree_digest(contents), **contents}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    sink = _Sink(descriptor)
    try:
        torch.save(document, cast(IO[bytes], sink))
        os.fsync(descriptor)
    except (OSError, RuntimeError):
        # torch ends its archive even on a disk that is full, and complains of that: the first error says why.
        if sink.error is not None:
            raise sink.error from None
        raise
    finally:
        os.close(descriptor)


def _keep(temporary: Path, twin: Path, kept: Path) -> None:
    """Gives the file its second name, in the place of another attempt at the same step."""
    try:
        os.link(temporary, twin)
    except OSError as error:
        logger.warning("%s: only the newest checkpoint is kept, since a file cannot have two names there", error)
        return
    twin.replace(kept)


class _Sink:
    """Where torch writes to: every byte, or the error that the system gave."""

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
