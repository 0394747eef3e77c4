"""Files that are there whole or not at all: temporary file, fsync, rename or link, fsync of the folder.

Guarantees: after `TemporaryFile.replace` or `link` and `sync_folder` return, the file survives a power cut; before,
nothing of it is visible under its name. A temporary file is locked (``flock``) by the process that writes it for as
long as that lives, so a leftover is told from a file in use without trusting process ids, which are reused and mean
nothing across containers. The trade-off: POSIX only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from genesis.file_lock import try_lock

LEFTOVER_PREFIX = ".tmp-"
"""Names of temporary files begin so; no object key can."""

_LOCK_GRACE_S = 60.0
"""A file younger than this is left alone: its writer may be between creating and locking it."""

_UNLOCKABLE_GRACE_S = 86_400.0
"""The same on file systems without locks, where age is all there is to judge by."""

_DIRECT_BYTES = 1 << 20
_PAGE_BYTES = mmap.PAGESIZE

_WRITE_BYTES = 1 << 30
"""Linux writes at most 2 GiB a call."""

logger = logging.getLogger(__name__)


class TemporaryFile:
    """A new file under a hidden name, to be given its real name once it is whole; removed if it never gets one."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{LEFTOVER_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try_lock(self._fd)
        except OSError as error:
            # Some network file systems have no locks: the leftovers there are only judged by age.
            logger.debug("%s cannot be locked: %s", self._path, error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Unlinked before the lock goes: a renamed file is no longer there, which is the usual case.
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def write(self, body: memoryview) -> None:
        """Writes all of ``body`` and waits until it is on the disk."""
        written = _write_direct(self._fd, body)
        while written < len(body):
            written += os.write(self._fd, body[written : written + _WRITE_BYTES])
        # File systems stamp files with a clock of some 4 ms and hand freed inodes out again at once; an exact stamp
        # keeps two objects of one size, written one after the other, apart.
        now = time.time_ns()
        os.utime(self._fd, ns=(now, now))
        os.fsync(self._fd)

    def status(self) -> os.stat_result:
        """The file's own ``stat``."""
        return os.fstat(self._fd)

    def replace(self, target: Path) -> None:
        """Gives the file the name ``target``, in the place of a file that has it."""
        self._path.replace(target)

    def link(self, target: Path) -> None:
        """Gives the file the name ``target`` too.

        Raises:
            FileExistsError: a file has that name.
        """
        os.link(self._path, target, follow_symlinks=False)


def _write_direct(descriptor: int, body: memoryview) -> int:
    """Writes the whole pages of a large, page-aligned ``body`` past the page cache; returns how many bytes.

    A 20 MB shard costs 1.5 ms of processor time this way and 10 ms through the cache, from which nothing would read
    it back (measured on ext4). Zero where the system, the file system or the memory does not allow it.
    """
    if not hasattr(os, "O_DIRECT") or len(body) < _DIRECT_BYTES or body.readonly or _address(body) % _PAGE_BYTES:
        return 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        return os.write(descriptor, body[: min(len(body), _WRITE_BYTES) // _PAGE_BYTES * _PAGE_BYTES])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _address(body: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(body))


def sync_folder(folder: Path) -> None:
    """Makes names that were added to ``folder`` or removed from it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Creates ``folder`` and the ones above it that are missing, durably."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "there is a file where a folder is needed", str(folder)) from None
    sync_folder(folder.parent)


def remove_leftovers(folder: Path, grace_s: float = _LOCK_GRACE_S) -> int:
    """Removes temporary files directly in ``folder`` whose writers are gone.

    Args:
        folder: where.
        grace_s: younger files are left alone; 0 where the caller has locked the folder against other writers.

    Returns:
        How many were removed.
    """
    removed = 0
    with os.scandir(folder) as entries:
        names = [Path(entry.path) for entry in entries if entry.name.startswith(LEFTOVER_PREFIX)]
    for path in names:
        try:
            removed += _remove_if_abandoned(path, grace_s)
        except OSError as error:
            logger.debug("left %s alone: %s", path, error)
    if removed:
        logger.info("removed %d unfinished files that a stopped process left in %s", removed, folder)
    return removed


def _remove_if_abandoned(path: Path, grace_s: float) -> bool:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        age_s = time.time() - os.fstat(descriptor).st_mtime
        if age_s < grace_s or not _lock_is_free(descriptor, otherwise=age_s > _UNLOCKABLE_GRACE_S):
            return False
        path.unlink()
    finally:
        os.close(descriptor)
    return True


def _lock_is_free(descriptor: int, *, otherwise: bool) -> bool:
    """Takes the lock and returns True if it was free; returns ``otherwise`` if the file system has no locks."""
    try:
        return try_lock(descriptor)
    except OSError:
        return otherwise
