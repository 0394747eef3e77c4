"""One file of the cache: made by one process, never half in place, and mapped into memory.

A part is claimed (exclusive lock: one maker among all processes and threads), reserved (room made, its full length
counted and its blocks allocated, so that a full disk is met before anything is fetched, and never as SIGBUS), filled,
published (renamed, and mapped by its maker) and closed. A maker that dies on the way leaves at most a part without a
lock, which the next one takes over or removes. Nothing is synced to the disk, which would add 15 to 25 ms to the 8 ms
that a 20 MB file takes: after a power cut a published file may hold zeros, but it is verified when it is opened.

A mapping is private (copy on write): writing to it changes this process's pages only, and readers share one copy in the
page cache. The shared lock lives in the mapping itself, since mmap keeps a duplicate of the descriptor: a file is in
use until the last view of it is gone.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from genesis.file_lock import leads_to
from loader.cache.folder import Degraded, evict, folder_lock, make_room, part_path, scan
from loader.cache.locks import keep_shared, open_exclusive, open_shared, release
from loader.cache.settings import format_size
from loader.errors import CorruptObjectError

_WRITE_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class PartFile:
    """The part of one file, locked by this object; a context manager that leaves neither lock nor leftover."""

    def __init__(self, folder: Path, name: str, descriptor: int, lock_timeout_s: float) -> None:
        self._folder = folder
        self._path = part_path(folder, name)
        self._final_path = folder / name
        self._descriptor = descriptor
        self._lock_timeout_s = lock_timeout_s
        self._is_closed = False

    @classmethod
    def claim(cls, folder: Path, name: str, lock_timeout_s: float) -> PartFile | None:
        """Claims the making of a file.

        Returns:
            None if another is making it, or it is there.

        Raises:
            OSError: the folder cannot be made or written.
        """
        if os.path.lexists(folder / name):
            return None
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = open_exclusive(part_path(folder, name), create=True)
        if descriptor is None:
            return None
        part = cls(folder, name, descriptor, lock_timeout_s)
        # Another maker may have published it between the first check and the lock.
        if os.path.lexists(folder / name):
            part.close()
            return None
        return part

    def __enter__(self) -> PartFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reserve(self, size_bytes: int, max_bytes: int) -> None:
        """Makes room for the file, within the bound and on the disk.

        Raises:
            Degraded: there is no room within the bound.
            OSError: there is none on the disk, or the folder cannot be written.
        """
        os.ftruncate(self._descriptor, 0)  # Drops what a dead maker left.
        wanted = f"expected room for {format_size(size_bytes)} within {format_size(max_bytes)}"
        if size_bytes > max_bytes:
            raise Degraded("size", f"{wanted}: raise --cache-bytes")
        with folder_lock(self._folder, self._lock_timeout_s):
            if not make_room(self._folder, size_bytes, max_bytes):
                raise Degraded(
                    "room", f"{wanted}, found too much of it open in this or other processes: raise --cache-bytes"
                )
            os.ftruncate(self._descriptor, size_bytes)
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._reserve_on_full_disk(size_bytes)

    def _reserve_on_full_disk(self, size_bytes: int) -> None:
        """Frees space as if the bound were lower: something else fills the disk."""
        with folder_lock(self._folder, self._lock_timeout_s):
            evict(scan(self._folder), size_bytes)
        os.posix_fallocate(self._descriptor, 0, size_bytes)

    def publish(self, data: memoryview) -> memoryview:
        """Writes the file, puts it into place and maps it.

        Args:
            data: uint8[size], as many bytes as were reserved.

        Returns:
            A view of the file; its lock lives as long as the view.

        Raises:
            Degraded: the folder's lock was not free in time.
            OSError: it cannot be written.
        """
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written : written + _WRITE_BYTES], written)
        touch(self._descriptor)
        with folder_lock(self._folder, self._lock_timeout_s):
            if not leads_to(self._path, self._descriptor):
                raise FileNotFoundError(errno.ENOENT, "the file being made was removed", str(self._path))
            self._path.replace(self._final_path)
            if not keep_shared(self._descriptor):
                raise BlockingIOError(errno.EAGAIN, "the finished file is locked by another", str(self._final_path))
        self._is_closed = True
        try:
            return _map_descriptor(self._descriptor, len(data))
        finally:
            os.close(self._descriptor)

    def close(self) -> None:
        """Removes the part unless it was published, and frees its lock."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):  # The next maker removes it.
            if leads_to(self._path, self._descriptor):
                self._path.unlink()
        release(self._descriptor)


class FileIdentity(NamedTuple):
    """Identifies a file and its content: whoever writes to it changes the times, and cannot restore the last."""

    device: int
    inode: int
    size_bytes: int
    written_at_ns: int
    changed_at_ns: int
    """Of the inode, to which also `touch` counts: a file that another process has opened since is another."""

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity of a file with this status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class Mapped:
    """A mapped file."""

    view: memoryview
    identity: FileIdentity


def map_file(path: Path, size_bytes: int) -> Mapped | None:
    """Maps a finished file of the cache.

    Returns:
        All of it, or None: it is not there, or being removed.

    Raises:
        CorruptObjectError: it is of another size.
        OSError: it cannot be opened, locked or mapped.
    """
    descriptor = open_shared(path)
    if descriptor is None:
        return None
    try:
        # A mapping beyond the end of its file would be SIGBUS.
        found = os.fstat(descriptor)
        if found.st_size != size_bytes:
            raise CorruptObjectError(f"expected {size_bytes} bytes, found {found.st_size}")
        return Mapped(_map_descriptor(descriptor, size_bytes), FileIdentity.of(found))
    finally:
        os.close(descriptor)


def _map_descriptor(descriptor: int, size_bytes: int) -> memoryview:
    """Maps an open file; its lock then lives as long as the view, even when the descriptor is closed."""
    return memoryview(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY))


def touch(target: Path | int) -> None:
    """Sets the time of last use to now; if that is not permitted, the file is only removed sooner.

    The time of writing is kept, since it identifies the content. The clock is read here: the kernel's own stamp is up
    to 4 ms old, too coarse for an order of use.
    """
    with suppress(OSError):
        written_at_ns = os.stat(target).st_mtime_ns  # noqa: PTH116 - it may be a descriptor
        os.utime(target, ns=(time.time_ns(), written_at_ns))
