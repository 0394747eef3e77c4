"""How much text and how many shards an input will give, before reading it: for progress bars and ``--dry-run``.

Stored size times a typical expansion: FineWeb-Edu's parquet holds 3.2 bytes of text per stored byte here, gzip and
zstd JSON lines 2.8 and 3.4. Good to a factor of 1.3; never used for anything but display.
"""

from __future__ import annotations

from genesis.populate.packer import Position
from genesis.sources.base import InputFile, InputPlan

__all__ = ["BYTES_PER_TOKEN", "PACKED_BYTES_PER_TOKEN", "expected_text_bytes", "text_bytes_of"]

BYTES_PER_TOKEN = 4.4
"""Typical of English under a vocabulary of 32,000 ids."""

PACKED_BYTES_PER_TOKEN = 1.25
"""Of the transfer form, for the same."""

_EXPANSION = {".parquet": 3.2, ".zst": 3.4, ".gz": 2.8}


def text_bytes_of(file: InputFile) -> float:
    """Estimated UTF-8 bytes of a file's documents."""
    for ending, factor in _EXPANSION.items():
        if file.name.endswith(ending):
            return file.size_bytes * factor
    return float(file.size_bytes)


def expected_text_bytes(plan: InputPlan, start: Position) -> float | None:
    """Estimated text behind ``start``; None for an input without files."""
    total = sum(text_bytes_of(file) for file in plan.files)
    return max(total - start.text_bytes, 1.0) if total else None
