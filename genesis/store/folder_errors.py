"""What the operating system's errors mean for a store in a folder, in one line a user can act on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from genesis.errors import StoreAccessError, StoreError, StoreFullError, StoreUnavailableError

__all__ = ["folder_errors"]

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
            f"cannot {action}: {reason}{_at(error, action)}; check its owner and permissions, or choose another --store"
        )
    if error.errno in _UNAVAILABLE:
        return StoreUnavailableError(
            f"cannot {action}: {reason}; check the disk or mount and run the same command again"
        )
    return StoreError(f"cannot {action}: {reason}{_at(error, action)}")


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
