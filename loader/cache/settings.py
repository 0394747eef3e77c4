"""Where the cache is and how large it may grow unless an option says otherwise: one answer for library and CLI."""

from __future__ import annotations

import os
from pathlib import Path

from loader.cache.sizes import parse_size
from loader.errors import LoaderUsageError

__all__ = ["DEFAULT_CACHE_BYTES", "DEFAULT_CACHE_DIR", "cache_bytes", "cache_dir"]

DEFAULT_CACHE_DIR = "~/.neuroshard/data_cache"
DEFAULT_CACHE_BYTES = 20 * 10**9
"""1,000 shards of 2.5 million int64 ids; ten, a node's usual assignment, take 0.2 GB."""


def cache_dir(option: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: the option, else ``GENESIS_CACHE_DIR``, else ``~/.neuroshard/data_cache``.

    Raises:
        LoaderUsageError: it begins with ``~`` and this user has no home.
    """
    chosen = Path(option or os.environ.get("GENESIS_CACHE_DIR") or DEFAULT_CACHE_DIR)
    try:
        return chosen.expanduser()
    except RuntimeError:
        raise LoaderUsageError(f"expected a home for {chosen}, found none; give --cache-dir another folder") from None


def cache_bytes(option: str | int | None = None) -> int:
    """The cache bound in bytes: the option, else ``GENESIS_CACHE_BYTES``, else 20 GB.

    Raises:
        LoaderUsageError: it is no size.
    """
    chosen = option if option is not None else os.environ.get("GENESIS_CACHE_BYTES")
    return DEFAULT_CACHE_BYTES if chosen in (None, "") else parse_size(str(chosen))
