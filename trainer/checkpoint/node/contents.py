"""The fields of a node's checkpoint (spec T-23) and those that make resuming exact; the newest file that is whole.

The former keep their names and lie at the top of the file, so ``torch.load(path, weights_only=True)["layers"]`` is
the model's. The inner loop's state is split for that: ``optimizer`` is AdamW's, ``schedule`` the rest of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor

from trainer.checkpoint.files import read_checkpoint
from trainer.checkpoint.node.naming import checkpoint_path, kept_paths
from trainer.errors import CheckpointMismatchError, CorruptCheckpointError

__all__ = ["CheckpointContents", "load_newest", "read_checkpoint"]

logger = logging.getLogger(__name__)

_VERSION: Final = 1
_OPTIONAL: Final = frozenset({"num_ids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """Everything a node resumes from: tensors, and plain values that ``weights_only`` loads."""

    layer_ids: tuple[int, ...]
    """Layers of this node."""
    architecture: Mapping[str, Any]
    """The model's configuration, which wins over the run file's when the node starts again."""
    layers: Mapping[str, Mapping[str, Tensor]]
    """Parameters by stage or layer, then by name."""
    optimizer: Mapping[str, Any]
    """AdamW's state, ``optimizer`` of `InnerLoop.state_dict`."""
    diloco: Mapping[str, Any]
    """Anchor, outer momentum, position within the inner steps; empty without DiLoCo."""
    training_rounds: int
    """Steps taken, which names the file."""
    current_loss: float
    """Of the latest step."""
    timestamp: float
    """Seconds since 1970."""
    loader: Mapping[str, Any]
    """State of the data stream."""
    rng: Mapping[str, Any]
    """From `rng_state`."""
    config: Mapping[str, Any]
    """The run's resolved configuration."""
    schedule: Mapping[str, Any]
    """The inner loop's state without ``optimizer``: step index, steps dropped."""
    num_ids: int | None = None
    """Size of the vocabulary that losses are over; None in checkpoints of earlier releases."""
    version: int = _VERSION
    """Version of these fields."""

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name; nothing is copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The inverse of `to_mapping`.

        Raises:
            CheckpointMismatchError: fields are missing or unknown, or another release wrote them.
        """
        if mapping.get("version") != _VERSION:
            raise CheckpointMismatchError(
                f"expected a checkpoint of version {_VERSION}, found {mapping.get('version')!r}; "
                "use the release that wrote it"
            )
        names = {field.name for field in fields(cls)}
        missing, unknown = sorted(names - set(mapping) - _OPTIONAL), sorted(set(mapping) - names)
        if missing or unknown:
            raise CheckpointMismatchError(
                f"expected the fields of a checkpoint, found {missing or 'none'} missing, {unknown or 'none'} unknown"
            )
        return cls(**mapping)

    def inner_state(self) -> dict[str, Any]:
        """For `InnerLoop.load_state_dict`."""
        return {**self.schedule, "optimizer": self.optimizer}


def load_newest(directory: str | os.PathLike[str], wallet: str, instance: str = "") -> dict[str, Any] | None:
    """The contents of the newest checkpoint that is whole.

    Args:
        directory: folder of all checkpoints.
        wallet: of `wallet_id`.
        instance: as when it was saved.

    Returns:
        The contents, tensors on the CPU; None if there is no file at all.

    Raises:
        CorruptCheckpointError: there are files, and none is whole.
        CheckpointMismatchError: a later release wrote the newest one.
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


def _candidates(newest: Path) -> list[Path]:
    """Newest first, without the second name of the newest."""
    kept = kept_paths(newest)
    try:
        own = newest.stat()
    except FileNotFoundError:
        return kept
    return [newest, *(path for path in kept if not _is(path, own))]


def _is(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:  # The writer has just removed it.
        return True
