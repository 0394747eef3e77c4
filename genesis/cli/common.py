"""What several commands share: options, signals, and aligned plain text.

The text has no colours, so there is nothing for ``NO_COLOR`` to turn off.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from genesis.errors import UsageError
from genesis.hangup import drop_closed_terminals, stop_signals
from genesis.sources import PYTHON_DOCS
from manifests import ContractError, SourcesFile, builtin_sources

logger = logging.getLogger("genesis")


def default_store() -> str:
    """Where a store is unless ``--store`` or ``GENESIS_STORE`` says otherwise."""
    return os.environ.get("GENESIS_STORE") or str(Path("~/.neuroshard/genesis-store").expanduser())


StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        default_factory=default_store,
        show_default="$GENESIS_STORE or ~/.neuroshard/genesis-store",
        help="The store: a folder, s3://bucket/prefix or, for reading, http(s)://host/path.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/status.md) instead of text.")]
SourcesOption = Annotated[
    Path | None,
    typer.Option("--sources-file", envvar="GENESIS_SOURCES", help="A sources.json instead of the built-in one."),
]


def load_sources(path: Path | None) -> SourcesFile:
    """The sources of ``path``, or the built-in ones.

    Raises:
        UsageError: the file cannot be read.
        ContractError: it is not a sources.json.
    """
    if path is None:
        return builtin_sources()
    try:
        return SourcesFile.from_json(path.read_bytes(), name=str(path))
    except OSError as error:
        raise UsageError(f"--sources-file {path}: {error.strerror}") from None


def complete_source(context: typer.Context, incomplete: str) -> list[str]:
    """Names of sources that begin so, for the shell; those of ``--sources-file`` if it was given before."""
    path = context.params.get("sources_file")
    with suppress(UsageError, ContractError):
        names = [spec.name for spec in load_sources(Path(path) if path else None).sources]
        names += [PYTHON_DOCS.name, *(["all"] if context.info_name == "populate" else [])]
        return [name for name in names if name.startswith(incomplete)]
    return []


class StopSignal(threading.Event):
    """Set by the first signal; remembers which."""

    signal_number: int = 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell expects; 0 if none came."""
        return 128 + self.signal_number if self.signal_number else 0


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Within it, the first SIGINT, SIGTERM or SIGHUP sets the request; a second SIGINT or SIGTERM interrupts at once.

    SIGHUP does not count twice: the end of a terminal sends it from the kernel and from the shell.
    """
    request = StopSignal()
    num_asked = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal num_asked
        if number == signal.SIGHUP:
            drop_closed_terminals()
        num_asked += number != signal.SIGHUP
        if num_asked > 1:
            raise KeyboardInterrupt
        if not request.is_set():
            request.signal_number = number
            request.set()
            logger.warning("stopping: finishing the commit in hand (once more to stop at once)")

    previous = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[int] = frozenset({0})) -> list[str]:
    """Lines of a table.

    Args:
        header: names of the columns.
        rows: cells, as many a row as the header has.
        left: columns that are aligned to the left; the others are to the right.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [_line(row, widths, left) for row in (header, *rows)]


def _line(cells: Sequence[str], widths: Sequence[int], left: frozenset[int]) -> str:
    padded = [
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return _GAP.join(padded).rstrip()


def count(number: float | None) -> str:
    """``85,000``; a dash for None."""
    return "-" if number is None else f"{number:,.0f}"


def compact(number: float | None) -> str:
    """At most eight characters: ``85,000``, ``320.00 M``, ``150.0 G``; a dash for None."""
    if number is None or abs(number) < 1e6:
        return count(number)
    for unit, size in (("M", 1e6), ("G", 1e9)):
        if abs(number) < 1000 * size:
            return f"{number / size:.2f} {unit}"
    return f"{number / 1e12:.2f} T"


def shorten(text: str, width: int) -> str:
    """``text``, cut to ``width`` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def printable(text: str) -> str:
    """``text`` with its control characters spelt out, except newline and tab.

    Web text may hold terminal escape sequences; printed as they are, they would be obeyed.
    """
    return "".join(
        character if character.isprintable() or character in "\n\t" else _spelt(character) for character in text
    )


def _spelt(character: str) -> str:
    return character if character.isspace() and ord(character) >= 0xA0 else repr(character)[1:-1]
