"""Opens an `InputFile` wherever it is, for reading from end to end or at random, and tells its format by its name.

The name decides, not the first bytes: a plan over 60,000 files must not open them, and a file whose name and content
disagree is reported when its turn comes, with its position. A file on the Hub, in a bucket or behind a web server is
read by ranges (`genesis.sources.ranges`). Read from end to end, it is read ahead by one piece in a thread, since
decompression would otherwise wait for every range: with ranges of 16 MiB at most three of them are in memory. That
thread is a daemon, so a process that ends while waiting for a rate limit is not held by it.
"""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar, cast

from genesis.errors import InputChangedError, InputNotFoundError, SourceError
from genesis.sources.base import FileFormat, InputFile, StoredRange
from genesis.sources.ranges import RangeFile, RangeReader

_CHUNK_BYTES = 1 << 20
_COUNTED_BYTES = 64 << 10


def is_remote(file: InputFile) -> bool:
    """Whether the file is read by ranges over a network."""
    return "://" in file.location


def open_ranges(file: InputFile) -> RangeReader:
    """The reader of a remote file.

    Raises:
        SourceError: its settings in the environment make no sense.
    """
    if file.location.startswith("hf://"):
        from genesis.sources.hub import HubReader
        from genesis.sources.hub_client import HubRetryPolicy

        return HubReader(file, HubRetryPolicy.from_environment())
    if file.location.startswith("s3://"):
        from genesis.sources.buckets import S3Reader

        return S3Reader(file)
    from genesis.sources.web import WebReader

    return WebReader(file)


def open_file(file: InputFile) -> BinaryIO:
    """The file for reading at random; unbuffered, the caller closes it.

    Raises:
        InputNotFoundError: it is gone.
        SourceError: it cannot be read.
    """
    if is_remote(file):
        return cast("BinaryIO", RangeFile(open_ranges(file)))
    try:
        return cast("BinaryIO", io.FileIO(file.location, "rb"))
    except FileNotFoundError as error:
        raise InputNotFoundError(f"{file.name}: {file.location} is gone; it was there when the run began") from error
    except OSError as error:
        raise SourceError(f"{file.name}: {file.location} cannot be read: {error.strerror or error}") from error


def stream(file: InputFile) -> Iterator[bytes | bytearray]:
    """The file's bytes from the first to the last, in pieces of 1 MiB (local) or one range (remote).

    Raises:
        InputNotFoundError: it is gone.
        SourceError: it cannot be read.
    """
    if is_remote(file):
        yield from read_ahead(open_ranges(file).windows())
        return
    with open_file(file) as opened:
        try:
            while piece := opened.read(_CHUNK_BYTES):
                yield piece
        except OSError as error:
            raise SourceError(
                f"{file.name}: {Path(file.location)} cannot be read: {error.strerror or error}"
            ) from error


class CountedPieces:
    """The bytes of `stream` in pieces of 64 KiB at most, and which stored bytes the rows made of them came from.

    A block of rows cannot tell more exactly than by a piece where in a compressed file it lies; that is enough to show
    how far reading has come.
    """

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._num_bytes = 0
        self._before_last = 0
        self._begin = 0

    def __iter__(self) -> Iterator[bytes | bytearray]:
        for piece in stream(self._file):
            for start in range(0, len(piece), _COUNTED_BYTES):
                part = piece[start : start + _COUNTED_BYTES]
                self._before_last = self._num_bytes
                self._num_bytes += len(part)
                yield part

    def begin_at(self, first_row: int) -> None:
        """Begins the first range where the latest piece began, if reading does not begin with the file."""
        self._begin = min(self._before_last, self._file.size_bytes) if first_row else 0

    def take_range(self) -> StoredRange:
        """The stored bytes read since the last range, or since the beginning."""
        begin, self._begin = self._begin, min(self._num_bytes, self._file.size_bytes)
        return StoredRange(begin, self._begin)


def read_all(file: InputFile) -> bytes:
    """The whole file.

    Raises:
        InputChangedError: it is not as long as when the plan was made.
        SourceError: it cannot be read.
    """
    data = b"".join(stream(file))
    if len(data) != file.size_bytes:
        raise InputChangedError(
            f"{file.name}: expected {file.size_bytes} bytes, found {len(data)}; it changed during the run: run it again"
        )
    return data


class Compression(Enum):
    """How the bytes of a file of rows are compressed."""

    NONE = "none"
    ZSTD = "zstd"
    GZIP = "gzip"
    BZIP2 = "bzip2"
    XZ = "xz"


_COMPRESSIONS = {
    ".zst": Compression.ZSTD,
    ".gz": Compression.GZIP,
    ".bz2": Compression.BZIP2,
    ".xz": Compression.XZ,
}
_ROW_FORMATS = {".jsonl": FileFormat.JSON_LINES, ".json": FileFormat.JSON, ".csv": FileFormat.CSV}
_FORMATS = {
    ".parquet": FileFormat.PARQUET,
    **{stem + suffix: kind for stem, kind in _ROW_FORMATS.items() for suffix in ("", *_COMPRESSIONS)},
    ".txt": FileFormat.WHOLE_FILE,
    ".py": FileFormat.WHOLE_FILE,
    ".md": FileFormat.WHOLE_FILE,
}

READABLE = ".parquet, .jsonl, .json, .csv (these three plain or as .zst, .gz, .bz2, .xz), .txt, .py, .md"
"""What `format_of` knows, as error messages list it."""


def format_of(name: str) -> FileFormat | None:
    """How the file of that name is read, or None if it is not."""
    lowered = name.lower()
    return next((kind for suffix, kind in _FORMATS.items() if lowered.endswith(suffix)), None)


def compression_of(name: str) -> Compression:
    """How the file of that name is compressed."""
    lowered = name.lower()
    return next(
        (compression for suffix, compression in _COMPRESSIONS.items() if lowered.endswith(suffix)), Compression.NONE
    )


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Piece(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def read_ahead(pieces: Iterable[T]) -> Iterator[T]:
    """The same pieces in the same order, one fetched ahead by a thread; its error is raised where it occurred."""
    fetched: queue.Queue[_Piece[T] | _End] = queue.Queue(1)
    stopped = threading.Event()
    threading.Thread(target=_fetch, args=(pieces, fetched, stopped), name="read-ahead", daemon=True).start()
    try:
        while isinstance(item := fetched.get(), _Piece):
            yield item.value
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        while not fetched.empty():  # Frees the one place a fetch may be waiting for; it then sees that it is to stop.
            fetched.get_nowait()


def _fetch(pieces: Iterable[T], fetched: queue.Queue[_Piece[T] | _End], stopped: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for piece in pieces:
            fetched.put(_Piece(piece))
            if stopped.is_set():
                return
    except BaseException as failure:  # noqa: BLE001  raised again in the thread that reads
        error = failure
    fetched.put(_End(error))
