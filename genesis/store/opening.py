"""From the address a user types to the store behind it.

A folder's path, ``file://``, ``s3://bucket/prefix`` can be read and written; ``http://`` and ``https://`` only read.
Opening does no work: nothing is contacted or created before the first call, and the client libraries (boto3: 0.5 s to
import, httpx: 0.25 s) are imported only for the addresses that need them.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from genesis.errors import UsageError
from genesis.store.base import ReadableStore, Store
from genesis.store.folder import FolderStore
from genesis.store.limits import RetryPolicy, Throttle

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(?=://)")
_MISSPELT = re.compile(r"(?i:s3|https?|file):(?!//)")  # Else a folder of that name would be made.


def open_store(url: str | Path, *, policy: RetryPolicy | None = None) -> Store:
    """The store at ``url``, to read and write; a folder that is not there is an empty store.

    Args:
        url: a folder's path, ``file:///path`` or ``s3://bucket/prefix``.
        policy: how long calls may take; a folder ignores it.

    Raises:
        UsageError: it is not an address of a store that can be written.
    """
    scheme = _scheme(url)
    if scheme in ("", "file"):
        return FolderStore(_folder(url))
    if scheme == "s3":
        from genesis.store.s3 import S3Store

        return S3Store(str(url), policy=policy)
    if scheme in ("http", "https"):
        raise UsageError(
            f"expected a store that can be written, found {url}, which can only be read; give a folder's path or "
            "s3://bucket/prefix"
        )
    raise _unknown(scheme, "a folder's path, file:///path or s3://bucket/prefix")


def open_readable(
    url: str | Path, *, policy: RetryPolicy | None = None, throttle: Throttle | None = None
) -> ReadableStore:
    """The store at ``url``, to read; a folder that is not there is an error at the first call.

    Args:
        url: a folder's path, ``file:///path``, ``s3://bucket/prefix``, ``http://`` or ``https://``.
        policy: how long calls may take; `RetryPolicy.lasting` makes the one for a store that has mirrors.
        throttle: bounds what is received, together with the other stores it is given to; a folder ignores both.

    Raises:
        UsageError: it is not an address of a store.
    """
    scheme = _scheme(url)
    if scheme in ("", "file"):
        return FolderStore(_folder(url), must_exist=True)
    if scheme in ("http", "https"):
        from genesis.store.http import HttpStore

        return HttpStore(str(url), policy=policy, throttle=throttle)
    if scheme == "s3":
        from genesis.store.s3 import S3Store

        return S3Store(str(url), policy=policy, throttle=throttle)
    raise _unknown(scheme, "a folder's path, file:///path, s3://bucket/prefix, http:// or https://")


def folder_of(url: str | Path) -> Path | None:
    """The absolute folder that ``url`` names, links resolved; None if it names another kind of store."""
    return _folder(url).resolve() if _scheme(url) in ("", "file") else None


def _scheme(url: str | Path) -> str:
    found = _SCHEME.match(url) if isinstance(url, str) else None
    return found.group().lower() if found else ""


def _folder(url: str | Path) -> Path:
    if not str(url):
        raise UsageError(
            "expected a store's address, found an empty string; give a folder's path or s3://bucket/prefix"
        )
    if isinstance(url, str) and _MISSPELT.match(url):
        raise UsageError(f"expected {url.partition(':')[0]}:// and the rest of the address, found {url[:160]}")
    if isinstance(url, Path) or not _scheme(url):
        return Path(url).expanduser()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UsageError(f"expected file:///absolute/path, found {url}; a file:// address names no other host")
    return Path(unquote(parts.path))


def _unknown(scheme: str, known: str) -> UsageError:
    return UsageError(f"expected {known}; found the scheme {scheme}://, which no store here speaks")
