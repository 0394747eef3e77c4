"""Times and names of stage checkpoints: ``{directory}/{run_id}/{stage}/20260131T120000.250000Z-head.0.42.pt``.

Sorted by name they are sorted by time. Times are whole microseconds since 1970, so the time in a name, given as
``--at``, is exactly that file's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from genesis.file_lock import FileLock
from trainer.errors import TrainerUsageError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_US: Final = 1_000_000
_STAMP: Final = "%Y%m%dT%H%M%S.%fZ"
_WHO: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RUN: Final = re.compile(r"[A-Za-z0-9_@:+=-][A-Za-z0-9_.@:+=-]{0,127}")
_STAGE: Final = re.compile(r"head|tail|body-[1-9][0-9]{0,3}")
_FILE: Final = re.compile(r"(\d{8}T\d{6}\.\d{6}Z)-([A-Za-z0-9][A-Za-z0-9._-]{0,63})\.pt")


@dataclass(frozen=True, slots=True)
class StageName:
    """A file with the name of a stage's checkpoint."""

    path: Path
    stage: str
    saved_us: int  # Time of the state, microseconds since 1970.
    who: str  # The worker that wrote it.


def time_us(seconds: float) -> int:
    """Seconds since 1970 as microseconds."""
    return round(seconds * _SECOND_US)


def parse_time(text: str, now_us: int) -> int:
    """Microseconds since 1970 of ISO 8601, by default UTC, or ``now``. Raises `TrainerUsageError`: another form."""
    if text == "now":
        return now_us
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise TrainerUsageError(
            f"expected a time such as 2026-01-31T12:00, 20260131T120000.250000Z or now, found {text[:60]!r}"
        ) from None
    zoned = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return (zoned - _EPOCH) // timedelta(microseconds=1)


def format_time_us(us: int) -> str:
    """Formats a time as in names: ``20260131T120000.250000Z``."""
    return (_EPOCH + timedelta(microseconds=us)).strftime(_STAMP)


def run_folder(directory: str | Path, run_id: str) -> Path:
    """The folder of a run, ``~`` expanded. Raises `TrainerUsageError`: the run's name cannot name a folder."""
    if not _RUN.fullmatch(run_id):
        raise TrainerUsageError(f"run_id: expected letters, digits or any of -_.@:+= (no dot first), found {run_id!r}")
    return Path(directory).expanduser() / run_id


def stage_folder(directory: str | Path, run_id: str, stage: str) -> Path:
    """The folder of a stage. Raises `TrainerUsageError`: the stage has another form."""
    if not _STAGE.fullmatch(stage):
        raise TrainerUsageError(f"stage: expected head, body-1, … or tail, found {stage!r}")
    return run_folder(directory, run_id) / stage


def file_name(saved_us: int, who: str) -> str:
    """The name of a worker's file. Raises `TrainerUsageError`: ``who`` cannot be part of a file name."""
    if not _WHO.fullmatch(who):
        raise TrainerUsageError(
            f"who: expected at most 64 letters, digits, '.', '_' and '-', such as head.0.42, found {who!r}"
        )
    return f"{format_time_us(saved_us)}-{who}.pt"


def named_files(directory: str | Path, run_id: str) -> Iterator[StageName]:
    """All files of a run named as stage checkpoints, by stage and time; they may be damaged."""
    folder = run_folder(directory, run_id)
    if not folder.is_dir():
        return
    for part in sorted(folder.iterdir()):
        if not (_STAGE.fullmatch(part.name) and part.is_dir()):
            continue
        for path in sorted(part.iterdir()):
            named = _named(path, part.name)
            if named is not None:
                yield named


def misnamed_files(directory: str | Path, run_id: str) -> Iterator[tuple[str, Path]]:
    """Files among a run's checkpoints whose names only resemble theirs, each with its stage."""
    folder = run_folder(directory, run_id)
    for path in sorted(folder.glob("*/*.pt")):
        if _STAGE.fullmatch(path.parent.name) and not path.name.startswith(".") and not _named(path, path.parent.name):
            yield path.parent.name, path


def _named(path: Path, stage: str) -> StageName | None:
    matched = _FILE.fullmatch(path.name)
    if matched is None:
        return None
    try:
        taken = datetime.strptime(matched[1], _STAMP).replace(tzinfo=UTC)
    except ValueError:  # Digits that are not a date.
        return None
    return StageName(path, stage, (taken - _EPOCH) // timedelta(microseconds=1), matched[2])


def stage_lock(run: Path, stage: str, *, shared: bool) -> FileLock:
    """The lock that tells whether workers of this machine write a stage's checkpoints.

    Each holds it shared from before it reads a checkpoint until it has ended; rolling back, which the next save would
    undo, takes it alone. Not seen are workers of other machines, and those in a folder whose file system has no locks.
    """
    return FileLock(run / f".{stage}.lock", shared=shared, required=False)
