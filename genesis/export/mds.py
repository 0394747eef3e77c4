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
import struct
from dataclasses import dataclass, field
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

    def write(self, block: IdBlock) -> None:
        """Takes the next ids; see `TokenWriter.write`."""
        ends = block.ends if self.settings.seq_len is None else self._window_ends(block, self.settings.seq_len)
        start = 0
        for end in ends.tolist():
            self._add(block, start, end)
            start = end
        rest = block.ids[start:]
        if len(rest):
            if not self._open:
                self._open_at = block.at.moved(start)
            self._open.append(rest)
            self._open_tokens += len(rest)
            self._check_size(self._open_tokens * self.settings.dtype.itemsize)

    def _window_ends(self, block: IdBlock, seq_len: int) -> npt.NDArray[np.int64]:
        return np.arange(seq_len - self._open_tokens, len(block.ids) + 1, seq_len, dtype=np.int64)

    def _add(self, block: IdBlock, start: int, end: int) -> None:
        """Takes the sample that ends at ``end``; it begins at ``start``, or in an earlier block."""
        ids = block.ids[start:end]
        num_tokens = self._open_tokens + len(ids)
        body_bytes = num_tokens * self.settings.dtype.itemsize
        head = b"" if self.settings.seq_len else _sample_head(num_tokens, body_bytes)
        sample_bytes = len(head) + body_bytes
        if self._sizes and self._size_bytes + sample_bytes + 4 > self.settings.size_limit_bytes:
            self._flush()
        if not self._sizes:
            self._first = self._open_at or block.at.moved(start)
            self._size_bytes = len(self.header) + 8
        if head:
            self._samples.append(head)
        if self._open:
            self._samples += [piece.data.cast("B") for piece in self._open]
            self._open, self._open_tokens, self._open_at = [], 0, None
        self._samples.append(ids.data.cast("B"))
        self._sizes.append(sample_bytes)
        self._size_bytes += sample_bytes + 4
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
        raw = b"".join([head, *self._samples])
        raw_name = f"shard.{self.shards:05}.mds"
        zip_data = None
        body = raw
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

    def _put(self, path: Path, body: bytes) -> None:
        with TemporaryFile(self.folder) as file:
            file.write(memoryview(body))
            file.replace(path)
        sync_folder(self.folder)

    def _described(self, name: str, body: bytes) -> dict[str, object]:
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
