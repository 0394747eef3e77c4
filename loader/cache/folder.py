"""The files of a cache folder: finding them, making room for another one, listing and clearing them.

    shard_17-0123456789abcdef.pt          a finished file: its name identifies its content, so it never changes
    .shard_17-0123456789abcdef.pt.part    one being made, already of its final length
    .lock                                 held for microseconds to a few milliseconds while a file is added

Anything else is left alone and not counted. There is no index that could disagree with the folder after a kill -9:
sizes are the files' own, the time of last use is their atime, and the kernel tells whether one is open. The price is
one stat a file for each file made: 8 ms for 1,000 files, the default bound of 20 GB.

The bound is exact because files only come or grow under `.lock`.

Whatever the folder does (a full disk, no permission, a file system without locks), the bytes can still be fetched from
the store: so the cache's own failures become a `Degraded`, one warning a cause, and never end a training run. Errors of
the caller's code are passed on.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from loader.cache.locks import open_exclusive, release
from loader.errors import CacheError, LoaderUsageError

logger = logging.getLogger(__name__)

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,80}-[0-9a-f]{16,64}\.[a-z0-9]{1,8}"
_FILE = re.compile(_NAME, re.ASCII)
_PART = re.compile(rf"\.{_NAME}\.part", re.ASCII)
_LOCK_NAME = ".lock"
_LOCK_POLL_S = 0.001
_ADVICE = {
    errno.ENOSPC: "free some space or lower --cache-bytes",
    errno.EDQUOT: "free some of the quota or lower --cache-bytes",
    errno.EROFS: "give --cache-dir a folder that can be written",
    errno.EACCES: "give --cache-dir a folder that can be written",
    errno.EPERM: "give --cache-dir a folder that can be written",
    errno.EEXIST: "give --cache-dir a folder, not a file",
    errno.ENOTDIR: "give --cache-dir a folder, not a file",
    errno.EOPNOTSUPP: "give --cache-dir a folder on a local disk",
    errno.ENOSYS: "give --cache-dir a folder on a local disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOLCK: "give --cache-dir a folder on a local disk",
}
_warned: dict[tuple[str, str], object] = {}
"""By folder and cause, a token of the call that warned."""


class Degraded(Exception):  # noqa: N818  not an error: the reason to go on without the cache
    """The cache cannot be used for this file now.

    Attributes:
        cause: warned about once.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@contextmanager
def own_calls() -> Iterator[None]:
    """Turns OSErrors into a `Degraded`; only the cache's own calls belong inside.

    Raises:
        Degraded: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        found = error.strerror or str(error)
        advice = _ADVICE.get(number, "see to the folder or give another --cache-dir")
        raise Degraded(errno.errorcode.get(number, found), f"cannot be used ({found}): {advice}") from error


def warn_once(folder: Path, reason: Degraded) -> None:
    """Warns about a cause once per process and folder."""
    token = object()
    # Atomic, so that one of several threads warns; not the reason itself, which would keep its frames alive.
    if _warned.setdefault((os.fspath(folder), reason.cause), token) is not token:
        logger.debug("cache %s: %s", folder, reason)
        return
    logger.warning("cache %s: %s; until then data is fetched without it (said once)", folder, reason)


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A finished file or a part in the folder."""

    path: Path
    size_bytes: int
    used_at_ns: int
    """When it was last opened through the cache, since the epoch."""
    complete: bool
    """False for a part."""


def check_name(name: str) -> None:
    """Checks that a name has the cache's form, and so cannot lead out of the folder.

    Raises:
        LoaderUsageError: it has not.
    """
    if not _FILE.fullmatch(name):
        raise LoaderUsageError(
            f"expected a cache name such as shard_17-0123456789abcdef.pt, found {name[:100]!r}; name it by its content"
        )


def part_path(folder: Path, name: str) -> Path:
    """The path of the part of a file."""
    return folder / f".{name}.part"


@contextmanager
def folder_lock(folder: Path, timeout_s: float) -> Iterator[None]:
    """Holds the lock of the folder.

    Raises:
        Degraded: it was not free within `timeout_s` seconds.
        OSError: it cannot be locked.
    """
    deadline = time.monotonic() + timeout_s
    while (descriptor := open_exclusive(folder / _LOCK_NAME, create=True)) is None:
        if time.monotonic() >= deadline:
            raise Degraded("lock", f"expected its lock within {timeout_s:g} s, but a process holds it: is one stopped?")
        time.sleep(_LOCK_POLL_S)
    try:
        yield
    finally:
        release(descriptor)


def scan(folder: Path) -> list[FolderFile]:
    """The cache's files and parts, least recently used first, then by name.

    Raises:
        OSError: the folder cannot be read.
    """
    found: list[FolderFile] = []
    with os.scandir(folder) as listing:
        for item in listing:
            complete = _FILE.fullmatch(item.name) is not None
            if not complete and not _PART.fullmatch(item.name):
                continue
            try:
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                found.append(FolderFile(folder / item.name, status.st_size, status.st_atime_ns, complete))
    return sorted(found, key=lambda file: (file.used_at_ns, file.path.name))


def make_room(folder: Path, size_bytes: int, max_bytes: int) -> bool:
    """Makes room for another file; the caller holds the folder's lock.

    Removes all parts whose maker is dead, then as many of the least recently used files that are not open as needed;
    none of these if all of them were not enough.

    Returns:
        Whether there is room for `size_bytes` within `max_bytes`.

    Raises:
        OSError: the folder cannot be read or written.
    """
    files = [file for file in scan(folder) if file.complete or not remove_if_closed(file.path)]
    return evict(files, sum(file.size_bytes for file in files) + size_bytes - max_bytes)


def evict(files: list[FolderFile], excess_bytes: int) -> bool:
    """Removes the first complete files that are not open until `excess_bytes` are freed; the caller holds the lock.

    Returns:
        False if all of them were not enough: then none is removed.

    Raises:
        OSError: a file may not be removed.
    """
    victims: list[tuple[Path, int]] = []
    try:
        for file in files:
            if excess_bytes <= 0:
                break
            descriptor = open_exclusive(file.path) if file.complete else None
            if descriptor is not None:
                victims.append((file.path, descriptor))
                excess_bytes -= file.size_bytes
        if excess_bytes > 0:
            return False
        for path, _ in victims:
            path.unlink()
        return True
    finally:
        for _, descriptor in victims:
            release(descriptor)


def remove_if_closed(path: Path) -> bool:
    """Removes a file that no process has open through the cache.

    Returns:
        False if it is open, or not there.

    Raises:
        OSError: it may not be removed.
    """
    descriptor = open_exclusive(path)
    if descriptor is None:
        return False
    try:
        path.unlink()
    finally:
        release(descriptor)
    return True


def is_open(path: Path) -> bool:
    """Whether any process has the file open through the cache (or that cannot be determined)."""
    try:
        descriptor = open_exclusive(path)
    except OSError:
        return True
    if descriptor is None:
        return True
    release(descriptor)
    return False


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


@contextmanager
def files_of(folder: Path, lock_timeout_s: float) -> Iterator[list[FolderFile]]:
    """The files of a folder, under its lock if it can be written.

    Without the lock, checking whether a file is open would look like a reader to a process that makes room.

    Raises:
        CacheError: the folder, or a file in it, cannot be used.
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
