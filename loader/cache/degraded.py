"""Failures of the cache itself: one warning a cause, never the end of a training run.

Whatever its folder does (a full disk, no permission, a file system without locks), the bytes can still be fetched from
the store; so the cache's own failures become a `Degraded`, and errors of the caller's code are passed on.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

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
