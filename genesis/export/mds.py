"""MosaicML Streaming's MDS: ``shard.00000.mds`` … of a bounded size, and ``index.json``, which readers open first.

A sample has one column, ``tokens``, an array of uint16 or uint32: a document with its EOS, or a window of ``seq_len``
ids (a source's last ids that fill no window are left out). The files are those that streaming's own ``MDSWriter``
makes of the same samples with the same settings, byte for byte, except that it writes an empty shard before a first
sample that is larger than the limit.

A shard file appears whole, under its name, and a checkpoint follows each: so what a kill costs is one file, and a
document is never kept for the next run. What is known of the finished files is appended to ``index.json.part``, a
line each, so a checkpoint does not grow with their number. Memory: the limit twice, and the largest document.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from genesis.errors import UsageError
from genesis.export.files import GrowingFile, part_of
from genesis.export.options import Ids
from genesis.export.record import ExportPosition, ExportRecord
from genesis.export.writing import IdBlock
from genesis.store.durable import TemporaryFile, sync_folder
from genesis.store.folder import folder_errors

INDEX_NAME = "index.json"
_LIMIT_BYTES = 2**32
_Piece = bytes | memoryview


@dataclass(frozen=True, slots=True)
class MdsSettings:
    """What each shard file and the index say of how they were written."""

    dtype: np.dtype[np.integer]
    seq_len: int | None
    size_limit_bytes: int
    compression: str | None
    hashes: tuple[str, ...]

    @property
    def config(self) -> dict[str, object]:
        """The settings, as each shard's header and index entry hold them."""
        encoding = f"ndarray:{self.dtype.name}" + (f":{self.seq_len}" if self.seq_len else "")
        size = self.seq_len * self.dtype.itemsize if self.seq_len else None
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression,
            "hashes": list(self.hashes),
            "size_limit": self.size_limit_bytes,
            "column_names": ["tokens"],
            "column_encodings": [encoding],
            "column_sizes": [size],
        }


@dataclass(slots=True)
class MdsWriter:
    """Writes MDS; see `genesis.export.writing.TokenWriter`.

    Attributes:
        folder: where the files go.
        settings: how.
        lines: what index.json will say of each finished file.
        shards: files finished.
        documents: samples in them.
        tokens: their ids.
    """

    folder: Path
    settings: MdsSettings
    lines: GrowingFile
    header: bytes
    shards: int
    documents: int
    tokens: int
    _samples: list[_Piece] = field(default_factory=list)
    """Pieces of the samples that wait for their file."""
    _sizes: list[int] = field(default_factory=list)
    """Bytes of each of those samples."""
    _size_bytes: int = 0
    """Of the file they would make."""
    _waiting_tokens: int = 0
    _first: ExportPosition | None = None
    """Where the first of them begins."""
    _open: list[Ids] = field(default_factory=list)
    """A sample that has not ended."""
    _open_tokens: int = 0
    _open_at: ExportPosition | None = None
    _due: bool = False
    _pages: mmap.mmap | None = None

    def write(self, block: IdBlock) -> None:
        """Takes the next ids; see `TokenWriter.write`."""
        ends = block.ends if self.settings.seq_len is None else self._window_ends(block, self.settings.seq_len)
        start = 0
        if self._open and len(ends):
            start, ends = int(ends[0]), ends[1:]
            self._end_open(block, start)
        if len(ends):
            self._add_whole(block, start, ends)
            start = int(ends[-1])
        rest = block.ids[start:]
        if len(rest):
            if not self._open:
                self._open_at = block.at.moved(start)
            self._open.append(rest)
            self._open_tokens += len(rest)
            self._check_size(self._open_tokens * self.settings.dtype.itemsize)

    def _window_ends(self, block: IdBlock, seq_len: int) -> npt.NDArray[np.int64]:
        return np.arange(seq_len - self._open_tokens, len(block.ids) + 1, seq_len, dtype=np.int64)

    def _end_open(self, block: IdBlock, end: int) -> None:
        """Takes the sample that began in an earlier block and ends at ``end``."""
        pieces = [piece.data.cast("B") for piece in [*self._open, block.ids[:end]]]
        num_tokens, begin = self._open_tokens + end, self._open_at or block.at
        self._open, self._open_tokens, self._open_at = [], 0, None
        head = self._heads(np.array([num_tokens]))[0]
        size_bytes = len(head) + num_tokens * self.settings.dtype.itemsize
        self._room_for(np.array([size_bytes]), begin)
        self._take([head, *pieces], [size_bytes], num_tokens)

    def _add_whole(self, block: IdBlock, start: int, ends: npt.NDArray[np.int64]) -> None:
        """Takes the samples that end at ``ends``, the first of which begins at ``start``: 0.5 µs each."""
        starts = np.concatenate(([start], ends[:-1]))
        itemsize = self.settings.dtype.itemsize
        heads = self._heads(ends - starts)
        sizes = np.fromiter(map(len, heads), np.int64, len(heads)) + (ends - starts) * itemsize
        data = block.ids.data.cast("B")
        bounds = list(zip((starts * itemsize).tolist(), (ends * itemsize).tolist(), strict=True))
        first = 0
        while first < len(ends):
            last = first + self._room_for(sizes[first:], block.at.moved(int(starts[first])))
            bodies = [data[begin:end] for begin, end in bounds[first:last]]
            pieces: list[_Piece] = list(chain.from_iterable(zip(heads[first:last], bodies, strict=True)))
            self._take(pieces, sizes[first:last].tolist(), int(ends[last - 1] - starts[first]))
            first = last

    def _heads(self, num_tokens: npt.NDArray[np.int64]) -> list[bytes]:
        if self.settings.seq_len:
            return [b""] * len(num_tokens)
        return [_sample_head(number, number * self.settings.dtype.itemsize) for number in num_tokens.tolist()]

    def _room_for(self, sizes: npt.NDArray[np.int64], begin: ExportPosition) -> int:
        """How many of the next samples, at least one, go to one file, which is made ready for the first of them."""
        behind = np.cumsum(sizes + 4)
        fitting = int(np.searchsorted(behind, self.settings.size_limit_bytes - self._size_bytes, side="right"))
        if fitting and self._sizes:
            return fitting
        if self._sizes:
            self._flush()
        self._first, self._size_bytes = begin, len(self.header) + 8
        return max(int(np.searchsorted(behind, self.settings.size_limit_bytes - self._size_bytes, side="right")), 1)

    def _take(self, pieces: list[_Piece], sizes: list[int], num_tokens: int) -> None:
        self._samples += pieces
        self._sizes += sizes
        self._size_bytes += sum(sizes) + 4 * len(sizes)
        self._waiting_tokens += num_tokens
        self._check_size(self._size_bytes)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes >= _LIMIT_BYTES:
            raise UsageError(
                f"sample {self.documents + len(self._sizes) - 1} makes a shard file of {size_bytes} bytes or more, "
                f"MDS has room for {_LIMIT_BYTES - 1}; give --seq-len, or export to another form"
            )

    def end_source(self) -> int:
        """See `TokenWriter.end_source`."""
        cut, self._open, self._open_tokens, self._open_at = self._open_tokens, [], 0, None
        return cut

    def checkpoint_due(self) -> bool:
        """See `TokenWriter.checkpoint_due`: after each shard file."""
        return self._due

    def sync(self, now: ExportPosition) -> tuple[ExportPosition, dict[str, int]]:
        """See `TokenWriter.sync`; the next run begins with the first sample that is in no file yet."""
        self._due = False
        self.lines.sync()
        begin = self._first if self._sizes else self._open_at
        return begin or now, {self.lines.path.name: self.lines.size_bytes}

    @property
    def is_empty(self) -> bool:
        """See `TokenWriter.is_empty`."""
        return not self.documents and not self._sizes

    def finish(self) -> None:
        """See `TokenWriter.finish`."""
        if self._sizes:
            self._flush()
        path = self.folder / INDEX_NAME
        with folder_errors(self.folder, f"write {path}", size_bytes=self.lines.size_bytes):
            lines = part_of(path).read_bytes().splitlines()
            self._put(path, b'{"shards": [' + b", ".join(lines) + b'], "version": 2}')

    def spare_files(self) -> list[Path]:
        """See `TokenWriter.spare_files`."""
        return [part_of(self.folder / INDEX_NAME)]

    def close(self) -> None:
        """See `TokenWriter.close`."""
        self.lines.close()

    def _flush(self) -> None:
        """Makes a file of the samples that wait."""
        settings = self.settings
        offsets = np.zeros(len(self._sizes) + 1, dtype=np.int64)
        np.cumsum(self._sizes, out=offsets[1:])
        offsets += 4 + 4 * len(offsets) + len(self.header)
        head = struct.pack("<I", len(self._sizes)) + offsets.astype("<u4").tobytes() + self.header
        raw = self._joined([head, *self._samples])
        raw_name = f"shard.{self.shards:05}.mds"
        zip_data = None
        body: bytes | memoryview = raw
        if settings.compression is not None:
            body = zstandard.ZstdCompressor(level=_level(settings.compression)).compress(raw)
            zip_data = self._described(_basename(self.shards, settings), body)
        line = {"samples": len(self._sizes), "raw_data": self._described(raw_name, raw), "zip_data": zip_data}
        path = self.folder / _basename(self.shards, settings)
        with folder_errors(self.folder, f"write {path}", size_bytes=len(body)):
            self._put(path, body)
        self.lines.write(json.dumps(line | settings.config, sort_keys=True).encode() + b"\n")
        self.shards += 1
        self.documents += len(self._sizes)
        self.tokens += self._waiting_tokens
        self._samples, self._sizes, self._waiting_tokens, self._first = [], [], 0, None
        self._due = True

    def _joined(self, pieces: list[_Piece]) -> memoryview:
        """The pieces one after the other, in memory that the next file uses again: written past the page cache."""
        size_bytes = sum(map(len, pieces))
        if self._pages is None or len(self._pages) < size_bytes:
            self._pages = mmap.mmap(-1, size_bytes)
        self._pages.seek(0)
        for piece in pieces:
            self._pages.write(piece)
        return memoryview(self._pages)[:size_bytes]

    def _put(self, path: Path, body: bytes | memoryview) -> None:
        with TemporaryFile(self.folder) as file:
            file.write(memoryview(body))
            file.replace(path)
        sync_folder(self.folder)

    def _described(self, name: str, body: bytes | memoryview) -> dict[str, object]:
        hashes = {algorithm: hashlib.new(algorithm, body).hexdigest() for algorithm in self.settings.hashes}
        return {"basename": name, "bytes": len(body), "hashes": hashes}


def make_mds_writer(folder: Path, record: ExportRecord) -> MdsWriter:
    """The writer of an MDS export, going on where ``record`` stands.

    Raises:
        StoreError: its files cannot be opened, or are not what the record says.
    """
    request = record.request
    settings = MdsSettings(
        dtype=np.dtype(record.dtype),
        seq_len=request.seq_len,
        size_limit_bytes=request.size_limit_bytes or 0,
        compression=request.compression,
        hashes=request.hashes,
    )
    lines = GrowingFile.open(folder / INDEX_NAME, record.file_bytes.get(INDEX_NAME, 0))
    with folder_errors(folder, f"read {part_of(lines.path)}"):
        shards = part_of(lines.path).read_bytes().count(b"\n")
    header = json.dumps(settings.config, sort_keys=True).encode()
    return MdsWriter(folder, settings, lines, header, shards=shards, documents=record.documents, tokens=record.tokens)


@lru_cache(maxsize=1 << 14)
def _sample_head(num_tokens: int, body_bytes: int) -> bytes:
    """What comes before a document's ids: bytes of the column, number of dimensions with the shape's width, shape."""
    if num_tokens < 2**8:
        return struct.pack("<IBB", 2 + body_bytes, 1 << 2, num_tokens)
    if num_tokens < 2**16:
        return struct.pack("<IBH", 3 + body_bytes, 1 << 2 | 1, num_tokens)
    return struct.pack("<IBI", 5 + body_bytes, 1 << 2 | 2, num_tokens)


def _basename(number: int, settings: MdsSettings) -> str:
    return f"shard.{number:05}.mds" + (".zstd" if settings.compression else "")


def _level(compression: str) -> int:
    return int(compression.partition(":")[2] or 3)
