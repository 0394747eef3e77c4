"""The whole folder at once: listing it for people, and emptying it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loader.cache.degraded import Degraded, own_calls
from loader.cache.folder import FolderFile, folder_lock, is_open, remove_if_closed, scan
from loader.errors import CacheError

__all__ = ["CacheEntry", "ClearReport", "clear_folder", "list_entries"]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file in the cache."""

    name: str
    size_bytes: int
    last_used_at: datetime
    """When it was last opened; in UTC."""
    in_use: bool
    """Some process has it open."""
    complete: bool = True
    """False for a part: a file being made, or the leftover of a maker that died."""


@dataclass(frozen=True, slots=True)
class ClearReport:
    """What `ShardCache.clear` did."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    """Open in some process."""
    freed_bytes: int


def list_entries(folder: Path, lock_timeout_s: float) -> list[CacheEntry]:
    """The files and parts in a folder, least recently used first; none if it is not there.

    Raises:
        CacheError: it cannot be read.
    """
    with _whole(folder, lock_timeout_s) as files:
        return [
            CacheEntry(
                name=file.path.name,
                size_bytes=file.size_bytes,
                last_used_at=datetime.fromtimestamp(file.used_at_ns / 1e9, UTC),
                in_use=is_open(file.path),
                complete=file.complete,
            )
            for file in files
        ]


def clear_folder(folder: Path, lock_timeout_s: float) -> ClearReport:
    """Removes every file that is not open, and what dead processes left.

    Raises:
        CacheError: the folder cannot be read or written.
    """
    removed: list[str] = []
    kept: list[str] = []
    freed_bytes = 0
    with _whole(folder, lock_timeout_s) as files:
        for file in files:
            if remove_if_closed(file.path):
                removed.append(file.path.name)
                freed_bytes += file.size_bytes
            else:
                kept.append(file.path.name)
    return ClearReport(tuple(removed), tuple(kept), freed_bytes)


@contextmanager
def _whole(folder: Path, lock_timeout_s: float) -> Iterator[list[FolderFile]]:
    """What is in the folder, under its lock where it can be written.

    The lock keeps our question whether a file is open from looking like a reader to one that makes room.

    Raises:
        CacheError: the folder, or a file in it, refused.
    """
    try:
        with own_calls():
            if not os.path.lexists(folder):
                yield []
                return
            writable = os.access(folder, os.W_OK)
            with folder_lock(folder, lock_timeout_s) if writable else nullcontext():
                yield scan(folder)
    except Degraded as reason:
        raise CacheError(f"cache {folder}: {reason}") from reason
