"""What a report is read from: event logs, what processes printed, a monitor's history, told apart by what is in them.

A folder may be a node's ``--log-dir``, several of them side by side, the ``--folder`` of ``swarm up`` (with ``events/``
and a ``NAME.log`` of each process), or a mixture; a file is taken for what it begins with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainer.errors import TrainerUsageError
from trainer.monitor.event_log import logged_nodes
from trainer.monitor.pages.texts import LINE, NAME, harmless
from trainer.monitor.report.model import LogText

_SQLITE = b"SQLite format 3\0"
_LIFE = b"--- "  # First characters of each life's first line in the log of a process that `swarm up` started.
_MAX_ENTRIES: Final = 10_000
_MAX_LINE_BYTES: Final = 16_384
_KEPT_LINES: Final = 40  # Of each process: its latest warnings and errors.
_PRINTED = re.compile(r"(\d\d:\d\d:\d\d) (WARNING|ERROR|CRITICAL) (.*)")
_LAST_WORD = re.compile(r"trainer: (.*)")


@dataclass(slots=True)
class ReportInputs:
    """What was found."""

    event_logs: list[tuple[Path, str]] = field(default_factory=list)
    """A folder and a node; or a single file and an empty name."""
    process_logs: list[Path] = field(default_factory=list)
    histories: list[Path] = field(default_factory=list)


def find_inputs(paths: Sequence[Path]) -> ReportInputs:
    """Looks through folders and files; raises `TrainerUsageError` for one that is not there, or has nothing."""
    if not paths:
        raise TrainerUsageError("expected a log's folder or more, found none; give what --log-dir said")
    found = ReportInputs()
    for given in dict.fromkeys(path.expanduser() for path in paths):
        before = (len(found.event_logs), len(found.process_logs), len(found.histories))
        try:
            if given.is_dir():
                _look_in(given, found)
            else:
                _sort_file(given, found)
        except OSError as error:
            raise TrainerUsageError(
                f"expected a log's folder or file at {given}, found: {error.strerror}; give what --log-dir said"
            ) from None
        if before == (len(found.event_logs), len(found.process_logs), len(found.histories)):
            raise TrainerUsageError(
                f"expected logs (events-*.jsonl, the .log files of swarm up, a monitor's .sqlite) in {given}, found "
                "none; give what --log-dir or --folder said"
            )
    return found


def _look_in(folder: Path, found: ReportInputs) -> None:
    entries = sorted(path for path, _ in zip(folder.iterdir(), range(_MAX_ENTRIES), strict=False))
    for directory in (folder, *(path for path in entries if path.is_dir())):
        found.event_logs += [(directory, node) for node in logged_nodes(directory)]
    for path in entries:
        if path.suffix == ".log" and path.is_file() and _begins(path, _LIFE):
            found.process_logs.append(path)
        elif path.suffix == ".sqlite" and path.is_file() and _begins(path, _SQLITE):
            found.histories.append(path)


def _sort_file(path: Path, found: ReportInputs) -> None:
    if _begins(path, _SQLITE):
        found.histories.append(path)
    elif _begins(path, _LIFE):
        found.process_logs.append(path)
    else:
        found.event_logs.append((path, ""))


def _begins(path: Path, first: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(first)) == first


def printed_lines(path: Path) -> tuple[list[LogText], int]:
    """Returns the latest warnings, errors and last words that a process printed, and how many lives it had."""
    kept: list[LogText] = []
    num_lives, date, time = 0, "", ""
    node = harmless(path.stem, NAME)
    for line in _lines(path):
        if line.startswith("--- "):
            num_lives, date, time = num_lives + 1, harmless(line[4:14], 10), ""
        elif printed := _PRINTED.match(line):
            time, level, text = printed.groups()
            kept.append(LogText(node=node, at=f"{date} {time}".strip(), level=level, text=harmless(text, LINE)))
        elif said := _LAST_WORD.match(line):
            kept.append(LogText(node=node, at=f"{date} {time}".strip(), level="ERROR", text=harmless(said[1], LINE)))
        del kept[:-_KEPT_LINES]
    return kept, num_lives


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file; of one that is too long its beginning."""
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            yield line.decode(errors="replace").rstrip("\n")
            while not line.endswith(b"\n") and (line := file.readline(_MAX_LINE_BYTES)):
                pass
