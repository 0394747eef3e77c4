"""What every form of an export is written through, and the forms that are one long row of ids beside an index.

A writer takes blocks of ids with the places where documents end; a document may come in any number of blocks. It says
to which position its files are good when they are synced, so that whoever goes on feeds it from there.

Megatron, datatrove and npy share `RowWriter`: ids appended as they come, 8 bytes a document beside them, and an index
made of those at the end in pieces of 8 MB. So memory does not grow with the corpus, nor with a document.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from genesis.errors import UsageError
from genesis.export.files import GrowingFile, part_of
from genesis.export.options import ExportFormat, Ids
from genesis.export.record import ExportPosition, ExportRecord
from genesis.token_formats import (
    DATATROVE_VOCABULARY,
    MEGATRON_DTYPES,
    MEGATRON_HEADER,
    MEGATRON_MAGIC,
    MEGATRON_VERSION,
)
from genesis.tokenizer.export import write_file

NPY_HEADER_BYTES = 128
_MEGATRON_LONGEST = 2**31 - 1
_CHECKPOINT_BYTES = 128 << 20
"""Written between two checkpoints: what a kill may cost is done again in half a second."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class IdBlock:
    """Some ids in a row, and the documents that end among them."""

    ids: Ids
    ends: npt.NDArray[np.int64]
    """int64[D], where documents end among ``ids``, EOS included; ascending."""
    at: ExportPosition
    """Where the first id stands."""


class TokenWriter(Protocol):
    """Writes one form."""

    documents: int
    """Written so far."""
    tokens: int
    """Their ids."""

    def write(self, block: IdBlock) -> None:
        """Takes the next ids.

        Raises:
            UsageError: a document is too long for the form.
            StoreError: there is no space.
        """

    def end_source(self) -> int:
        """Gives up the ids of a document that has not ended, and returns how many they were."""

    def checkpoint_due(self) -> bool:
        """Whether enough was written since the last `sync`."""

    def sync(self, now: ExportPosition) -> tuple[ExportPosition, dict[str, int]]:
        """Puts what is written on the disk.

        Args:
            now: the position behind all ids that were written.

        Returns:
            The position to go on from, at which ``documents`` and ``tokens`` hold, and the sizes of the growing files.
        """

    @property
    def is_empty(self) -> bool:
        """Whether no document has ended yet."""

    def finish(self) -> None:
        """Completes the files and gives them their names, last the one that readers open first.

        Raises:
            StoreError: there is no space.
        """

    def spare_files(self) -> list[Path]:
        """What is left over once the record says that the export is complete."""

    def close(self) -> None:
        """Gives descriptors back."""


@dataclass(slots=True)
class RowWriter:
    """Ids in one file, and in another an int64 for each document: how many ids end with it.

    Attributes:
        ids_file: the ids, behind ``header_bytes`` bytes.
        ends_file: the documents' ends, behind as many bytes.
        complete: makes what else the form has; see `make_writer`.
    """

    ids_file: GrowingFile
    ends_file: GrowingFile
    dtype: np.dtype[np.integer]
    header_bytes: int
    longest: int
    complete: Callable[[RowWriter], None]
    documents: int
    tokens: int
    keeps_ends: bool
    _open_tokens: int = 0
    _since_sync: int = 0

    def write(self, block: IdBlock) -> None:
        """See `TokenWriter`."""
        num_ids, ends = len(block.ids), block.ends
        if len(ends):
            absolute = ends + (self.tokens + self._open_tokens)
            lengths = np.diff(absolute, prepend=self.tokens)
            self._check_length(int(lengths.max()))
            self.ends_file.write(absolute.astype("<i8", copy=False).data)
            self.documents += len(ends)
            self.tokens = int(absolute[-1])
            self._open_tokens = num_ids - int(ends[-1])
        else:
            self._open_tokens += num_ids
        self._check_length(self._open_tokens)
        self.ids_file.write(block.ids.data)
        self._since_sync += block.ids.nbytes

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.longest:
            raise UsageError(
                f"document {self.documents} has {num_tokens} ids or more, this form at most {self.longest}; export to "
                "datatrove or npy"
            )

    def end_source(self) -> int:
        """See `TokenWriter`."""
        cut, self._open_tokens = self._open_tokens, 0
        if cut:
            self.ids_file.truncate(self.header_bytes + self.tokens * self.dtype.itemsize)
        return cut

    def checkpoint_due(self) -> bool:
        """See `TokenWriter`."""
        return self._since_sync >= _CHECKPOINT_BYTES

    def sync(self, now: ExportPosition) -> tuple[ExportPosition, dict[str, int]]:
        """See `TokenWriter`; the files go to where the caller stands, in the middle of a document as well."""
        self._since_sync = 0
        self.ids_file.sync()
        self.ends_file.sync()
        return now, {file.path.name: file.size_bytes for file in (self.ids_file, self.ends_file)}

    @property
    def is_empty(self) -> bool:
        """See `TokenWriter`."""
        return self.documents == 0

    def finish(self) -> None:
        """See `TokenWriter`."""
        self.complete(self)

    def spare_files(self) -> list[Path]:
        """See `TokenWriter`."""
        return [] if self.keeps_ends else [part_of(self.ends_file.path)]

    def close(self) -> None:
        """See `TokenWriter`."""
        self.ids_file.close()
        self.ends_file.close()

    def all_ends(self) -> Iterator[npt.NDArray[np.int64]]:
        """The documents' ends in pieces of at most 8 MB."""
        for first in range(0, self.documents, _PIECE):
            count = min(_PIECE, self.documents - first)
            yield self.ends_file.read_int64(self.header_bytes + 8 * first, count)


@dataclass(frozen=True, slots=True)
class _Form:
    ids_ending: str
    ends_ending: str
    complete: Callable[[RowWriter], None]
    header_bytes: int = 0
    longest: int = 2**62
    keeps_ends: bool = True


def make_row_writer(folder: Path, record: ExportRecord) -> RowWriter:
    """The writer of a Megatron, datatrove or npy export, going on where ``record`` stands.

    Raises:
        StoreError: its files cannot be opened, or are not what the record says.
    """
    name, dtype = record.request.name, np.dtype(record.dtype)
    vocabulary = record.vocabulary_sha256 or "unknown"
    forms = {
        ExportFormat.MEGATRON: _Form(".bin", ".ends", _complete_megatron, longest=_MEGATRON_LONGEST, keeps_ends=False),
        ExportFormat.DATATROVE: _Form(".ds", ".ds.index", lambda writer: _complete_datatrove(writer, vocabulary)),
        ExportFormat.NPY: _Form(".npy", ".ends.npy", _complete_npy, header_bytes=NPY_HEADER_BYTES),
    }
    form = forms[record.request.to]
    files = []
    for ending in (form.ids_ending, form.ends_ending):
        path = folder / (name + ending)
        file = GrowingFile.open(path, record.file_bytes.get(path.name, 0))
        if form.header_bytes and not file.size_bytes:
            file.write(bytes(form.header_bytes))
        files.append(file)
    held = (files[0].size_bytes - form.header_bytes) // dtype.itemsize
    return RowWriter(
        ids_file=files[0],
        ends_file=files[1],
        dtype=dtype,
        header_bytes=form.header_bytes,
        longest=form.longest,
        complete=form.complete,
        documents=record.documents,
        tokens=record.tokens,
        keeps_ends=form.keeps_ends,
        _open_tokens=held - record.tokens,
    )


def _complete_megatron(writer: RowWriter) -> None:
    codes = {np.dtype(dtype): code for code, dtype in MEGATRON_DTYPES.items()}
    index = GrowingFile.open(writer.ids_file.path.with_suffix(".idx"), 0)
    try:
        count = writer.documents
        index.write(MEGATRON_HEADER.pack(MEGATRON_MAGIC, MEGATRON_VERSION, codes[writer.dtype], count, count + 1))
        for lengths, _ in _lengths_and_starts(writer):
            index.write(lengths.astype("<i4").data)
        for _, starts in _lengths_and_starts(writer):
            index.write((starts * writer.dtype.itemsize).astype("<i8").data)
        for first in range(0, count + 1, _PIECE):
            index.write(np.arange(first, min(first + _PIECE, count + 1), dtype="<i8").data)
        writer.ids_file.publish()
        index.publish()
    finally:
        index.close()


def _lengths_and_starts(writer: RowWriter) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    before = 0
    for ends in writer.all_ends():
        lengths = np.diff(ends, prepend=before)
        yield lengths, ends - lengths
        before = int(ends[-1])


def _complete_datatrove(writer: RowWriter, vocabulary: str) -> None:
    metadata = writer.ids_file.path.with_name(writer.ids_file.path.name + ".metadata")
    text = f"{DATATROVE_VOCABULARY}{vocabulary}|{writer.dtype.itemsize}\n{writer.tokens}\n{metric_count(writer.tokens)}"
    write_file(metadata, text.encode())
    writer.ends_file.publish()
    writer.ids_file.publish()


def metric_count(count: int) -> str:
    """``1.23 GT``: three digits and a prefix, as datatrove writes into its metadata."""
    exponent = len(str(count)) - 1
    prefix = ("", "k", "M", "G", "T", "P", "E")[exponent // 3]
    return f"{count / 10 ** (exponent // 3 * 3):.{2 - exponent % 3}f} {prefix}T"


def _complete_npy(writer: RowWriter) -> None:
    writer.ids_file.overwrite(npy_header(writer.dtype, writer.tokens), 0)
    writer.ends_file.overwrite(npy_header(np.dtype("<i8"), writer.documents), 0)
    writer.ends_file.publish()
    writer.ids_file.publish()


def npy_header(dtype: np.dtype[np.integer], count: int) -> bytes:
    """The 128 bytes before the numbers of a one-dimensional .npy file (format 1.0)."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    return (
        b"\x93NUMPY\1\0"
        + struct.pack("<H", NPY_HEADER_BYTES - 10)
        + (text.ljust(NPY_HEADER_BYTES - 11) + "\n").encode()
    )
