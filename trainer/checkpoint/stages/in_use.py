"""Whether workers of this machine write a stage's checkpoints now: rolling back under them would be undone by the next.

Each worker holds a shared lock (`flock`) on ``{run}/.{stage}.lock`` from before it reads a checkpoint until it has
ended; rolling back takes it alone, or is refused. The system gives locks up with the process, however that ends.
Reading needs none: files are replaced whole. Not seen are workers of other machines, and those in a folder whose file
system has no locks (some network ones): there one that writes goes on without.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from genesis.store.durable import make_folders
from trainer.errors import CheckpointError

__all__ = ["alone_with", "held_by_writer", "locked_stages"]

logger = logging.getLogger(__name__)

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_WAIT_S = 20.0
"""For somebody who rolls back to have moved the files."""
_LOOK_S = 0.05


@contextmanager
def held_by_writer(run: Path, stage: str) -> Iterator[None]:
    """A worker writes a stage's checkpoints meanwhile.

    Args:
        run: folder of `trainer.checkpoint.stages.naming.run_folder`.
        stage: which.

    Raises:
        CheckpointError: somebody is rolling back, and does not end.
        OSError: the folder cannot be written to.
    """
    make_folders(run)
    with _opened(run, stage) as descriptor:
        deadline_s = time.monotonic() + _WAIT_S
        while not _taken(descriptor, fcntl.LOCK_SH):
            if time.monotonic() >= deadline_s:
                raise CheckpointError(
                    f"{run}: expected to begin with checkpoints of {stage}, found them being rolled back for more than "
                    f"{_WAIT_S:g} s; start again when that has ended"
                )
            time.sleep(_LOOK_S)
        yield


@contextmanager
def alone_with(run: Path, stages: Iterable[str]) -> Iterator[None]:
    """No worker of this machine writes checkpoints of these stages meanwhile.

    Raises:
        CheckpointError: some do.
        OSError: the folder cannot be written to.
    """
    with ExitStack() as stack:
        locks = {stage: stack.enter_context(_opened(run, stage)) for stage in sorted(stages)}
        in_use = [stage for stage, lock in locks.items() if not _taken(lock, fcntl.LOCK_EX)]
        if in_use:
            raise CheckpointError(
                f"{run}: expected no worker that writes here, found one or more of {', '.join(in_use)} running, which "
                "would go on from what they know; stop the run's workers first, and do it again"
            )
        yield


def locked_stages(run: Path) -> list[str]:
    """Stages that somebody has written here, now or before."""
    return sorted(lock.name[1 : -len(".lock")] for lock in run.glob(".*.lock"))


@contextmanager
def _opened(run: Path, stage: str) -> Iterator[int]:
    descriptor = os.open(run / f".{stage}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # And with it the lock.


def _taken(descriptor: int, kind: int) -> bool:
    """Whether the lock was to be had; where the file system has none, it was."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.debug("no locks in this file system: %s", error)
    return True
