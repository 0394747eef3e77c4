"""What keeps a process of a swarm from beginning, told apart from what ends one at work.

A checkpoint folder that is a file, checkpoints of another cut, a journal of other data: started again with the same
run file it would find the same. Such an end is exit code 2, like options that make no sense, by which `swarm up` and
service managers (systemd's ``RestartPreventExitStatus=2``) know that only a person can help. What fails once a process
has served keeps its own class and exit code 1: another start may well do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import CheckpointError, LedgerError, TrainerUsageError

__all__ = ["beginning"]


@contextmanager
def beginning() -> Iterator[None]:
    """Around what a process reads and opens before it serves.

    Raises:
        TrainerUsageError: a checkpoint or an account that it was given cannot be used.
    """
    try:
        yield
    except (CheckpointError, LedgerError) as error:
        raise TrainerUsageError(str(error)) from error
