"""A cached file as memory.

The mapping is private (copy on write): writing to it changes this process's pages only, and processes that only read
share one copy in the page cache. The shared lock lives in the mapping itself, for mmap keeps a duplicate of the
descriptor: no close call and no reference counter says when a file may go, only the last view of it.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loader.cache.locks import open_shared
from loader.errors import CorruptObjectError

__all__ = ["Identity", "Mapped", "map_descriptor", "map_file", "touch"]


class Identity(NamedTuple):
    """Which file it is, and which content: writing to it gives it another time."""

    device: int
    inode: int
    size_bytes: int
    written_at_ns: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """A mapped file."""

    view: memoryview
    identity: Identity


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
        identity = Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        return Mapped(map_descriptor(descriptor, size_bytes), identity)
    finally:
        os.close(descriptor)


def map_descriptor(descriptor: int, size_bytes: int) -> memoryview:
    """Maps an open file; its lock then lives as long as the view, even when the descriptor is closed.

    Raises:
        OSError: it cannot be mapped.
    """
    return memoryview(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY))


def touch(target: Path | int) -> None:
    """Notes that a file was used now; where that is not permitted it is only removed sooner.

    The time of access is set and that of writing is kept, which tells if a file is still the one that was verified.
    The clock is read here: the kernel's own stamp is up to 4 ms old, too coarse for an order of use.
    """
    with suppress(OSError):
        written_at_ns = os.stat(target).st_mtime_ns  # noqa: PTH116 - it may be a descriptor
        os.utime(target, ns=(time.time_ns(), written_at_ns))
