"""Finding the newest checkpoint that is whole. Nothing in a file is believed before its digest fits.

A file is read by ``torch.load(weights_only=True)``, which makes tensors and plain values and runs nothing; whatever it
or the digest does not like makes the file a damaged one, and the one before it is taken, with a warning.
"""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.node.digest import tree_digest
from trainer.checkpoint.node.naming import checkpoint_path, kept_paths
from trainer.checkpoint.node.writing import DIGEST, FORMAT, FORMAT_KEY
from trainer.errors import CheckpointMismatchError, CorruptCheckpointError

__all__ = ["load_newest", "read_checkpoint"]

logger = logging.getLogger(__name__)


def load_newest(directory: str | os.PathLike[str], wallet: str, instance: str = "") -> dict[str, Any] | None:
    """The contents of the newest checkpoint that is whole.

    Args:
        directory: of all checkpoints.
        wallet: of `wallet_id`.
        instance: as when it was saved.

    Returns:
        The contents, tensors on the CPU; None if there is no file at all.

    Raises:
        CorruptCheckpointError: there are files, and none is whole.
        CheckpointMismatchError: the newest one is of a release to come.
    """
    newest = checkpoint_path(directory, wallet, instance)
    damaged: list[str] = []
    for path in _candidates(newest):
        try:
            contents = read_checkpoint(path)
        except CorruptCheckpointError as error:
            logger.warning("%s; going on to the one before it", error)
            damaged.append(path.name)
            continue
        if damaged:
            logger.warning("took %s in the place of %s", path.name, ", ".join(damaged))
        return contents
    if damaged:
        raise CorruptCheckpointError(
            f"expected a whole checkpoint in {newest.parent}, found only damaged ones ({', '.join(damaged)}); "
            "move them away to begin anew"
        )
    return None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of one file.

    Raises:
        CorruptCheckpointError: it is damaged, or no checkpoint.
        CheckpointMismatchError: it is of a release to come.
    """
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damage shows as any of a dozen errors, by where it sits: in the archive, the pickle, a shape, a dtype.
        raise _corrupt(path, _spell(error)) from error
    if not isinstance(document, dict) or not isinstance(document.get(FORMAT_KEY), str):
        raise _corrupt(path, "a file of another kind")
    if document[FORMAT_KEY] != FORMAT:
        raise CheckpointMismatchError(
            f"{path}: expected a checkpoint of format {FORMAT}, found {document[FORMAT_KEY][:40]!r}; "
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


def _candidates(newest: Path) -> list[Path]:
    """Newest first; the kept file that is the newest under its other name is left out."""
    kept = kept_paths(newest)
    try:
        own = newest.stat()
    except FileNotFoundError:
        return kept
    return [newest, *(path for path in kept if not _is(path, own))]


def _is(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:  # Whoever writes them has just dropped it: there is nothing to read.
        return True


def _spell(error: Exception) -> str:
    """An error of torch's in a line; of a pickle it refuses it says how to load it all the same: not here."""
    if isinstance(error, pickle.UnpicklingError):
        return "a pickle that is no tree of tensors and plain values"
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _corrupt(path: Path, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: expected a whole checkpoint, found {found}")
