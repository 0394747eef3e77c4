"""What a verification found: problems, notes and counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

REPORT_FORMAT = 1

_KEPT = 10_000
"""Problems the report holds; the others are only counted and passed on, so that memory stays bounded."""


class Problem(BaseModel):
    """One thing that is wrong."""

    model_config = ConfigDict(frozen=True)

    where: str
    """The object's key, with a position inside it where there is one."""
    what: str
    """What was expected and what was found, in one line."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Counts(BaseModel):
    """How much was looked at."""

    model_config = ConfigDict(frozen=True)

    segments: int
    shards: int
    """Shards in the manifest."""
    shards_verified: int
    """Shards read whole and found sound in every way."""
    shards_sampled: int
    """Shards that were to be read."""
    bytes_read: int
    """Of shards, packed shards, segments and vocabularies."""
    tokens_verified: int
    documents_verified: int
    """Documents that end in the verified shards."""
    vocabularies: int


class VerifyReport(BaseModel):
    """The result of `verify_store`."""

    model_config = ConfigDict(frozen=True)

    format: int = REPORT_FORMAT
    url: str
    ok: bool
    sequence: int | None
    signature: Literal["verified", "invalid", "not checked", "unsigned"]
    """``not checked``: the manifest is signed, but no public key was given."""
    key_id: str | None
    seed: int | None
    """Of the sample; None when every shard was read."""
    counts: Counts
    num_problems: int
    problems: tuple[Problem, ...]
    """The first 10,000."""
    notes: tuple[str, ...]
    """What is no fault but worth knowing: orphans, what could not be looked at."""
    seconds: float
    created_at: str | None = None
    """Of the store, by its manifest: what tells it from another at the same address."""
    finished_at: str | None = None
    verified_shards: tuple[tuple[int, int], ...] | None = None
    """Which shards were read whole and found sound: first and last of each run of ids, ascending."""
    damaged_shards: tuple[tuple[int, int], ...] | None = None
    """Which were read, or looked for, and were not sound; likewise."""


def _ignore(problem: Problem) -> None:
    """Does nothing with ``problem``."""


@dataclass(slots=True)
class Findings:
    """Collects problems, notes and counts; safe to use from several threads.

    Attributes:
        on_problem: told of each problem as it is found, one at a time.
    """

    on_problem: Callable[[Problem], None] = _ignore
    problems: list[Problem] = field(default_factory=list)
    num_problems: int = 0
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def problem(self, where: str, what: object) -> None:
        """Adds a problem; ``what`` may be an error."""
        found = Problem(where=where, what=" ".join(str(what).split()).removeprefix(f"{where}: "))
        with self._lock:
            self.num_problems += 1
            if len(self.problems) < _KEPT:
                self.problems.append(found)
            self.on_problem(found)

    def note(self, text: str) -> None:
        """Adds a note."""
        with self._lock:
            self.notes.append(text)

    def count_bytes(self, size_bytes: int) -> None:
        """Counts bytes that were read and digested."""
        with self._lock:
            self.bytes_read += size_bytes
