"""What a source hands to the pipeline: an ordered list of input files, cut into tasks that workers read.

- `InputPlan` is the whole input: files in a fixed order, each with a digest of its content. Its fingerprint over the
  files up to the cursor's tells whether what was consumed is still the same; files may be added behind it.
- A *task* is what one worker reads at a time, named by reference (file and row group) wherever the format can be
  split, so text stays in the worker; formats that cannot be split come as blocks of whole lines.
- A `TextBatch` is some 4 MB of a task's documents, ready to encode.

Rows count what the file holds; documents count what is kept. The position after any document is a `Cursor`, and
reading on from a cursor gives the documents that follow it, exactly.

Files are in *natural* order (`natural_key`): folder by folder, and a run of digits counts as a number, so ``chunk2``
comes before ``chunk10``. The order is a function of the names alone (never of the file system's own order, a locale or
an absolute prefix), so every machine agrees on it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from genesis.errors import InputChangedError
from manifests import Cursor

BATCH_BYTES = 4 << 20
"""Text a batch aims at: large enough that per-batch costs vanish, small enough that two fit any cache of results."""


class FileFormat(Enum):
    """How an input file is read."""

    PARQUET = "parquet"
    JSON_LINES = "json-lines"
    """One JSON object a line: .jsonl, plain or compressed."""
    JSON = "json"
    """The same, or one array of objects; the first byte that is not blank says which: .json, plain or compressed."""
    CSV = "csv"
    """Records of RFC 4180 below a header: .csv, plain or compressed."""
    WHOLE_FILE = "whole-file"
    """The file is one document: .txt, .py, .md."""
    MEGATRON = "megatron"
    """Ids in .bin, documents in .idx beside it."""
    DATATROVE = "datatrove"
    """Ids in .ds, documents in .ds.index beside it."""


class RowKind(Enum):
    """What a row of a block of text is, as messages call it."""

    LINE = "line"
    ELEMENT = "element"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a source."""

    name: str
    """Distinct within the plan and stable across runs; what `Cursor.file` holds."""
    location: str = field(repr=False)
    """Where to open it: a local path, ``hf://datasets/{repo}@{revision}/{path}``, ``s3://{bucket}/{key}`` or a URL
    (which may hold a signature or a password, and so is shown to nobody)."""
    format: FileFormat
    size_bytes: int
    digest: str
    """Changes when the content does: the Hub's object id, a server's ETag, or a digest of size and both ends."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What ids that were not encoded here must keep to."""

    num_ids: int
    """Ids of the vocabulary: all are below it."""
    eos_id: int
    num_special: int
    """Ids below this one are special, and none but EOS may occur."""
    append_eos: bool = False
    """A document that does not end with EOS is given one; else it is an error."""


@dataclass(frozen=True, slots=True)
class InputPlan:
    """The whole input of a source, in order."""

    source: str
    text_field: str
    files: tuple[InputFile, ...]
    repo: str = ""
    revision: str = ""
    token_rules: TokenRules | None = None
    """Of a source that comes as ids, once its vocabulary is known."""

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
        self.number_of(last_file)
        return self.fingerprints()[last_file]

    def number_of(self, name: str) -> int:
        """The place of the file of that name, where a checkpoint stands.

        Raises:
            InputChangedError: the plan has no such file.
        """
        for number, file in enumerate(self.files):
            if file.name == name:
                return number
        raise InputChangedError(
            f"{self.source}: the checkpoint stands in {name!r}, which is no longer among the {len(self.files)} "
            "input files; give the same --input as before (files may be added after it, not removed)"
        )

    @property
    def size_bytes(self) -> int:
        """Stored bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def first_bytes(self) -> dict[str, int]:
        """For each file's name, the stored bytes of all files before it."""
        sizes = [file.size_bytes for file in self.files]
        return dict(zip((file.name for file in self.files), accumulate(sizes, initial=0), strict=False))


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Stored (compressed) bytes ``begin`` to ``end - 1`` of a file; only for telling how far reading has come."""

    begin: int = 0
    end: int = 0

    def at(self, row: int, num_rows: int) -> int:
        """The place of ``row`` of ``num_rows`` that lie evenly in the range; its beginning if there are none."""
        return self.begin + (self.end - self.begin) * min(row, num_rows) // num_rows if num_rows else self.begin


@dataclass(frozen=True, slots=True)
class RowGroupTask:
    """Rows ``first_row …`` of one row group of a parquet file."""

    file: InputFile
    text_field: str
    row_group: int
    first_row: int = 0
    num_rows: int = 0
    """Of the row group; 0 if unknown."""
    stored: StoredRange = field(default=StoredRange(), compare=False)
    """Where the row group lies in the file."""

    def cursor(self, row: int, plan: InputPlan) -> Cursor:
        """The position before ``row``, a row of this task."""
        return Cursor(repo=plan.repo, revision=plan.revision, file=self.file.name, row_group=self.row_group, row=row)

    def read_before(self, row: int) -> tuple[InputFile, int]:
        """The file, and how many of its stored bytes have been read before ``row``; in proportion within the group."""
        return self.file, self.stored.at(row, self.num_rows)


@dataclass(frozen=True, slots=True)
class LinesTask:
    """A block of whole rows, already decompressed; ``first_row`` is the number of its first row in the file.

    Elements of a JSON array come as a line each, so that only their number and their name in messages differ.
    """

    file: InputFile
    text_field: str
    first_row: int
    data: bytes = field(repr=False)
    kind: RowKind = RowKind.LINE
    column: int = 0
    """Of records: the number of the field that holds the text."""
    stored: StoredRange = field(default=StoredRange(), compare=False)
    """What was read of the file for it."""

    def cursor(self, row: int, plan: InputPlan) -> Cursor:
        """The position before row ``row`` of the file."""
        return Cursor(repo=plan.repo, revision=plan.revision, file=self.file.name, row=row)

    def read_before(self, row: int) -> tuple[InputFile, int]:
        """The file, and how many of its stored bytes have been read before ``row``; known for the block's two ends."""
        return self.file, self.stored.end if row > self.first_row else self.stored.begin


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

    def read_before(self, row: int) -> tuple[InputFile, int]:
        """The file before ``row`` and its size; the first file and 0 at the beginning."""
        return (self.files[row - 1], self.files[row - 1].size_bytes) if row else (self.files[0], 0)


@dataclass(frozen=True, slots=True, eq=False)
class TokensTask:
    """Some documents of a file of ids; row *i* of the file is its document *i*."""

    file: InputFile
    rules: TokenRules
    dtype: str
    """Of an id in the file, as numpy spells it."""
    first_row: int
    first_id: int
    """Where the first of the documents begins in the file, in ids."""
    ends: npt.NDArray[np.int64]
    """int64[D], where each document ends behind that."""

    def cursor(self, row: int, plan: InputPlan) -> Cursor:
        """The position before document ``row`` of the file."""
        return Cursor(repo=plan.repo, revision=plan.revision, file=self.file.name, row=row)

    def read_before(self, row: int) -> tuple[InputFile, int]:
        """The file, and how many of its stored bytes lie before document ``row``."""
        num_before = min(max(row - self.first_row, 0), len(self.ends))
        num_ids = self.first_id + (int(self.ends[num_before - 1]) if num_before else 0)
        return self.file, num_ids * np.dtype(self.dtype).itemsize


Task = RowGroupTask | LinesTask | WholeFilesTask | TokensTask


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


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Documents of a task that are ids already, in order."""

    ids: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.int64]
    """int64[D], where each document ends among ``ids``, its EOS included."""
    rows: npt.NDArray[np.int64]
    """int64[D], as in `TextBatch`; documents of no id are not among them."""
    stored_bytes: npt.NDArray[np.int64]
    """int64[D], bytes of the file up to the end of each, from the task's beginning."""
    end_row: int


_DIGITS = re.compile("([0-9]+)")
_MAGIC = re.compile(r"[*?\[]")

NaturalKey = tuple[tuple[tuple[str, int], ...], ...]


def natural_key(name: str) -> tuple[NaturalKey, str]:
    """Sort key of a relative name with ``/`` between folders; equal only for equal names."""
    return tuple(_component_key(part) for part in name.split("/")), name


def _component_key(part: str) -> tuple[tuple[str, int], ...]:
    pieces = _DIGITS.split(part)
    numbers = [int(digits) for digits in pieces[1::2]]
    return tuple(zip(pieces[0::2], [*numbers, -1], strict=True))


def is_pattern(text: str) -> bool:
    """Whether the text holds a wildcard."""
    return _MAGIC.search(text) is not None


def fixed_folder(pattern: str) -> str:
    """The folder every match of the pattern lies in; empty for the top."""
    folders = pattern.split("/")[:-1]
    fixed: list[str] = []
    for folder in folders:
        if is_pattern(folder):
            break
        fixed.append(folder)
    return "/".join(fixed)


def matches(path: str, pattern: str) -> bool:
    """Whether a path is what the pattern means: ``*`` stays within a folder, ``**`` crosses any number of them."""
    return _matches(path.split("/"), pattern.split("/"))


def _matches(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(parts[skipped:], patterns[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])
