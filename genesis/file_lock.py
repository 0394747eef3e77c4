"""Locks on files between processes, by flock(2): the one way to exclude another process on this machine.

A lock belongs to the open file: two opens in one process exclude each other as two processes do, and the kernel gives a
lock back when its process ends, however that happens. Nothing here blocks in the kernel: waiting has a deadline. The
trade-off: POSIX only, advisory, and other machines are seen only where the file system passes locks on (NFSv4 does).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of file systems that have no locks."""

_POLL_S = 0.05


class FileLockedError(Exception):
    """Another process holds the lock, and held it until the deadline."""


class FileLock:
    """A lock on a file, which is made if it is not there and stays. ``with`` takes it at once, or raises.

    Any thread may release it. A child that is forked meanwhile shares it, until either releases it.

    Args:
        path: of the file; its folder must exist.
        shared: beside other shared locks; else alone.
        required: False: a file system without locks counts as an uncontended lock.
    """

    def __init__(self, path: Path, *, shared: bool = False, required: bool = True) -> None:
        self._path = path
        self._shared = shared
        self._required = required
        self._descriptor: int | None = None

    @property
    def is_locked(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def acquire(self, timeout_s: float = 0.0, *, poll_s: float = _POLL_S) -> None:
        """Takes the lock; without effect if this object holds it.

        Args:
            timeout_s: how long others may hold it still.
            poll_s: between two looks.

        Raises:
            FileLockedError: another process or thread holds it.
            OSError: the file cannot be opened or locked.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._descriptor is None:
            self._descriptor = self._opened()
            if self._descriptor is None:
                if time.monotonic() >= deadline_s:
                    raise FileLockedError(f"{self._path} is locked by another process")
                time.sleep(poll_s)

    def release(self) -> None:
        """Gives the lock back, if this object holds it."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            unlock(descriptor)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _opened(self) -> int | None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # Its last holder may have removed the file: then this lock would exclude no other process.
            if self._is_taken(descriptor) and leads_to(self._path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _is_taken(self, descriptor: int) -> bool:
        try:
            return try_lock(descriptor, shared=self._shared)
        except OSError as error:
            if self._required or error.errno not in NO_LOCKS:
                raise
            return True


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Locks an open file, or changes the lock it has.

    Args:
        descriptor: of the file.
        shared: beside other shared locks; else alone.

    Returns:
        False if another holder's lock excludes this one.

    Raises:
        OSError: the file cannot be locked.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Gives the lock of an open file back, also where a child that was forked meanwhile shares it; closing would not.

    Raises:
        OSError: the file has no lock that could be changed.
    """
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def leads_to(path: Path, descriptor: int) -> bool:
    """Whether the name `path` leads to the open file, and not to another or to none."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
