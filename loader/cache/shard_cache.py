"""A cache of verified files: a file that is there is mapped, a missing one is made by one process for all.

Guarantees:

- Every file that `ShardCache.open` returns was verified by this process: by `check` if it was there, by `produce` if it
  was made now. Nothing in the folder is trusted, so nothing in it needs fsync, and damage costs time, not correctness.
  The trade-off: a process hashes a file when it first opens it, 12 ms for 20 MB, and after that only if its inode or
  times have changed, which opening it in another process does too.
- One of many processes and threads makes a file, the others wait and map the same pages. All locks are the kernel's, so
  a kill -9 at any moment frees them. Every wait has a deadline.
- Files and parts together never exceed `max_bytes`. The least recently opened go first; open files never go.
- If the folder is full, read-only or without locks, the cache degrades to fetching into this process's memory, with one
  warning a cause, and tries the folder again at the next open.

Out of scope: network file systems (flock there may be local, so two machines would each make the file; it stays
correct, the bound may not hold), Windows (no flock, no removal of open files), and malice inside the folder: truncating
an open file ends its readers (SIGBUS).
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from loader.cache.folder import (
    CacheEntry,
    ClearReport,
    Degraded,
    FolderFile,
    check_name,
    files_of,
    folder_lock,
    is_open,
    own_calls,
    remove_if_closed,
    warn_once,
)
from loader.cache.part import FileIdentity, PartFile, map_file, touch
from loader.errors import CorruptObjectError, LoaderUsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
_LOCK_TIMEOUT_S = 10.0
"""A thousand times as long as other processes should hold the folder's lock."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file that stays open, and so safe from eviction, as long as `buffer` or any view of it lives."""

    buffer: memoryview
    """uint8[size]: the whole file; writable, and private to this process (copy on write)."""
    from_cache: bool
    """It existed already."""
    cached: bool
    """False: the cache could not be used, and the bytes live in this process only."""
    reopened: bool = False
    """This process verified the file before, and it has not changed since."""


class ShardCache:
    """A folder of verified, immutable files that the processes of one machine share.

    Args:
        folder: made at the first use.
        max_bytes: bound on the size of all files together.
        wait_timeout_s: how long to wait for a file that another process is making; after that it is fetched without the
            cache (the other process may be stopped).
    """

    def __init__(self, folder: Path, max_bytes: int, *, wait_timeout_s: float = 600.0) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._wait_timeout_s = wait_timeout_s
        self._verified: dict[str, FileIdentity] = {}
        self._lock_timeout_s = min(wait_timeout_s, _LOCK_TIMEOUT_S)

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self._folder

    @property
    def max_bytes(self) -> int:
        """Bound on the size of all files together."""
        return self._max_bytes

    def open(
        self, name: str, size_bytes: int, produce: Callable[[], Buffer], check: Callable[[memoryview], None]
    ) -> CachedFile:
        """Opens a file, making it if it is not there.

        Args:
            name: identifies the content, such as ``shard_17-0123456789abcdef.pt``.
            size_bytes: length of the file; another length is corrupt.
            produce: returns the bytes, verified; called at most once. Its errors go to the caller, and another process
                that waits for the file tries in turn.
            check: verifies the bytes of an existing file; if it raises CorruptObjectError, the file is made anew.

        Raises:
            LoaderUsageError: `name` or `size_bytes` is invalid.
            CorruptObjectError: `produce` returned another number of bytes.
        """
        check_name(name)
        if size_bytes < 1:
            raise LoaderUsageError(f"{name}: expected a size of at least 1 byte, found {size_bytes}")
        try:
            found = self._find_or_claim(name, size_bytes, check)
        except Degraded as reason:
            warn_once(self._folder, reason)
            return _private(_produced(name, size_bytes, produce))
        if isinstance(found, CachedFile):
            return found
        with found as part:
            data = _produced(name, size_bytes, produce)
            try:
                with own_calls():
                    return CachedFile(part.publish(data), from_cache=False, cached=True)
            except Degraded as reason:
                warn_once(self._folder, reason)
        return _private(data)

    def contains(self, name: str) -> bool:
        """Whether a file of that name exists: a cheap hint, since it is not verified and may go at any time."""
        check_name(name)
        try:
            return stat.S_ISREG(os.lstat(self._folder / name).st_mode)
        except OSError:
            return False

    def discard(self, name: str) -> None:
        """Removes a file, open or not; views of it stay valid. Warns once if it cannot be removed."""
        check_name(name)
        try:
            with own_calls():
                (self._folder / name).unlink(missing_ok=True)
        except Degraded as reason:
            warn_once(self._folder, reason)

    def entries(self) -> list[CacheEntry]:
        """The files and parts in the folder, least recently used first.

        Raises:
            CacheError: the folder cannot be read.
        """
        with files_of(self._folder, self._lock_timeout_s) as files:
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

    def clear(self) -> ClearReport:
        """Removes every file that is not open, and what dead processes left.

        Raises:
            CacheError: the folder cannot be read or written.
        """
        removed: list[FolderFile] = []
        kept: list[FolderFile] = []
        with files_of(self._folder, self._lock_timeout_s) as files:
            for file in files:
                (removed if remove_if_closed(file.path) else kept).append(file)
        return ClearReport(
            removed=tuple(file.path.name for file in removed),
            kept=tuple(file.path.name for file in kept),
            freed_bytes=sum(file.size_bytes for file in removed),
        )

    def _find_or_claim(self, name: str, size_bytes: int, check: Callable[[memoryview], None]) -> CachedFile | PartFile:
        """The file, if it is there or another makes it in time; else the reserved part to make it in; or `Degraded`."""
        deadline = time.monotonic() + self._wait_timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            file = self._find(name, size_bytes, check)
            if file is not None:
                return file
            part = self._claim(name, size_bytes)
            if part is not None:
                return part
            if time.monotonic() >= deadline:
                raise Degraded(
                    "wait",
                    f"expected {name} from another process within {self._wait_timeout_s:g} s: is one stopped?",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _find(self, name: str, size_bytes: int, check: Callable[[memoryview], None]) -> CachedFile | None:
        """The file if it is there and passes; one that does not pass is removed; or `Degraded`."""
        path = self._folder / name
        with own_calls():
            found = _status(path)
        if found is None:
            return None
        try:
            if not stat.S_ISREG(found.st_mode):
                raise CorruptObjectError(f"expected a file, found {stat.filemode(found.st_mode)}")
            with own_calls():
                mapped = map_file(path, size_bytes)
            if mapped is None:
                return None
            reopened = self._verified.get(name) == mapped.identity
            if not reopened:
                check(mapped.view)
            self._mark_used(path, name, mapped.identity)
            return CachedFile(mapped.view, from_cache=True, cached=True, reopened=reopened)
        except CorruptObjectError as error:
            logger.warning("cache %s: %s is damaged, it is removed and made anew: %s", self._folder, name, error)
        with own_calls():
            self._remove_damaged(path, found)
        return None

    def _mark_used(self, path: Path, name: str, verified: FileIdentity) -> None:
        """Sets the time of last use, and notes what the file is then if nothing has changed it since the check."""
        self._verified.pop(name, None)
        with suppress(OSError):  # Then the next opening checks it again.
            is_as_verified = FileIdentity.of(path.lstat()) == verified
            touch(path)
            if is_as_verified:
                self._verified[name] = FileIdentity.of(path.lstat())

    def _remove_damaged(self, path: Path, found: os.stat_result) -> None:
        """Removes a damaged file, unless another process has already replaced it."""
        with folder_lock(self._folder, self._lock_timeout_s):
            now = _status(path)
            # The time too: inode numbers are reused.
            if now is None or not os.path.samestat(now, found) or now.st_ctime_ns != found.st_ctime_ns:
                return
            path.rmdir() if stat.S_ISDIR(now.st_mode) else path.unlink()

    def _claim(self, name: str, size_bytes: int) -> PartFile | None:
        with own_calls():
            part = PartFile.claim(self._folder, name, self._lock_timeout_s)
            if part is None:
                return None
            try:
                part.reserve(size_bytes, self._max_bytes)
            except BaseException:
                part.close()
                raise
            return part


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _produced(name: str, size_bytes: int, produce: Callable[[], Buffer]) -> memoryview:
    data = memoryview(produce()).cast("B")
    if len(data) != size_bytes:
        raise CorruptObjectError(f"{name}: expected {size_bytes} bytes, found {len(data)}; fetch it again")
    return data


def _private(data: memoryview) -> CachedFile:
    return CachedFile(memoryview(bytearray(data)) if data.readonly else data, from_cache=False, cached=False)
