"""Files of JSON lines: decompressed piece by piece, cut into blocks of whole lines, and the documents in a block.

A compressed file cannot be entered in the middle, so one reader decompresses and hands out blocks of about 4 MB of
whole lines; workers parse them. Resuming at a line decompresses what is before it again (at 520 MB/s of text for
zstd) and counts newlines. Memory is one block, plus one line of at most 256 MiB, for each task that is under way.

Lines are parsed by pydantic-core: of the libraries at hand it measured fastest but one (1.7 ms/MB of raw UTF-8, orjson
1.6, the standard library 2.5), and it is a dependency already. What it refuses goes to the standard library's parser,
which tells a line that is not JSON (an error, with its number) from one that is JSON but not Unicode (skipped).

Decompression knows whether a stream ended where it should. A ``.zst`` may hold many frames and a ``.gz`` many members
(both are what appending compressed pieces gives); all are read. The stream readers of `zstandard` end silently on a
truncated frame, so the frames are followed here: input is fed 16 KiB at a time, which measured fastest (520 MB/s zstd,
280 MB/s gzip, one core). Text gives some 100 KB for that; the worst a hostile zstd file can do is 512 MB. Both
libraries release the GIL while they work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import numpy as np
import zstandard
from isal import igzip_lib, isal_zlib
from pydantic_core import from_json

from genesis.errors import CorruptInputError, SourceError
from genesis.sources.base import BATCH_BYTES, InputFile, LinesTask, TextBatch
from genesis.sources.opening import Compression, compression_of, stream

MAX_LINE_BYTES = 256 << 20
_ROWS_TO_FIND_FIELD = 1000
_BOM = b"\xef\xbb\xbf"


def line_tasks(file: InputFile, text_field: str, first_row: int) -> Iterator[LinesTask]:
    """Blocks of whole lines from line ``first_row`` on.

    Raises:
        CorruptInputError: the file is truncated or damaged, or a line is over 256 MiB; every whole line before it has
            been yielded.
    """
    row = first_row
    try:
        for block in _blocks(_lines_from(decompressed(stream(file), compression_of(file.name)), first_row)):
            yield LinesTask(file, text_field, row, block)
            row += block.count(b"\n")
    except _LineTooLongError:
        raise CorruptInputError(
            f"{file.name}: line {row + 1} is over {MAX_LINE_BYTES >> 20} MiB; expected one JSON object a line"
        ) from None
    except DamagedStreamError as damage:
        raise CorruptInputError(
            f"{file.name}: {damage.reason} (in line {row + 1}, near byte {damage.offset} of {file.size_bytes}); "
            "everything before it was read: get a sound copy and run the same command again with --mended-input"
        ) from damage


class _LineTooLongError(Exception):
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
    except (DamagedStreamError, _LineTooLongError) as error:
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
        CorruptInputError: a line is not a JSON object; the documents before it have been yielded.
        SourceError: no row of the file's beginning has the text field.
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
        value = _parse(line)
        if type(value) is not dict:
            if not line.strip():
                continue
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
        raise CorruptInputError(
            f"{task.file.name}: line {end_row + 1} is not a JSON object: {corrupt[:60]!r}; expected one object a line, "
            f"with the text in {task.text_field!r}; everything before it was read"
        )


def _check_field(task: LinesTask, lines: list[bytes]) -> None:
    """Refuses a file whose beginning never has the text field: all its rows would be skipped, in silence."""
    fields: dict[str, None] = {}
    for line in lines:
        value = _parse(line)
        if type(value) is not dict:
            continue
        if task.text_field in value:
            return
        fields.update(dict.fromkeys(value))
    if fields:
        raise SourceError(
            f"{task.file.name}: none of the first {len(lines)} lines has the field {task.text_field!r}; they have "
            f"{', '.join(sorted(fields)[:20])}: set text_field to one of them"
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


_FEED_BYTES = 16 << 10
_PIECE_BYTES = 1 << 20
_GZIP_WINDOW = 31
"""zlib's spelling of "gzip header and trailer, any window"."""
_GZIP_ERROR: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]  # its stub says an instance, not a class
_ZSTD_MAX_WINDOW_BYTES = 1 << 31
"""What ``zstd --long=31`` writes."""


class DamagedStreamError(Exception):
    """The compressed bytes are truncated or damaged; ``offset`` of them were read before that was seen."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.offset = offset


def decompressed(pieces: Iterable[bytes | bytearray], compression: Compression) -> Iterator[bytes]:
    """The plain bytes of a compressed stream, in order.

    Raises:
        DamagedStreamError: after everything before the damage has been yielded.
    """
    if compression is Compression.NONE:
        yield from map(bytes, pieces)
    elif compression is Compression.ZSTD:
        yield from _zstd(pieces)
    else:
        yield from _gzip(pieces)


def _fed(pieces: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _FEED_BYTES):
            yield bytes(view[start : start + _FEED_BYTES])


def _zstd(pieces: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES)
    frame = context.decompressobj()
    inside, offset = False, 0
    for fed in _fed(pieces):
        rest = fed
        while rest:
            try:
                plain = frame.decompress(rest)
            except zstandard.ZstdError as error:
                raise DamagedStreamError(str(error), offset) from error
            for start in range(0, len(plain), _PIECE_BYTES):
                yield plain[start : start + _PIECE_BYTES]
            rest, inside = (frame.unused_data, False) if frame.eof else (b"", True)
            if frame.eof:
                frame = context.decompressobj()
        offset += len(fed)
    if inside:
        raise DamagedStreamError("truncated: the last zstd frame is not complete", offset)


def _gzip(pieces: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    member = isal_zlib.decompressobj(_GZIP_WINDOW)
    inside, padding, offset = False, False, 0
    for fed in _fed(pieces):
        rest = fed
        while rest:
            if not inside:
                # Tapes and block devices pad with zeros behind the last member; gzip(1) accepts that, so do we.
                rest = rest.lstrip(b"\0") if padding else rest
                if not rest:
                    break
                member, inside = isal_zlib.decompressobj(_GZIP_WINDOW), True
            try:
                plain = member.decompress(rest, _PIECE_BYTES)
            except _GZIP_ERROR as error:
                raise DamagedStreamError(str(error), offset) from error
            if plain:
                yield plain
            rest = member.unconsumed_tail
            if member.eof:
                rest, inside, padding = member.unused_data, False, True
        offset += len(fed)
    if inside:
        raise DamagedStreamError("truncated: the last gzip member is not complete", offset)
