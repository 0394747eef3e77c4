"""Files that are elsewhere, read by ranges: only the bytes asked for travel, and no file is downloaded whole.

`RangeReader` is what the Hub, buckets and web servers have in common; `RangeFile` makes a seekable file of it, for
pyarrow. Retries, addresses and credentials are each reader's own.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator

from typing_extensions import Buffer

from genesis.sources.base import InputFile

WINDOW_BYTES = 16 << 20
"""Range asked for at a time when a file is read from end to end: at 100 MB/s and 50 ms a request, 3/4 of the line."""


class RangeReader(ABC):
    """Reads ranges of one file of a plan; safe to use from one thread at a time."""

    def __init__(self, file: InputFile) -> None:
        self._file = file

    @property
    def size_bytes(self) -> int:
        """The file's length, as the plan has it."""
        return self._file.size_bytes

    @abstractmethod
    def read(self, start: int, end: int) -> bytearray:
        """Bytes ``start:end``, cut off at the file's end.

        Raises:
            InputChangedError: it is not the file of the plan any more.
            SourceError: it cannot be read, or not by ranges.
        """

    def windows(self) -> Iterator[bytearray]:
        """The file from its first byte to its last, `WINDOW_BYTES` at a time."""
        for start in range(0, self.size_bytes, WINDOW_BYTES):
            yield self.read(start, start + WINDOW_BYTES)


class RangeFile(io.RawIOBase):
    """`RangeReader` as a seekable file, for pyarrow: every read is one range."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """The next ``size`` bytes (all the rest if negative) in one request."""
        end = self._reader.size_bytes if size is None or size < 0 else self._position + size
        data = self._reader.read(self._position, end)
        self._position += len(data)
        return bytes(data)

    def readall(self) -> bytes:
        """All the rest."""
        return self.read(-1)

    def readinto(self, buffer: Buffer) -> int:
        """Fills the buffer as far as the file goes."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)
