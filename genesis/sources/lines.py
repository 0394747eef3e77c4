"""Files of JSON: decompressed piece by piece, cut into blocks of whole rows, and the documents in a block.

A compressed file cannot be entered in the middle, so one reader decompresses and hands out blocks of about 4 MB of
whole lines; workers parse them. Resuming at a line decompresses what is before it again (at 520 MB/s of text for
zstd) and counts newlines. Memory is one block, plus one line of at most 256 MiB, for each task that is under way. A
``.json`` file may hold one array instead, whose elements are made lines on the way (`genesis.sources.arrays`).

Lines are parsed by pydantic-core: of the libraries at hand it measured fastest but one (1.7 ms/MB of raw UTF-8, orjson
1.6, the standard library 2.5), and it is a dependency already. What it refuses goes to the standard library's parser,
which tells a line that is not JSON (an error, with its number) from one that is JSON but not Unicode (skipped).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
from pydantic_core import from_json

from genesis.errors import CorruptInputError, MissingFieldError
from genesis.sources.arrays import BrokenArrayError, array_lines, holds_array
from genesis.sources.base import BATCH_BYTES, FileFormat, InputFile, LinesTask, RowKind, TextBatch
from genesis.sources.decompression import DamagedStreamError, UnreadableRestError, decompressed
from genesis.sources.opening import CountedPieces, compression_of

MAX_LINE_BYTES = 256 << 20
_ROWS_TO_FIND_FIELD = 1000
_BOM = b"\xef\xbb\xbf"


def line_tasks(file: InputFile, text_field: str, first_row: int) -> Iterator[LinesTask]:
    """Blocks of whole rows from row ``first_row`` on: lines, or the elements of an array.

    Raises:
        CorruptInputError: the file is truncated or damaged, or a row is over 256 MiB; every whole row before it has
            been yielded.
    """
    row, kind = first_row, RowKind.LINE
    pieces = CountedPieces(file)
    try:
        chunks = decompressed(pieces, compression_of(file.name))
        if file.format is FileFormat.JSON:
            is_array, chunks = holds_array(chunks)
            if is_array:
                kind, chunks = RowKind.ELEMENT, array_lines(chunks)
        chunks = _lines_from(chunks, first_row)
        first = list(itertools.islice(chunks, 1))
        pieces.begin_at(first_row)
        for block in _blocks(itertools.chain(first, chunks)):
            yield LinesTask(file, text_field, row, block, kind, stored=pieces.take_range())
            row += block.count(b"\n")
    except _LineTooLongError:
        raise CorruptInputError(
            f"{file.name}: {kind.value} {row + 1} is over {MAX_LINE_BYTES >> 20} MiB; expected one JSON object a "
            f"{kind.value}"
        ) from None
    except BrokenArrayError as error:
        raise CorruptInputError(f"{file.name}: element {row + 1} of the array: {error}") from None
    except DamagedStreamError as damage:
        raise CorruptInputError(damaged_at(file, damage, kind, row)) from damage


def damaged_at(file: InputFile, damage: DamagedStreamError, kind: RowKind, row: int) -> str:
    """What to say of a compressed file that is truncated or damaged in row ``row``."""
    return f"{file.name}: {damage.reason} (in {kind.value} {row + 1}, near byte {damage.offset} of {file.size_bytes})"


class _LineTooLongError(UnreadableRestError):
    """A line that would have to be held whole, and is too long for it."""


def _blocks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines gathered to `BATCH_BYTES`; the last block may lack its newline. None is empty.

    An error of ``chunks`` comes after the whole lines before it, without the line it cut.
    """
    whole: list[bytes] = []
    begun: list[bytes] = []
    whole_bytes = begun_bytes = 0
    failure: Exception | None = None
    try:
        for chunk in chunks:
            end = chunk.rfind(b"\n") + 1
            if end:
                whole += [*begun, chunk[:end]]
                whole_bytes += begun_bytes + end
                begun, begun_bytes = [], 0
            begun.append(chunk[end:])
            begun_bytes += len(chunk) - end
            if begun_bytes > MAX_LINE_BYTES:
                raise _LineTooLongError
            if whole_bytes >= BATCH_BYTES:
                yield b"".join(whole)
                whole, whole_bytes = [], 0
        whole += begun
    except UnreadableRestError as error:
        failure = error
    if block := b"".join(whole):
        yield block
    if failure is not None:
        raise failure


def _lines_from(chunks: Iterator[bytes], first_row: int) -> Iterator[bytes]:
    """The stream without its first ``first_row`` lines."""
    missing = first_row
    for chunk in chunks:
        if missing == 0:
            yield chunk
            continue
        newlines = chunk.count(b"\n")
        if newlines < missing:
            missing -= newlines
            continue
        cut = 0
        for _ in range(missing):
            cut = chunk.index(b"\n", cut) + 1
        missing = 0
        if cut < len(chunk):
            yield chunk[cut:]


def line_batches(task: LinesTask) -> Iterator[TextBatch]:
    """The documents of a block, as one batch.

    Raises:
        CorruptInputError: a row is not a JSON object; the documents before it have been yielded.
        MissingFieldError: no row of the file's beginning has the text field.
    """
    lines = task.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if task.first_row == 0:
        lines[0] = lines[0].removeprefix(_BOM)
        _check_field(task, lines[:_ROWS_TO_FIND_FIELD])
    texts: list[bytes] = []
    rows: list[int] = []
    end_row = task.first_row + len(lines)
    corrupt: bytes | None = None
    for row, line in enumerate(lines, start=task.first_row):
        if not line or line.isspace():
            continue
        value = _parse(line)
        if type(value) is not dict:
            corrupt, end_row = line, row
            break
        text = value.get(task.text_field)
        if type(text) is str and text:
            try:
                texts.append(text.encode())
            except UnicodeEncodeError:
                continue
            rows.append(row)
    yield TextBatch(texts, np.array(rows, dtype=np.int64), end_row)
    if corrupt is not None:
        kind = task.kind.value
        raise CorruptInputError(
            f"{task.file.name}: {kind} {end_row + 1} is not a JSON object: {corrupt[:60]!r}; expected one object a "
            f"{kind}, with the text in {task.text_field!r}"
        )


def _check_field(task: LinesTask, lines: list[bytes]) -> None:
    """Refuses a file whose beginning never has the text field: all its rows would be skipped, in silence."""
    fields: dict[str, None] = {}
    for line in lines:
        value = _parse(line) if line else None
        if type(value) is not dict:
            continue
        if task.text_field in value:
            return
        fields.update(dict.fromkeys(value))
    if fields:
        found = sorted(fields)
        raise MissingFieldError(
            f"{task.file.name}: none of the first {len(lines)} {task.kind.value}s has the field {task.text_field!r}; "
            f"they have {', '.join(found[:20])}: give one of them with --text-field",
            tuple(found),
        )


def _parse(line: bytes) -> object:
    try:
        return from_json(line, cache_strings="keys")
    except ValueError:
        return _parse_slowly(line)


def _parse_slowly(line: bytes) -> object:
    """A line pydantic-core refuses: JSON whose strings are not valid Unicode, or no JSON (None).

    What is not Unicode becomes lone surrogates, which the caller skips if they are in the text and ignores elsewhere.
    """
    try:
        return json.loads(line.decode("utf-8", "surrogateescape"), parse_int=str)
    except (ValueError, RecursionError):
        return None
