"""Where the cache is, how large it may grow, and sizes as people write them: ``20GB`` is 20 * 10^9 bytes.

A bare ``20G`` is refused: to some tools it is 20.0 * 10^9 bytes, to others 21.5 * 10^9, and the cache bound is exact.
Arithmetic is exact too (``Decimal``), so ``0.1GB`` is 100,000,000 bytes and not a byte less.
"""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path

from loader.errors import LoaderUsageError

DEFAULT_CACHE_DIR = "~/.neuroshard/data_cache"
DEFAULT_CACHE_BYTES = 20 * 10**9
"""1,000 shards of 2.5 million int64 ids; ten, a node's usual assignment, take 0.2 GB."""
_DECIMAL_UNITS = ("kb", "mb", "gb", "tb", "pb")
_BINARY_UNITS = ("kib", "mib", "gib", "tib", "pib")
_UNITS = {
    "": 1,
    "b": 1,
    **{unit: 1000**power for power, unit in enumerate(_DECIMAL_UNITS, start=1)},
    **{unit: 1024**power for power, unit in enumerate(_BINARY_UNITS, start=1)},
}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) *([A-Za-z]*)", re.ASCII)
_MAX_BYTES = 2**63 - 1
"""What a file offset can hold."""


def cache_dir(option: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: the option, else ``GENESIS_CACHE_DIR``, else ``~/.neuroshard/data_cache``.

    Raises:
        LoaderUsageError: it begins with ``~`` and this user has no home directory.
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


def parse_size(text: str) -> int:
    """Reads a number of bytes.

    Args:
        text: a number, then nothing, ``B``, ``kB``, ``MB``, ``GB``, ``TB``, ``PB`` (powers of 1,000) or ``KiB``,
            ``MiB``, ``GiB``, ``TiB``, ``PiB`` (powers of 1,024); upper or lower case, with or without a space between.

    Returns:
        Whole bytes, at least 1.

    Raises:
        LoaderUsageError: it is not of that form, not a whole number of bytes, or out of range.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise LoaderUsageError(f"expected a size such as 20GB, 512MiB or 1000000 (bytes), found {text[:60]!r}")
    size_bytes = Decimal(match[1]) * factor
    if size_bytes != int(size_bytes) or not 1 <= size_bytes <= _MAX_BYTES:
        raise LoaderUsageError(f"expected a whole number of bytes from 1 to {_MAX_BYTES}, found {text[:60]!r}")
    return int(size_bytes)


def format_size(size_bytes: int) -> str:
    """``20.0 GB``, ``1.5 kB``, ``12 B``: for people, in powers of 1,000."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    amount = float(size_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        amount /= 1000
        if amount < 999.95:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1000:.1f} PB"
