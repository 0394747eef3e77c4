"""Whether workers of this machine write a stage's checkpoints now: rolling back under them would be undone by the next.

Each worker holds a shared lock (`flock`) on ``{run}/.{stage}.lock`` from before it reads a checkpoint until it has
ended; rolling back takes it alone, or is refused. The system gives locks up with the process, however that ends.
Reading needs none: files are replaced whole. Not seen are workers of other machines, and those in a folder whose file
system has no locks (some network ones): there one that writes goes on without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from genesis.file_lock import FileLock, FileLockedError
from genesis.store.durable import make_folders
from trainer.errors import CheckpointError

__all__ = ["alone_with", "held_by_writer", "locked_stages"]

_WAIT_S = 20.0
"""For somebody who rolls back to have moved the files."""


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
    lock = _lock(run, stage, shared=True)
    try:
        lock.acquire(_WAIT_S)
    except FileLockedError:
        raise CheckpointError(
            f"{run}: expected to begin with checkpoints of {stage}, found them being rolled back for more than "
            f"{_WAIT_S:g} s; start again when that has ended"
        ) from None
    with lock:
        yield


@contextmanager
def alone_with(run: Path, stages: Iterable[str]) -> Iterator[None]:
    """No worker of this machine writes checkpoints of these stages meanwhile.

    Raises:
        CheckpointError: some do.
        OSError: the folder cannot be written to.
    """
    with ExitStack() as stack:
        in_use = []
        for stage in sorted(stages):
            try:
                stack.enter_context(_lock(run, stage, shared=False))
            except FileLockedError:
                in_use.append(stage)
        if in_use:
            raise CheckpointError(
                f"{run}: expected no worker that writes here, found one or more of {', '.join(in_use)} running, which "
                "would go on from what they know; stop the run's workers first, and do it again"
            )
        yield


def locked_stages(run: Path) -> list[str]:
    """Stages that somebody has written here, now or before."""
    return sorted(lock.name[1 : -len(".lock")] for lock in run.glob(".*.lock"))


def _lock(run: Path, stage: str, *, shared: bool) -> FileLock:
    return FileLock(run / f".{stage}.lock", shared=shared, required=False)
