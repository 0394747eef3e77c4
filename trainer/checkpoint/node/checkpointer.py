"""`Checkpointer`: saves periodically without delaying training, one process a wallet.

While a save is being written, a periodic one is left out and counted: a slow disk makes checkpoints rarer and never
delays training. An error of the disk is raised by the next call; the save after that tries again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self, cast

from genesis.file_lock import FileLock, FileLockedError
from genesis.store.durable import make_folders, sync_folder
from trainer.checkpoint.files import DIGEST, FORMAT_KEY, write_file
from trainer.checkpoint.node.naming import checkpoint_path, kept_path, kept_paths, lock_path, set_aside_later
from trainer.checkpoint.saver import TIMEOUT_S, BackgroundSaver, Staged
from trainer.errors import CheckpointError, TrainerUsageError

__all__ = ["Checkpointer"]

_STEP = "training_rounds"

logger = logging.getLogger(__name__)


class Checkpointer(BackgroundSaver):
    """Writes the checkpoints of a wallet.

    Args:
        directory: folder of all checkpoints, ``~`` allowed; made if it is missing.
        wallet: of `wallet_id`.
        keep: how many are kept, the newest included.
        instance: distinguishes instances that one wallet runs side by side.

    Raises:
        TrainerUsageError: an argument is out of range.
    """

    def __init__(self, directory: str | os.PathLike[str], wallet: str, keep: int = 3, *, instance: str = "") -> None:
        if keep < 1:
            raise TrainerUsageError(f"keep: expected 1 or more checkpoints, found {keep}")
        self._path = checkpoint_path(directory, wallet, instance)
        super().__init__(self._path, "checkpoint")
        self._keep = keep
        self._lock = FileLock(lock_path(self._path))

    @property
    def path(self) -> Path:
        """Path of the newest checkpoint."""
        return self._path

    def open(self) -> None:
        """Takes the wallet's lock, as a save does too; call it before training begins, so that nothing is lost.

        Raises:
            CheckpointError: another process has it, or the folder cannot be written to.
        """
        if self._lock.is_locked:
            return
        try:
            make_folders(self._path.parent)
            self._lock.acquire()
        except FileLockedError:
            raise CheckpointError(
                f"expected {self._path.name} to be this process's alone, found another one training with the same "
                f"wallet ({lock_path(self._path)} is locked); stop it, or give this one another --token, --node-id or "
                "checkpoint folder"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{self._path.parent}: expected a folder for checkpoints that can be written to, found: {error}"
            ) from error

    def save(self, contents: Mapping[str, object], *, wait: bool = False, timeout_s: float = TIMEOUT_S) -> bool:
        """Saves the state as it is now; it may change as soon as this returns.

        Args:
            contents: tensors and plain values (`CheckpointContents.to_mapping`); ``training_rounds`` names the file.
            wait: never leave this save out, and return once it is on the disk; a failure of the save before is then
                only logged.
            timeout_s: how long to wait.

        Returns:
            Whether it was begun; False if the one before was still being written.

        Raises:
            CheckpointError: this save, or without ``wait`` the one before, could not be written, or ``contents`` cannot
                be saved. The state is unchanged, and the checkpoint before is whole.
        """
        deadline = time.monotonic() + timeout_s
        self.open()
        if wait:
            self._settle(timeout_s)
        elif self.busy:
            self.skipped += 1
            return False
        self.flush(timeout_s)
        step = _step_of(contents)
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

    def _settle(self, timeout_s: float) -> None:
        """Waits for the save before; its failure is only logged."""
        try:
            self.flush(timeout_s)
        except CheckpointError as failure:
            if not self._is_settled:
                raise
            logger.warning("%s; trying again", failure)

    def _write(self, staged: Staged, step: int) -> None:
        began = time.perf_counter()
        staged.wait()
        try:
            write_checkpoint(self._path, cast(dict[str, object], staged.tree), step, self._keep)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._path}: expected to write the checkpoint of step {step}, found: {error}; free some space or "
                "name another folder (the checkpoint before is whole)"
            ) from error
        self.saved += 1
        logger.debug("checkpoint of step %d written in %.2f s", step, time.perf_counter() - began)


def _step_of(contents: Mapping[str, object]) -> int:
    step = contents.get(_STEP)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"contents[{_STEP!r}]: expected the number of steps taken, found {step!r}")
    for reserved in (FORMAT_KEY, DIGEST):
        if reserved in contents:
            raise CheckpointError(f"contents: expected no key {reserved!r}, which the file itself uses; rename it")
    return step


def write_checkpoint(newest: Path, contents: dict[str, object], step: int, keep: int) -> None:
    """Makes contents the newest checkpoint, and removes the oldest; by one process at a time.

    Room is needed for one more than are kept.

    Args:
        newest: of `checkpoint_path`; its folder exists.
        contents: tensors on the CPU and plain values.
        step: names the kept file.
        keep: how many are kept.

    Raises:
        OSError: it cannot be written. The checkpoints before are unchanged.
    """
    write_file(newest, contents, second_name=kept_path(newest, step))
    set_aside = set_aside_later(newest, step)
    if set_aside:
        sync_folder(newest.parent)
        logger.warning(
            "the run went back to step %d: checkpoints of later steps are set aside as %s",
            step,
            ", ".join(path.name for path in set_aside),
        )
    for path in kept_paths(newest)[keep:]:
        path.unlink()
