"""What a node resumes from (spec T-23): its fields, the newest file that is whole, and `Checkpointer`, which saves.

The fields lie at the top of the file, so ``torch.load(path, weights_only=True)["layers"]`` is the model's. The inner
loop's state is split for that: ``optimizer`` is AdamW's, ``schedule`` the rest of it. A slow disk makes checkpoints
rarer and never delays training; an error of the disk is raised by the next call, and the save after that tries again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor

from genesis.file_lock import FileLock, FileLockedError
from genesis.store.durable import make_folders, sync_folder
from trainer.checkpoint.files import DIGEST, FORMAT_KEY, read_checkpoint, write_file
from trainer.checkpoint.node.naming import checkpoint_path, kept_path, kept_paths, lock_path, set_aside_later
from trainer.checkpoint.saver import TIMEOUT_S, BackgroundSaver, Staged
from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError, TrainerUsageError

logger = logging.getLogger(__name__)

_VERSION: Final = 1
_OPTIONAL: Final = frozenset({"num_ids"})
_STEP: Final = "training_rounds"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """Everything a node resumes from: tensors, and plain values that ``weights_only`` loads."""

    layer_ids: tuple[int, ...]
    architecture: Mapping[str, Any]
    """The model's configuration, which wins over the run file's when the node starts again."""
    layers: Mapping[str, Mapping[str, Tensor]]  # Parameters by stage or layer, then by name.
    optimizer: Mapping[str, Any]  # AdamW's state, ``optimizer`` of `InnerLoop.state_dict`.
    diloco: Mapping[str, Any]  # Anchor, outer momentum, position within the inner steps; empty without DiLoCo.
    training_rounds: int  # Steps taken, which names the file.
    current_loss: float
    timestamp: float  # Seconds since 1970.
    loader: Mapping[str, Any]
    rng: Mapping[str, Any]  # From `rng_state`.
    config: Mapping[str, Any]  # The run's resolved configuration.
    schedule: Mapping[str, Any]  # The inner loop's state without ``optimizer``: step index, steps dropped.
    num_ids: int | None = None  # Size of the vocabulary that losses are over; None in checkpoints of earlier releases.
    version: int = _VERSION

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name; nothing is copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The inverse of `to_mapping`. Raises `CheckpointMismatchError`: other fields, or of another release."""
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
    """The contents of the newest checkpoint that is whole, tensors on the CPU; None if there is no file at all.

    Raises:
        CorruptCheckpointError: there are files, and none is whole.
        CheckpointMismatchError: a later release wrote the newest one.
    """
    newest = checkpoint_path(directory, wallet, instance)
    damaged: list[str] = []
    seen: list[os.stat_result] = []
    for path in (newest, *kept_paths(newest)):
        try:
            status = path.stat()
        except FileNotFoundError:  # There is none, or the writer has just removed it.
            continue
        if any(os.path.samestat(status, other) for other in seen):  # The second name of the newest.
            continue
        seen.append(status)
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


class Checkpointer(BackgroundSaver):
    """Writes the checkpoints of a wallet; keeps so many. Raises `TrainerUsageError`: an argument is out of range."""

    def __init__(self, directory: str | os.PathLike[str], wallet: str, keep: int = 3, *, instance: str = "") -> None:
        if keep < 1:
            raise TrainerUsageError(f"keep: expected 1 or more checkpoints, found {keep}")
        self.path: Path = checkpoint_path(directory, wallet, instance)
        super().__init__(self.path, "checkpoint")
        self._keep = keep
        self._lock = FileLock(lock_path(self.path))

    def open(self) -> None:
        """Takes the wallet's lock. Raises `CheckpointError`: another process has it, or the folder is not writable."""
        if self._lock.is_locked:
            return
        try:
            make_folders(self.path.parent)
            self._lock.acquire()
        except FileLockedError:
            raise CheckpointError(
                f"expected {self.path.name} to be this process's alone, found another one training with the same "
                f"wallet ({lock_path(self.path)} is locked); stop it, or give this one another --token, --node-id or "
                "checkpoint folder"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{self.path.parent}: expected a folder for checkpoints that can be written to, found: {error}"
            ) from error

    def save(self, contents: Mapping[str, object], *, wait: bool = False, timeout_s: float = TIMEOUT_S) -> bool:
        """Saves the state as it is now; returns whether it was begun, which it is not while another is being written.

        The contents (`CheckpointContents.to_mapping`) may change afterwards. With ``wait`` it is never left out, is on
        the disk when this returns, and a failure of the save before is only logged.

        Raises:
            CheckpointError: this save, or without ``wait`` the one before, could not be written, or ``contents`` cannot
                be saved. The state is unchanged, and the checkpoint before is whole.
        """
        deadline = time.monotonic() + timeout_s
        self.open()
        if wait:
            try:
                self.flush(timeout_s)
            except CheckpointError as failure:
                if not self._is_settled:
                    raise
                logger.warning("%s; trying again", failure)
        elif self.busy:
            self.skipped += 1
            return False
        self.flush(timeout_s)
        step = contents.get(_STEP)
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"contents[{_STEP!r}]: expected the number of steps taken, found {step!r}")
        for reserved in (FORMAT_KEY, DIGEST):
            if reserved in contents:
                raise CheckpointError(f"contents: expected no key {reserved!r}, which the file itself uses; rename it")
        self._begin(contents, lambda staged: self._write(staged, step))
        if wait:
            self.flush(max(0.0, deadline - time.monotonic()))
        return True

    def __enter__(self) -> Self:
        self.open()
        return self

    def _release(self) -> None:
        if self._is_settled:  # A write that hangs still needs the lock.
            self._lock.release()

    def _write(self, staged: Staged, step: int) -> None:
        began = time.perf_counter()
        contents = staged()
        try:
            write_file(self.path, contents, second_name=kept_path(self.path, step))
            set_aside = set_aside_later(self.path, step)
            if set_aside:
                sync_folder(self.path.parent)
                names = ", ".join(path.name for path in set_aside)
                logger.warning(
                    "the run went back to step %d: checkpoints of later steps are set aside as %s", step, names
                )
            for path in kept_paths(self.path)[self._keep :]:
                path.unlink()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: expected to write the checkpoint of step {step}, found: {error}; free some space or "
                "name another folder (the checkpoint before is whole)"
            ) from error
        self.saved += 1
        logger.debug("checkpoint of step %d written in %.2f s", step, time.perf_counter() - began)
