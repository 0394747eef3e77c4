"""Progress of a running populate: a bar on a terminal, a plain line now and then elsewhere.

The total is an estimate: stored size times a typical expansion. FineWeb-Edu's parquet holds 3.2 bytes of text per
stored byte, gzip and zstd JSON lines 2.8 and 3.4. It is good to a factor of 1.3, and used for display alone.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from typing import NoReturn

from tqdm import tqdm

from genesis.populate.packer import Position
from genesis.sources.base import InputFile, InputPlan

logger = logging.getLogger(__name__)

_LINE_EVERY_S = 10.0
_BAR_FORMAT = "{desc} {bar} {percentage:3.0f}%{postfix}"


def counted(count: int, noun: str) -> str:
    """``1 shard``, ``1,187 shards``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_size(size_bytes: float) -> str:
    """``20.0 MB``; powers of 1,000, as disks and networks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.2f} TB"


def format_duration(seconds: float) -> str:
    """``3 h 07 min``, ``4 min 05 s``, ``12 s``."""
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"


@dataclass(slots=True)
class PopulateProgress:
    """Counts one source's run.

    Attributes:
        source: shown as the bar's name.
        expected_bytes: text still to be read at the start, as far as can be estimated; None if it cannot.
        shard_limit: shards of the source at which the run stops.
        shards_before: shards it had at the start.
    """

    source: str
    expected_bytes: float | None
    shard_limit: int | None
    shards_before: int
    _started: float = field(default_factory=time.monotonic)
    _line_at: float = field(default_factory=time.monotonic)
    _tokens: int = 0
    _text_bytes: int = 0
    _shards: int = 0
    _committed_tokens: int = 0
    _bar: tqdm[NoReturn] | None = None

    def start(self) -> None:
        """Shows the bar, if standard error is a terminal."""
        if sys.stderr.isatty():
            self._bar = tqdm(total=100.0, desc=self.source, bar_format=_BAR_FORMAT, leave=False, mininterval=0.5)

    def encoded(self, num_tokens: int, text_bytes: int) -> None:
        """Counts a block of documents."""
        self._tokens += num_tokens
        self._text_bytes += text_bytes
        if self._bar is not None:
            self._bar.set_postfix_str(self.line(), refresh=False)
            self._bar.update(100.0 * self.fraction() - self._bar.n)
        elif time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line_at = time.monotonic()
            logger.info("%s: %s", self.source, self.line())

    def committed(self, num_shards: int, num_tokens: int) -> None:
        """Counts committed shards."""
        self._shards += num_shards
        self._committed_tokens += num_tokens

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()

    def speed_with(self, num_tokens: int) -> float:
        """Committed tokens a second since the start, ``num_tokens`` that are about to be included."""
        return (self._committed_tokens + num_tokens) / max(time.monotonic() - self._started, 1e-9)

    def fraction(self) -> float:
        """How much of the run is done, 0 to 1: by the text or by the shards, whichever ends it first."""
        by_text = self._text_bytes / self.expected_bytes if self.expected_bytes else 0.0
        by_shards = self._shards / max(self.shard_limit - self.shards_before, 1) if self.shard_limit else 0.0
        return min(max(by_text, by_shards), 1.0)

    def line(self) -> str:
        """Tokens/s, MB/s, shards and the time left."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        fraction = self.fraction()
        left = f", {format_duration(elapsed * (1 - fraction) / fraction)} left" if fraction > 0.001 else ""
        return (
            f"{self._tokens / elapsed / 1e6:.2f} M tokens/s, {self._text_bytes / elapsed / 1e6:.1f} MB/s, "
            f"{self.shards_before + self._shards} shards{left}"
        )


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
