"""A store in a local folder: one file an object, at the object's key.

A `put` is on the disk (file and folder fsynced) when it returns. Conditional writes are exact between all processes of
one machine: ``link`` for if-absent, a lock file for compare-and-rename. The body is written from the caller's buffer
without a copy and fsynced with no lock held, so several threads write at once; the lock is held for a ``stat`` and a
``rename``, well under 1 ms. Symbolic links inside the folder are not followed. Errors of the operating system become
one line that a user can act on. The trade-off: an ETag is inode, time and size, not a digest, so it costs no read of a
20 MB file, and a store that was copied has other ETags.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from typing_extensions import Buffer

from genesis.errors import (
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    StoreRemovedError,
    StoreUnavailableError,
)
from genesis.file_lock import FileLock, FileLockedError
from genesis.store.base import CachePolicy, ObjectInfo, PerProcess, StoredObject, WriteCondition, settle
from genesis.store.durable import TemporaryFile, make_folders, remove_leftovers, sync_folder
from manifests import InvalidDocumentError, check_key

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_UNAVAILABLE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.EMFILE, errno.ENFILE}


@contextmanager
def folder_errors(root: Path, action: str, *, size_bytes: int = 0) -> Iterator[None]:
    """Turns any `OSError` of the block into the `StoreError` it means.

    Args:
        root: the store's folder.
        action: what is being done, such as ``write /store/shard_0.pt``.
        size_bytes: how many bytes it needs.

    Raises:
        StoreFullError: no space, quota, or file-size limit.
        StoreAccessError: not permitted, read-only, or a file where a folder is needed (or the reverse).
        StoreUnavailableError: the device or its network fails, or this process has no descriptors left.
        StoreRemovedError: the folder itself is not there.
        StoreError: anything else.
    """
    try:
        yield
    except OSError as error:
        raise _translated(error, root, action, size_bytes) from error


def _translated(error: OSError, root: Path, action: str, size_bytes: int) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFullError(
            f"cannot {action}: {reason}; it needs {size_bytes:,} bytes, {_free(root)}; "
            "make room and run the same command again"
        )
    if error.errno in _ACCESS:
        return StoreAccessError(
            f"cannot {action}: {reason}{_at(error, action)}; check its owner and permissions, or choose another folder"
        )
    if error.errno in _UNAVAILABLE:
        return StoreUnavailableError(
            f"cannot {action}: {reason}; check the disk or mount and run the same command again"
        )
    if error.errno == errno.ENOENT and not root.is_dir():
        return _removed(root)
    return StoreError(f"cannot {action}: {reason}{_at(error, action)}")


def _removed(root: Path) -> StoreRemovedError:
    return StoreRemovedError(
        f"{root}: the store's folder was removed or moved while it was written to, and nothing more is written; "
        "put it back, or run the same command again to begin anew"
    )


def _at(error: OSError, action: str) -> str:
    """The path the system complains of, where that is not the one being worked on."""
    return f" ({error.filename})" if error.filename is not None and os.fsdecode(error.filename) not in action else ""


def _free(root: Path) -> str:
    for folder in (root, *root.parents):
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            continue
        return f"{folder} has {usage.free:,} of {usage.total:,} bytes free"
    return f"{root} cannot be looked at"


_LOCK_NAME = ".genesis.lock"
_LOCK_POLL_S = 0.002


class FolderStore:
    """Objects as files below one folder; see the module's docstring for what it guarantees."""

    def __init__(self, root: str | Path, *, must_exist: bool = False, lock_timeout_s: float = 30.0) -> None:
        """Names the folder; nothing is opened or created yet.

        Args:
            root: the folder; `put` creates it.
            must_exist: a folder that is not there is an error for readers, not an empty store.
            lock_timeout_s: how long a write waits for another process's rename.
        """
        self._root = Path(root).absolute()
        self._must_exist = must_exist
        self._lock_timeout_s = lock_timeout_s
        self._threads = PerProcess(threading.Lock)
        self._swept: set[Path] = set()

    def __repr__(self) -> str:
        return f"FolderStore({str(self._root)!r})"

    def __reduce__(self) -> tuple[Callable[[], FolderStore], tuple[()]]:
        """A pickle holds the path and the options."""
        make = functools.partial(
            FolderStore, self._root, must_exist=self._must_exist, lock_timeout_s=self._lock_timeout_s
        )
        return make, ()

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return str(self._root)

    @property
    def conditional_writes(self) -> bool:
        """Always: the file system honours them."""
        return True

    @property
    def received_bytes(self) -> int:
        """0: nothing comes over a network."""
        return 0

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        """The whole object."""
        with self._opened(key) as (descriptor, status):
            return _read(descriptor, status, key, max_bytes)

    def get_if_changed(self, key: str, etag: str, *, max_bytes: int | None = None) -> StoredObject | None:
        """The whole object, or None if its ETag still is ``etag``."""
        with self._opened(key) as (descriptor, status):
            return None if _etag(status) == etag else _read(descriptor, status, key, max_bytes)

    def head(self, key: str) -> ObjectInfo | None:
        """Size and ETag, or None if there is no such object."""
        path = self._path(key)
        with folder_errors(self._root, f"read {path}"):
            self._check_root()
            return self._info(key, path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with ``prefix``, in key order."""
        with folder_errors(self._root, f"list {self._root}"):
            self._check_root()
            yield from self._walk("", prefix)

    def put(
        self, key: str, body: Buffer, *, cache: CachePolicy, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Stores an object and returns its ETag; ``cache`` has no meaning in a folder."""
        condition = WriteCondition(if_absent, if_match)
        path = self._path(key)
        view = memoryview(body).cast("B")
        with folder_errors(self._root, f"write {path}", size_bytes=view.nbytes):
            if condition and not condition.holds_for(self._etag(key, path)):
                return self._settle(key, view, condition)  # Before 20 MB are written for nothing.
            self._prepare(path)
            with TemporaryFile(path.parent) as file:
                file.write(view)
                if not self._commit(key, file, condition):
                    return self._settle(key, view, condition)
                etag = _etag(file.status())
            sync_folder(path.parent)
        return etag

    def delete(self, key: str) -> None:
        """Removes an object; none there is success."""
        path = self._path(key)
        with folder_errors(self._root, f"delete {path}"):
            if self._info(key, path) is None:
                return
            with self._locked():
                path.unlink(missing_ok=True)
            sync_folder(path.parent)

    def close(self) -> None:
        """Nothing is held open."""

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        """The object's file, open for the block, and its status; both stay its own if another takes its name."""
        path = self._path(key)
        with folder_errors(self._root, f"read {path}"):
            self._check_root()
            self._refuse_links(path)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError):
                raise ObjectNotFoundError(f"expected an object {key!r} in {self._root}, found none") from None
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise ObjectNotFoundError(f"expected an object {key!r}, found a folder or device of that name")
                yield descriptor, status
            finally:
                os.close(descriptor)

    def _commit(self, key: str, file: TemporaryFile, condition: WriteCondition) -> bool:
        """Gives ``file`` its name; False if the condition does not hold."""
        path = self._path(key)
        if condition.if_absent:
            try:
                file.link(path)
            except FileExistsError:
                return False
            return True
        # Writes without a condition take the lock too: between another's comparison and its rename they would be lost.
        with self._locked():
            if not condition.holds_for(self._etag(key, path)):
                return False
            file.replace(path)
        return True

    def _settle(self, key: str, view: memoryview, condition: WriteCondition) -> str:
        """The outcome of a write whose condition does not hold."""
        try:
            found = self.get(key)
        except ObjectNotFoundError:
            found = None
        etag = settle(f"{self._root}/{key}", condition, found, view)
        # The process that gave the file its name may have been killed before it synced the folder.
        sync_folder(self._path(key).parent)
        return etag

    def _etag(self, key: str, path: Path) -> str | None:
        info = self._info(key, path)
        return None if info is None else info.etag

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes the other threads, then the other processes of this machine."""
        threads, lock = self._threads.get(), FileLock(self._root / _LOCK_NAME)
        if not threads.acquire(timeout=self._lock_timeout_s):
            raise self._locked_error()
        try:
            try:
                lock.acquire(self._lock_timeout_s, poll_s=_LOCK_POLL_S)
            except FileLockedError:
                raise self._locked_error() from None
            with lock:
                yield
        finally:
            threads.release()

    def _locked_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self._root / _LOCK_NAME}: expected the lock within {self._lock_timeout_s:.0f} s, found it held by "
            "another process; see who holds it with 'fuser' and stop that process"
        )

    def _prepare(self, path: Path) -> None:
        """The folder for ``path``, swept once of what killed processes left there.

        A store that was written to before and is gone is not made again: what is missing in it cannot be.
        """
        self._refuse_links(path.parent)
        if self._swept and not self._root.is_dir():
            raise _removed(self._root)
        make_folders(path.parent)
        if path.parent not in self._swept:
            self._swept.add(path.parent)
            remove_leftovers(path.parent)

    def _check_root(self) -> None:
        if self._must_exist and not self._root.is_dir():
            raise StoreAccessError(f"expected a store in the folder {self._root}, found no such folder; check the path")

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _refuse_links(self, path: Path) -> None:
        """Symbolic links below the root could lead out of the store; the root itself may be one."""
        part = str(self._root)
        for name in path.parts[len(self._root.parts) :]:
            part = f"{part}{os.sep}{name}"
            if os.path.islink(part):  # noqa: PTH114 - several times as fast as Path's, at every access
                raise StoreAccessError(
                    f"expected a file or folder at {part}, found a symbolic link; links inside a store are not followed"
                )

    def _info(self, key: str, path: Path) -> ObjectInfo | None:
        self._refuse_links(path)
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _object_info(key, status) if stat.S_ISREG(status.st_mode) else None

    def _walk(self, folder_key: str, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below one folder (``folder_key`` is empty or ends in a slash), in key order."""
        try:
            with os.scandir(self._root / folder_key) as scan:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
        except FileNotFoundError:
            return
        # A folder sorts as its objects do: with the slash that follows its name.
        for key, is_folder in sorted((folder_key + name + "/" * is_dir, is_dir) for name, is_dir in entries):
            if not _is_key(key.removesuffix("/")):
                continue
            if is_folder and (key.startswith(prefix) or prefix.startswith(key)):
                yield from self._walk(key, prefix)
            elif not is_folder and key.startswith(prefix):
                info = self._listed(key)
                if info is not None:
                    yield info

    def _listed(self, key: str) -> ObjectInfo | None:
        try:
            status = (self._root / key).lstat()
        except FileNotFoundError:
            return None  # Deleted since the folder was read.
        return _object_info(key, status) if stat.S_ISREG(status.st_mode) else None


def _read(descriptor: int, status: os.stat_result, key: str, max_bytes: int | None) -> StoredObject:
    if max_bytes is not None and status.st_size > max_bytes:
        raise StoreError(
            f"{key}: expected at most {max_bytes:,} bytes, found {status.st_size:,}; "
            "this is not the object it should be"
        )
    with open(descriptor, "rb", closefd=False) as file:
        # An object is never written to once it has its name; a file that something else appends to is read no further.
        body = file.read(status.st_size)
    return StoredObject(body=body, etag=_etag(status))


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except InvalidDocumentError:
        return False
    return True


def _object_info(key: str, status: os.stat_result) -> ObjectInfo:
    modified_at = datetime.fromtimestamp(status.st_mtime, UTC)
    return ObjectInfo(key=key, size_bytes=status.st_size, etag=_etag(status), modified_at=modified_at)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
