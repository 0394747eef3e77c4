"""Sizes as people write them: ``20GB`` is 20 * 10^9 bytes, ``512MiB`` is 512 * 2^20.

A bare ``20G`` is refused rather than guessed: to some tools it is 20.0 * 10^9 bytes, to others 21.5 * 10^9, and the
cache bound is exact. Arithmetic is exact too (``Decimal``), so ``0.1GB`` is 100,000,000 bytes and not a byte less.
"""

from __future__ import annotations

import re
from decimal import Decimal

from loader.errors import LoaderUsageError

__all__ = ["format_size", "parse_size"]

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
