"""Files that grow during an export, and get their name only once they are whole.

``NAME.part`` is written from one end to the other; what was synced at a checkpoint is on the disk, and going on cuts
the file back to the size it had there. Its name is given by a rename, before which all of it is synced. A run that
was killed between two such renames finds a file that has its name already, and takes it back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from genesis.errors import StoreError
from genesis.store.durable import sync_folder
from genesis.store.folder import folder_errors

PART_ENDING = ".part"
_WRITE_BYTES = 1 << 30
"""Linux writes at most 2 GiB a call."""


@dataclass(slots=True)
class GrowingFile:
    """A file in the making; use `open`.

    Attributes:
        path: the name it will have.
        size_bytes: written so far.
    """

    path: Path
    size_bytes: int
    _descriptor: int

    @classmethod
    def open(cls, path: Path, size_bytes: int) -> GrowingFile:
        """Opens ``path``.part, of which the first ``size_bytes`` are kept.

        Raises:
            StoreError: it cannot be opened, or holds less than that.
        """
        part = part_of(path)
        with folder_errors(path.parent, f"write {part}"):
            if size_bytes and not part.exists() and path.exists():
                path.replace(part)
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            found = os.fstat(descriptor).st_size
            if found < size_bytes:
                os.close(descriptor)
                raise StoreError(
                    f"{part}: expected at least {size_bytes} bytes from the run before, found {found}: it was changed "
                    "since; delete the files of this export and run the same command again"
                )
            os.ftruncate(descriptor, size_bytes)
            os.lseek(descriptor, size_bytes, os.SEEK_SET)
        return cls(path, size_bytes, descriptor)

    def write(self, body: Buffer) -> None:
        """Appends ``body``.

        Raises:
            StoreError: there is no space, or the disk fails.
        """
        view = memoryview(body).cast("B")
        with folder_errors(self.path.parent, f"write {part_of(self.path)}", size_bytes=len(view)):
            written = 0
            while written < len(view):
                written += os.write(self._descriptor, view[written : written + _WRITE_BYTES])
        self.size_bytes += len(view)

    def overwrite(self, body: bytes, offset: int) -> None:
        """Puts ``body`` over what is there at ``offset``.

        Raises:
            StoreError: the disk fails.
        """
        with folder_errors(self.path.parent, f"write {part_of(self.path)}"):
            os.pwrite(self._descriptor, body, offset)

    def truncate(self, size_bytes: int) -> None:
        """Gives up what is behind the first ``size_bytes``."""
        with folder_errors(self.path.parent, f"write {part_of(self.path)}"):
            os.ftruncate(self._descriptor, size_bytes)
            os.lseek(self._descriptor, size_bytes, os.SEEK_SET)
        self.size_bytes = size_bytes

    def read_int64(self, offset: int, count: int) -> npt.NDArray[np.int64]:
        """``count`` little-endian integers at the byte ``offset``; int64[count]."""
        with folder_errors(self.path.parent, f"read {part_of(self.path)}"):
            body = os.pread(self._descriptor, 8 * count, offset)
        return np.frombuffer(body, dtype="<i8", count=count)

    def sync(self) -> None:
        """Waits until all that was written is on the disk."""
        with folder_errors(self.path.parent, f"write {part_of(self.path)}"):
            os.fsync(self._descriptor)

    def publish(self) -> None:
        """Gives the file its name; it is whole and on the disk."""
        self.sync()
        with folder_errors(self.path.parent, f"write {self.path}"):
            part_of(self.path).replace(self.path)
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Gives the descriptor back; what was written stays for a run that goes on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def part_of(path: Path) -> Path:
    """The name a file has while it grows."""
    return path.with_name(path.name + PART_ENDING)
