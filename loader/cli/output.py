"""Text for people: tables, counts, runs of shard ids, and how far along a command is (`genesis.progress` shows it).

No colours, so there is nothing for ``NO_COLOR`` to turn off. Beside `genesis.cli.common`, which the loader may not
import.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import typer
from tqdm import tqdm

import genesis.progress
from loader.cache.settings import format_size

logger = logging.getLogger(__name__)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[int] = frozenset({0})) -> list[str]:
    """Lines of a table; the columns in ``left`` are aligned to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def counted(number: int, noun: str) -> str:
    """``1 shard``, ``1,187 shards``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def runs(shard_ids: Iterable[int]) -> str:
    """``12-13, 0-7``: ids in the order given, consecutive ones as a range; ``-`` for none."""
    found: list[list[int]] = []
    for shard_id in shard_ids:
        if found and found[-1][1] + 1 == shard_id:
            found[-1][1] = shard_id
        else:
            found.append([shard_id, shard_id])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found) or "-"


def printable(text: str) -> str:
    """Escapes control characters, which a terminal could obey: ids of nodes may come from strangers."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


class DownloadProgress:
    """Shows bytes done: a bar on a terminal, a line every ten seconds elsewhere. Use `showing_progress`."""

    def __init__(self, total_bytes: int) -> None:
        self._remark = ""
        self._total = format_size(total_bytes)
        self.count = genesis.progress.CountProgress(total_bytes, self._describe)

    def show(self, done_bytes: int, remark: str) -> None:
        """Shows the progress; more than the total, as when something came twice, is shown as the total."""
        self._remark = remark
        self.count.update(done_bytes)

    def complain(self, message: str) -> None:
        """Prints an error at once, without spoiling the bar."""
        with tqdm.external_write_mode(file=sys.stderr):
            typer.echo(f"loader: {message}", err=True)

    def _describe(self, done_bytes: int) -> str:
        done = f"{format_size(done_bytes)} of {self._total}"
        return f"{self._remark}, {done}" if self._remark else done


@contextmanager
def showing_progress(what: str, total_bytes: int) -> Iterator[DownloadProgress]:
    """Shows progress until the context is left."""
    progress = DownloadProgress(total_bytes)
    with genesis.progress.showing_progress(what, progress.count.state, logger):
        yield progress
