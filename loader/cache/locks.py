"""File locks of which the kernel keeps the books.

All locks are flock(2): they belong to the open file description, so two opens in one process exclude each other like
two processes do, a lock ends with the last descriptor (or mapping) of its description, and a process killed in any way
leaves none behind. Nothing here blocks: a lock is had at once or not at all, and who waits does so with a deadline.

A lock on a file says nothing about its *name*: between open and flock another process may have renamed or removed the
file. So a lock counts only if the name still leads to the locked file.

A child forked meanwhile shares the description, and with it the lock. For a mapping that is right. An exclusive lock
belongs to the parent alone: it is given back explicitly, never by closing, and the child closes its copies, so that the
death of the parent frees it even while the child lives.
"""

from __future__ import annotations

import os
from pathlib import Path

from genesis.file_lock import leads_to, try_lock, unlock

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Never through a symbolic link; never waiting for the other end of what turns out to be a pipe."""

_exclusive: set[int] = set()
"""Descriptors of this process with an exclusive lock."""


def open_exclusive(path: Path, *, create: bool = False) -> int | None:
    """Opens a file and locks it against everyone.

    Args:
        path: the file; a symbolic link there is an error.
        create: make it if it is not there, and open it for writing.

    Returns:
        A descriptor for `release` or `keep_shared`, or None: it is locked, or not there (any more).

    Raises:
        OSError: it cannot be opened or locked.
    """
    try:
        descriptor = os.open(path, _FLAGS | (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY), 0o644)
    except FileNotFoundError:
        if create:
            raise
        return None
    _exclusive.add(descriptor)
    try:
        locked = try_lock(descriptor) and leads_to(path, descriptor)
    except BaseException:
        release(descriptor)
        raise
    if not locked:
        release(descriptor)
        return None
    return descriptor


def open_shared(path: Path) -> int | None:
    """Opens a file for reading, locked so that no process evicts it; the caller closes the descriptor.

    Returns:
        The descriptor, or None: it is exclusively locked, or not there (any more).

    Raises:
        OSError: it cannot be opened or locked.
    """
    try:
        descriptor = os.open(path, _FLAGS | os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        locked = try_lock(descriptor, shared=True) and leads_to(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    if not locked:
        os.close(descriptor)
        return None
    return descriptor


def keep_shared(descriptor: int) -> bool:
    """Turns an exclusive lock into a shared one; the caller then closes the descriptor, not `release`.

    Returns:
        False if another came in between (the kernel does not change a lock in one step): then there is no lock, and the
        descriptor is `release`'s still.

    Raises:
        OSError: the lock cannot be changed.
    """
    kept = try_lock(descriptor, shared=True)
    if kept:
        _exclusive.discard(descriptor)
    return kept


def release(descriptor: int) -> None:
    """Gives an exclusive lock back, also from children that were forked meanwhile, and closes the descriptor."""
    if descriptor not in _exclusive:
        return  # We are such a child: it was closed at the fork, and the lock is the parent's.
    try:
        unlock(descriptor)
    finally:
        _exclusive.discard(descriptor)
        os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in tuple(_exclusive):
        os.close(descriptor)
    _exclusive.clear()


os.register_at_fork(after_in_child=_close_in_child)
