"""Parquet files: one task a row group, and the text column of a row group in batches.

Only the text column's pages are read, a buffer at a time, and decoded some 4 MB at a time, so a row group of a million
rows costs no more memory than one of a thousand. An opened file with its parsed footer is kept per thread for the
last two files: workers get tasks of the same file in turn, and the footer of a 2 GB file takes a megabyte to read.

Arrow's background pre-buffering stays off: it would hold whole column chunks, and its threads calling into a Python
file are what makes a process that streams from the Hub hang at its end (huggingface_hub#4178).
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from genesis.errors import CorruptInputError, GenesisError, MissingFieldError
from genesis.sources.base import BATCH_BYTES, InputFile, RowGroupTask, StoredRange, TextBatch
from genesis.sources.opening import is_remote, open_file

_KEPT_OPEN = 2
_LOCAL_BUFFER_BYTES = 1 << 20
_REMOTE_BUFFER_BYTES = 16 << 20
_MAX_BATCH_ROWS = 16_384
"""Bounds a batch whose stored size says little about its text: a column of few, long, repeated values."""
_DICTIONARY_ROWS = 1024

Array: TypeAlias = "pa.Array"


class _OpenFiles(threading.local):
    """The files a thread opened last, newest at the end."""

    def __init__(self) -> None:
        self.files: OrderedDict[InputFile, pq.ParquetFile] = OrderedDict()


_open_files = _OpenFiles()


def row_group_tasks(file: InputFile, text_field: str, row_group: int, first_row: int) -> Iterator[RowGroupTask]:
    """A task for each row group from ``(row_group, first_row)`` on. Reads the footer, at the first step.

    Raises:
        CorruptInputError: the footer is missing or damaged.
        MissingFieldError: there is no such column, or it holds no text.
    """
    metadata = _opened(file).metadata
    _column_index(file, text_field)
    for number in range(row_group, metadata.num_row_groups):
        skipped = first_row if number == row_group else 0
        num_rows = metadata.row_group(number).num_rows
        if skipped < num_rows:
            stored = StoredRange(_first_byte(file, metadata, number), _first_byte(file, metadata, number + 1))
            yield RowGroupTask(file, text_field, number, skipped, num_rows, stored)


def _first_byte(file: InputFile, metadata: pq.FileMetaData, row_group: int) -> int:
    """Where a row group begins, by its first column's first page; 0 for the first, the file's size behind the last."""
    if row_group == 0:
        return 0
    if row_group >= metadata.num_row_groups:
        return file.size_bytes
    column = metadata.row_group(row_group).column(0)
    places = (column.dictionary_page_offset, column.data_page_offset)
    return min(min((place for place in places if place), default=0), file.size_bytes)


def row_group_batches(task: RowGroupTask) -> Iterator[TextBatch]:
    """The documents of a row group from the task's first row on.

    Raises:
        CorruptInputError: a page is damaged or missing; the batches before it have been yielded.
        SourceError: the file cannot be read, or has no such column.
    """
    parquet = _opened(task.file)
    group = parquet.metadata.row_group(task.row_group)
    column = group.column(_column_index(task.file, task.text_field))
    batch_rows = _batch_rows(group.num_rows, column.total_uncompressed_size)
    row = 0
    try:
        for batch in parquet.iter_batches(batch_rows, [task.row_group], [task.text_field], use_threads=False):
            array = batch.column(0)
            skipped = min(max(task.first_row - row, 0), len(array))
            row += skipped
            for piece in _pieces(array.slice(skipped)):
                yield _text_batch(piece, row)
                row += len(piece)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(task.file, f"row group {task.row_group}, row {row}", error) from error
    if row != group.num_rows:
        raise CorruptInputError(f"{task.file.name}: row group {task.row_group} ends at row {row}, not {group.num_rows}")


def _opened(file: InputFile) -> pq.ParquetFile:
    kept = _open_files.files
    if file not in kept:
        kept[file] = _open(file)
    kept.move_to_end(file)
    while len(kept) > _KEPT_OPEN:
        _, oldest = kept.popitem(last=False)
        oldest.close(force=True)
    return kept[file]


def _open(file: InputFile) -> pq.ParquetFile:
    opened = open_file(file)
    buffer_bytes = _REMOTE_BUFFER_BYTES if is_remote(file) else _LOCAL_BUFFER_BYTES
    source = opened if is_remote(file) else file.location
    try:
        return pq.ParquetFile(source, buffer_size=buffer_bytes, pre_buffer=False, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, f"footer, before byte {file.size_bytes}", error) from error
    finally:
        if not is_remote(file):
            opened.close()


def _damaged(file: InputFile, position: str, error: Exception) -> GenesisError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CorruptInputError(f"{file.name}: truncated or damaged ({position}): {reason}")


def _column_index(file: InputFile, text_field: str) -> int:
    """The text column's number among the stored columns."""
    parquet = _opened(file)
    schema = parquet.schema_arrow
    if text_field not in schema.names:
        raise MissingFieldError(
            f"{file.name}: no column {text_field!r}; it has {', '.join(schema.names[:20])}: "
            "give one of them with --text-field",
            tuple(schema.names),
        )
    kind = schema.field(text_field).type
    if not _is_text(kind):
        raise MissingFieldError(
            f"{file.name}: expected text in the column {text_field!r}, found {kind}; give another --text-field",
            tuple(name for name in schema.names if _is_text(schema.field(name).type)),
        )
    stored = parquet.metadata.row_group(0) if parquet.metadata.num_row_groups else None
    if stored is None:
        return 0
    return next(i for i in range(stored.num_columns) if stored.column(i).path_in_schema == text_field)


def _is_text(kind: pa.DataType) -> bool:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    checks = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_null,
    )
    return any(check(value) for check in checks)


def _batch_rows(num_rows: int, stored_bytes: int) -> int:
    return max(1, min(_MAX_BATCH_ROWS, num_rows * BATCH_BYTES // max(stored_bytes, 1)))


def _pieces(array: Array) -> Iterator[Array]:
    """Slices of at most about 8 MB of text each, dictionaries and views laid out flat."""
    if pa.types.is_dictionary(array.type):
        for start in range(0, len(array), _DICTIONARY_ROWS):
            yield from _pieces(array.slice(start, _DICTIONARY_ROWS).dictionary_decode())
        return
    parts = max(1, min(len(array), array.nbytes // BATCH_BYTES))
    bounds = [len(array) * part // parts for part in range(parts + 1)]
    for start, end in itertools.pairwise(bounds):
        if end > start:
            yield array.slice(start, end - start)


def _text_batch(array: Array, first_row: int) -> TextBatch:
    """The documents of a slice: what is null, empty or not UTF-8 is left out."""
    end_row = first_row + len(array)
    if pa.types.is_null(array.type):
        return TextBatch([], np.empty(0, dtype=np.int64), end_row)
    column = array.cast(pa.large_binary())
    kept = pc.greater(pc.binary_length(column), 0).fill_null(False)
    if pc.all(kept).as_py():
        rows = np.arange(first_row, end_row, dtype=np.int64)
    else:
        rows = np.flatnonzero(kept.to_numpy(zero_copy_only=False)).astype(np.int64) + first_row
        column = column.filter(kept)
    texts = column.to_pylist()
    try:
        column.cast(pa.large_string())
    except pa.ArrowInvalid:
        valid = np.array([_is_utf8(text) for text in texts], dtype=bool)
        rows, texts = rows[valid], [text for text, good in zip(texts, valid, strict=True) if good]
    return TextBatch(texts, rows, end_row)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
