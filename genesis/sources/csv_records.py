"""Files of comma-separated values (RFC 4180): cut into blocks of whole records, and the documents in a block.

A record may span lines, inside quotes, so only a parser knows where one ends: the standard library's finds the ends
while the one reader hands out blocks of about 4 MB, and parses each block again in a worker, where the text is made.
Both see the same bytes, so they agree; and a file is cut alike wherever reading begins. The first record is the header;
row 0 is the record after it. Resuming at a record parses what is before it again. Memory is one block, plus one record
of at most 64 MiB.

Quotes inside a field that does not begin with one are taken as they are, as spreadsheets write them. A quote that
nothing closes, or text behind a closing one, is an error with the record's number.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

import numpy as np

from genesis.errors import CorruptInputError, MissingFieldError
from genesis.sources.base import BATCH_BYTES, InputFile, LinesTask, RowKind, TextBatch
from genesis.sources.decompression import DamagedStreamError, UnreadableRestError, decompressed
from genesis.sources.lines import damaged_at
from genesis.sources.opening import CountedPieces, compression_of

MAX_RECORD_BYTES = 64 << 20
csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))  # Of the whole process; 128 KiB unless told.
_BOM = b"\xef\xbb\xbf"


def record_tasks(file: InputFile, text_field: str, first_row: int) -> Iterator[LinesTask]:
    """Blocks of whole records from record ``first_row`` on.

    Raises:
        CorruptInputError: the file is truncated or damaged, a record is not as RFC 4180 has it, or is over 64 MiB;
            every record before it has been yielded.
        MissingFieldError: the header has no such field.
    """
    pieces = CountedPieces(file)
    lines = _TakenLines(_lines(decompressed(pieces, compression_of(file.name))))
    reader = csv.reader(lines, strict=True)
    row = 0
    try:
        if next(reader, None) is None:
            return
        column = _column(file, text_field, lines.take())
        for row in range(first_row):  # noqa: B007  for messages
            if next(reader, None) is None:
                return
            lines.take()
        row = first_row
        pieces.begin_at(first_row)
        for records, block in _blocks(reader, lines):
            yield LinesTask(file, text_field, row, block, RowKind.RECORD, column, pieces.take_range())
            row += records
    except csv.Error as error:
        raise CorruptInputError(f"{file.name}: record {row + 1}, in line {reader.line_num}: {error}") from None
    except _RecordTooLongError:
        raise CorruptInputError(
            f"{file.name}: record {row + 1}, up to line {reader.line_num}, is over {MAX_RECORD_BYTES >> 20} MiB; a "
            "quote may be missing there"
        ) from None
    except DamagedStreamError as damage:
        raise CorruptInputError(damaged_at(file, damage, RowKind.RECORD, row)) from damage


def record_batches(task: LinesTask) -> Iterator[TextBatch]:
    """The documents of a block, as one batch. Records that are too short to have the field are left out."""
    texts: list[bytes] = []
    rows: list[int] = []
    row = task.first_row
    text = io.StringIO(task.data.decode("utf-8", "surrogateescape"), newline="")
    for row, record in enumerate(csv.reader(text, strict=True), start=task.first_row):
        value = record[task.column] if len(record) > task.column else ""
        if value:
            try:
                texts.append(value.encode())
            except UnicodeEncodeError:
                continue
            rows.append(row)
    yield TextBatch(texts, np.array(rows, dtype=np.int64), row + 1)


def _column(file: InputFile, text_field: str, header: bytes) -> int:
    names = next(csv.reader(io.StringIO(header.decode("utf-8", "replace"), newline=""), strict=True), [])
    if text_field not in names:
        raise MissingFieldError(
            f"{file.name}: no field {text_field!r} in its header; it has {', '.join(names[:20])}: give one of them "
            "with --text-field",
            tuple(names),
        )
    if names.count(text_field) > 1:
        raise CorruptInputError(
            f"{file.name}: the header has {names.count(text_field)} fields {text_field!r}; rename those not to be read"
        )
    return names.index(text_field)


def _blocks(reader: Iterator[list[str]], lines: _TakenLines) -> Iterator[tuple[int, bytes]]:
    """Numbers of records and their bytes, gathered to `BATCH_BYTES`; an error comes after the records before it."""
    gathered: list[bytes] = []
    size_bytes = 0
    failure: Exception | None = None
    try:
        for _ in reader:
            gathered.append(lines.take())
            size_bytes += len(gathered[-1])
            if size_bytes >= BATCH_BYTES:
                yield len(gathered), b"".join(gathered)
                gathered, size_bytes = [], 0
    except (csv.Error, UnreadableRestError) as error:
        failure = error
    if gathered:
        yield len(gathered), b"".join(gathered)
    if failure is not None:
        raise failure


class _RecordTooLongError(UnreadableRestError):
    """A record that would have to be held whole, and is too long for it."""


class _TakenLines:
    """Lines for `csv.reader`, which asks for as many as a record has, and their bytes for who asks afterwards."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self._taken: list[bytes] = []
        self._taken_bytes = 0

    def __iter__(self) -> _TakenLines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._taken.append(line)
        self._taken_bytes += len(line)
        if self._taken_bytes > MAX_RECORD_BYTES:
            raise _RecordTooLongError
        # Commas, quotes and line ends are the same bytes in UTF-8 and Latin-1, which decodes at the speed of a copy.
        return line.decode("latin-1")

    def take(self) -> bytes:
        """The bytes of the lines given since the last time."""
        data = b"".join(self._taken)
        self._taken, self._taken_bytes = [], 0
        return data


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines with their ends: a newline, a carriage return, or both. A byte order mark is left out."""
    for number, line in enumerate(_split(chunks)):
        yield line if number else line.removeprefix(_BOM)


def _split(chunks: Iterator[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []
    begun_bytes = 0
    for chunk in filter(None, chunks):
        if begun and begun[-1].endswith(b"\r") and not chunk.startswith(b"\n"):
            yield b"".join(begun)
            begun, begun_bytes = [], 0
        lines = chunk.splitlines(keepends=True)
        # The last may go on, or its carriage return be followed by a newline.
        rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
        if lines:
            lines[0] = b"".join([*begun, lines[0]])
            yield from lines
            begun, begun_bytes = [], 0
        if rest:
            begun.append(rest)
            begun_bytes += len(rest)
        if begun_bytes > MAX_RECORD_BYTES:
            raise _RecordTooLongError
    if begun:
        yield b"".join(begun)
