"""`Checkpointer`: saves now and then without holding training up, one process a wallet.

A save copies the state (`HostBuffers`) and returns; digest, writing and fsync run in one background thread. While that
is at work a periodic save is left out and counted: a slow disk makes checkpoints rarer, never training slower. What the
disk refused is told by the next call, with training as it was; the save after that tries again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from genesis.file_lock import FileLock, FileLockedError
from genesis.store.durable import make_folders
from trainer.checkpoint.node.background import TIMEOUT_S, BackgroundWrite, HostBuffers, Staged
from trainer.checkpoint.node.naming import checkpoint_path, lock_path
from trainer.checkpoint.node.writing import DIGEST, FORMAT_KEY, write_checkpoint
from trainer.errors import CheckpointError, TrainerUsageError

__all__ = ["Checkpointer"]

_STEP = "training_rounds"

logger = logging.getLogger(__name__)


class Checkpointer:
    """Writes the checkpoints of a wallet; a context manager.

    Args:
        directory: of all checkpoints, ``~`` allowed; made if it is missing.
        wallet: of `wallet_id`.
        keep: how many there are, the newest counted.
        instance: tells apart what one wallet runs side by side.

    Raises:
        TrainerUsageError: an argument is out of range.
    """

    def __init__(self, directory: str | os.PathLike[str], wallet: str, keep: int = 3, *, instance: str = "") -> None:
        if keep < 1:
            raise TrainerUsageError(f"keep: expected 1 or more checkpoints, found {keep}")
        self._path = checkpoint_path(directory, wallet, instance)
        self._keep = keep
        self._lock = FileLock(lock_path(self._path))
        self._buffers = HostBuffers()
        self._writing = BackgroundWrite(self._path, "checkpoint")
        self.saved = 0
        """Checkpoints written."""
        self.skipped = 0
        """Periodic saves left out because the one before was still being written."""

    @property
    def path(self) -> Path:
        """The newest checkpoint's."""
        return self._path

    @property
    def busy(self) -> bool:
        """Whether a save is being written now; a periodic one would be left out."""
        return self._writing.busy

    def open(self) -> None:
        """Takes the wallet's lock; a save does so too. Call it before training begins, so that nothing is lost.

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
            wait: return once it is on the disk, and leave it out in no case; a failure of the save before is then only
                logged, since this one takes its place.
            timeout_s: how long to wait.

        Returns:
            Whether it was taken; False if the one before was still being written.

        Raises:
            CheckpointError: this one, or without ``wait`` the one before, could not be written; or ``contents`` hold
                what cannot be saved. Nothing of the state was changed, and the checkpoint before is whole.
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
        staged = self._buffers.stage(contents)
        self._writing.begin(lambda: self._write(staged, step))
        if wait:
            self.flush(max(0.0, deadline - time.monotonic()))
        return True

    def flush(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits until the latest save is on the disk.

        Raises:
            CheckpointError: it could not be written, or not in time.
        """
        self._writing.flush(timeout_s)

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits for the latest save and gives the lock back.

        Raises:
            CheckpointError: that save could not be written.
        """
        try:
            self.flush(timeout_s)
        finally:
            self._writing.end()
            if self._writing.is_settled:  # One that hangs still writes under the lock.
                self._lock.release()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)  # What came first is the one to see.

    def _settle(self, timeout_s: float) -> None:
        """Waits for the save before; that it failed does not matter any more."""
        try:
            self.flush(timeout_s)
        except CheckpointError as failure:
            if not self._writing.is_settled:
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
