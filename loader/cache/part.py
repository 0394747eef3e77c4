"""A file while it is being made: by one process, in the open, and never half in place.

The life of a part: claimed (exclusive lock: one maker among all processes and threads), reserved (room made, its full
length counted and its blocks allocated, so that a full disk is met before anything is fetched, and never as SIGBUS),
filled, published (renamed, and mapped by its maker), closed. A maker that dies anywhere on this way leaves at most a
part without a lock, which the next one takes over or sweeps away.

Nothing is synced to the disk. After a power cut a published file may hold zeros; it is verified at every open and then
made anew. Syncing would add 15 to 25 ms (on a quiet solid-state disk, far more on a busy one) to the 8 ms that a 20 MB
file takes.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from genesis.file_lock import leads_to
from loader.cache.degraded import Degraded
from loader.cache.folder import evict, folder_lock, make_room, part_path, scan
from loader.cache.locks import keep_shared, open_exclusive, release
from loader.cache.mapping import map_descriptor, touch
from loader.cache.sizes import format_size

__all__ = ["Part"]

_WRITE_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Part:
    """The part of one file, locked by this object; a context manager that leaves neither lock nor leftover."""

    def __init__(self, folder: Path, name: str, descriptor: int, lock_timeout_s: float) -> None:
        self._folder = folder
        self._path = part_path(folder, name)
        self._final_path = folder / name
        self._descriptor = descriptor
        self._lock_timeout_s = lock_timeout_s
        self._is_closed = False

    @classmethod
    def claim(cls, folder: Path, name: str, lock_timeout_s: float) -> Part | None:
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
        # While the part is ours nobody publishes; but someone may have between the first look and the lock.
        if os.path.lexists(folder / name):
            part.close()
            return None
        return part

    def __enter__(self) -> Part:
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
        os.ftruncate(self._descriptor, 0)  # What a dead maker left counts no more.
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
        """Something else fills the disk: the cache gives way, as if its bound were lower."""
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
            return map_descriptor(self._descriptor, len(data))
        finally:
            os.close(self._descriptor)

    def close(self) -> None:
        """Removes the part unless it was published, and frees its lock. Once is enough."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):  # The next maker sweeps it.
            if leads_to(self._path, self._descriptor):
                self._path.unlink()
        release(self._descriptor)
