"""Checks before a process of a swarm begins: errors that a restart does not mend, and one process for a name.

A checkpoint folder that is a file, checkpoints of another cut, a journal of other data: such an end is exit code 2, so
that `swarm up` and service managers (systemd's ``RestartPreventExitStatus=2``) do not restart the process. A failure
after it has served keeps its own class and exit code 1: another start may well succeed.

Two processes with the same ``--node-id`` on one machine would announce themselves in turn under one key. A lock beside
the key's file prevents that; the system releases it with the process, however that ends. A key that was copied to
another machine is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from genesis.file_lock import FileLock, FileLockedError
from trainer.errors import CheckpointError, LedgerError, TrainerUsageError
from trainer.run.config import RunConfig
from trainer.run.node.identity import identity_path

__all__ = ["as_usage_errors", "only_process"]


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Encloses what a process reads and opens before it serves.

    Raises:
        TrainerUsageError: a checkpoint or an account that it was given cannot be used.
    """
    try:
        yield
    except (CheckpointError, LedgerError) as error:
        raise TrainerUsageError(str(error)) from error


@contextmanager
def only_process(config: RunConfig) -> Iterator[None]:
    """Nobody else goes by this name and state folder meanwhile.

    Args:
        config: whose ``node_id`` and ``state_dir`` it is.

    Raises:
        TrainerUsageError: somebody does, or the folder cannot be written.
    """
    file = identity_path(config).with_suffix(".lock")
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except FileLockedError:
        raise TrainerUsageError(
            f"--node-id {config.node_id}: expected a name of its own, found that another process with the key in "
            f"{file.parent} is running; give this one another --node-id or state_dir (a second swarm up: another "
            "--folder)"
        ) from None
    except OSError as error:
        raise TrainerUsageError(f"state_dir: expected a folder that can be written, found {error}") from error
    try:
        yield
    finally:
        lock.release()
