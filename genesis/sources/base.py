"""What a source hands to the pipeline: an ordered list of input files, cut into tasks that workers read.

- `InputPlan` is the whole input: files in a fixed order, each with a digest of its content. Its fingerprint over the
  files up to the cursor's tells whether what was consumed is still the same; files may be added behind it.
- A *task* is what one worker reads at a time, named by reference (file and row group) wherever the format can be
  split, so text stays in the worker; formats that cannot be split come as blocks of whole lines.
- A `TextBatch` is some 4 MB of a task's documents, ready to encode.

Rows count what the file holds; documents count what is kept. The position after any document is a `Cursor`, and
reading on from a cursor gives the documents that follow it, exactly.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from genesis.errors import InputChangedError
from manifests import Cursor

__all__ = [
    "BATCH_BYTES",
    "FileFormat",
    "InputFile",
    "InputPlan",
    "LinesTask",
    "RowGroupTask",
    "Task",
    "TextBatch",
    "WholeFilesTask",
]

BATCH_BYTES = 4 << 20
"""Text a batch aims at: large enough that per-batch costs vanish, small enough that two fit any cache of results."""


class FileFormat(Enum):
    """How an input file is read."""

    PARQUET = "parquet"
    JSON_LINES = "json-lines"
    """One JSON object a line: .jsonl, .json, plain or as .zst or .gz."""
    WHOLE_FILE = "whole-file"
    """The file is one document: .txt, .py."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a source."""

    name: str
    """Distinct within the plan and stable across runs; what `Cursor.file` holds."""
    location: str
    """Where to open it: a local path, or ``hf://datasets/{repo}@{revision}/{path}``."""
    format: FileFormat
    size_bytes: int
    digest: str
    """Changes when the content does: the Hub's object id, or a digest of size, first and last 64 KiB."""


@dataclass(frozen=True, slots=True)
class InputPlan:
    """The whole input of a source, in order."""

    source: str
    text_field: str
    files: tuple[InputFile, ...]
    repo: str = ""
    revision: str = ""

    def fingerprints(self) -> dict[str, str]:
        """For each file's name, sha256 over name, size and digest of every file up to and including it."""
        digest = hashlib.sha256()
        found: dict[str, str] = {}
        for file in self.files:
            digest.update(f"{file.name}\0{file.size_bytes}\0{file.digest}\n".encode())
            found[file.name] = digest.hexdigest()
        return found

    def fingerprint(self, last_file: str) -> str:
        """One of `fingerprints`.

        Raises:
            InputChangedError: the plan has no such file.
        """
        found = self.fingerprints()
        if last_file not in found:
            raise InputChangedError(
                f"{self.source}: the checkpoint stands in {last_file!r}, which is no longer among the "
                f"{len(self.files)} input files; give the same --input as before (files may be added after it, "
                "not removed)"
            )
        return found[last_file]

    @property
    def size_bytes(self) -> int:
        """Stored bytes of all files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class RowGroupTask:
    """Rows ``first_row …`` of one row group of a parquet file."""

    file: InputFile
    text_field: str
    row_group: int
    first_row: int = 0

    def cursor(self, row: int, plan: InputPlan) -> Cursor:
        """The position before ``row``, a row of this task."""
        return Cursor(repo=plan.repo, revision=plan.revision, file=self.file.name, row_group=self.row_group, row=row)


@dataclass(frozen=True, slots=True)
class LinesTask:
    """A block of whole lines, already decompressed; ``first_row`` is the number of its first line in the file."""

    file: InputFile
    text_field: str
    first_row: int
    data: bytes

    def cursor(self, row: int, plan: InputPlan) -> Cursor:
        """The position before line ``row`` of the file."""
        return Cursor(repo=plan.repo, revision=plan.revision, file=self.file.name, row=row)


@dataclass(frozen=True, slots=True)
class WholeFilesTask:
    """Some files that are a document each; row *i* of the task is file *i*."""

    files: tuple[InputFile, ...]
    first_row: int = 0

    def cursor(self, row: int, plan: InputPlan) -> Cursor:
        """The position before file ``row``: behind the one row of the file before it."""
        if row == 0:
            return Cursor(repo=plan.repo, revision=plan.revision, file=self.files[0].name, row=0)
        return Cursor(repo=plan.repo, revision=plan.revision, file=self.files[row - 1].name, row=1)


Task = RowGroupTask | LinesTask | WholeFilesTask


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Documents of a task, in order, with the rows they came from.

    Rows that are null, not strings, not valid Unicode or empty are not among them; how many were skipped follows from
    the row numbers.
    """

    texts: list[bytes]
    """UTF-8, none empty."""
    rows: npt.NDArray[np.int64]
    """int64[D], the row (in the task's numbering) of each document, ascending."""
    end_row: int
    """The row after the last row looked at; the next batch of the task begins there."""
