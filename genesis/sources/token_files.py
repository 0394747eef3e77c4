"""Documents that are ids already: Megatron's ``.bin/.idx`` and datatrove's ``.ds``, as a plan, tasks and batches.

What follows a plan is the pipeline of text: a task names a stretch of documents, and the worker that is given it
hands on their ids where it would encode. So order, packing, commits, lease and going on after a kill are those of any
source.

Nothing in these files is believed. Counts are held against the sizes of the files before anything is read by them,
and borders against each other in pieces of 65,536 documents; memory follows the pieces, never a number in a file. Ids
must be of the vocabulary, and EOS must end every document and stand nowhere else: readers of a store find documents
by it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from genesis.errors import CorruptInputError, InputNotFoundError, SourceError
from genesis.sources.base import FileFormat, InputFile, InputPlan, TokenBatch, TokenRules, TokensTask, natural_key
from genesis.token_formats import (
    DATATROVE_VOCABULARY,
    EXPORT_RECORD_NAME,
    MEGATRON_DTYPES,
    MEGATRON_HEADER,
    MEGATRON_MAGIC,
    MEGATRON_VERSION,
    TokenFormat,
)
from manifests.serialisation import parse_object

TASK_IDS = 1 << 20
"""Ids a task aims at: 4 MB in the ring."""
MAX_DOCUMENT_IDS = 1 << 28
_PIECE = 1 << 16
"""Documents, or sequences, of an index looked at together."""
_EDGE_BYTES = 64 << 10
_RECORD_BYTES = 16 << 20
_SHA256 = re.compile("[0-9a-f]{64}")

_FORMATS = {TokenFormat.MEGATRON: FileFormat.MEGATRON, TokenFormat.DATATROVE: FileFormat.DATATROVE}
_ENDINGS = {FileFormat.MEGATRON: (".bin", ".idx"), FileFormat.DATATROVE: (".ds", ".ds.index")}
TOKEN_FORMATS = frozenset(_ENDINGS)

Documents = tuple[int, npt.NDArray[np.int64]]
"""Where some documents begin in the file of ids, in ids; and where each of them ends behind that, int64[D]."""


def token_plan(source: str, token_format: TokenFormat, inputs: Sequence[str]) -> InputPlan:
    """The plan of a source that comes as ids.

    Args:
        source: the source's name.
        token_format: of the files.
        inputs: files of ids, their indices, Megatron's prefixes, or folders (every such file below them).

    Raises:
        InputNotFoundError: there is none, or one has no index.
        CorruptInputError: an index is not one, or contradicts the sizes of the files.
        SourceError: a file cannot be read.
    """
    kind = _FORMATS[token_format]
    paths = sorted({path for text in inputs for path in _expand(kind, text)})
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    named = sorted(
        ((path.relative_to(folder).as_posix(), path) for path in paths), key=lambda pair: natural_key(pair[0])
    )
    return InputPlan(source=source, text_field="", files=tuple(_input_file(kind, name, path) for name, path in named))


def _expand(kind: FileFormat, text: str) -> list[Path]:
    ending, index_ending = _ENDINGS[kind]
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        found = sorted(each for each in path.rglob(f"*{ending}") if each.is_file() and not each.name.startswith("."))
        if not found:
            raise InputNotFoundError(f"{path}: expected files of ids ({ending}) in the folder, found none")
        return found
    prefix = str(path).removesuffix(index_ending).removesuffix(ending)
    ids_path = Path(prefix + ending)
    if not ids_path.is_file():
        raise InputNotFoundError(f"{text}: expected a file of ids {ids_path.name}, found none in {ids_path.parent}")
    return [ids_path]


def index_path(file: InputFile) -> Path:
    """Where the index of a file of ids is."""
    ending, index_ending = _ENDINGS[file.format]
    return Path(file.location.removesuffix(ending) + index_ending)


def _input_file(kind: FileFormat, name: str, path: Path) -> InputFile:
    digest = hashlib.sha256()
    file = InputFile(name=name, location=str(path), format=kind, size_bytes=_size(path), digest="")
    for each in (path, index_path(file)):
        digest.update(_edges_digest(each))
    file = InputFile(name, file.location, kind, file.size_bytes, digest.hexdigest())
    open_index(file)
    return file


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error


def _edges_digest(path: Path) -> bytes:
    """A digest over size, first and last 64 KiB, as other local files have."""
    try:
        with path.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            digest = hashlib.sha256(f"{size_bytes}\n".encode() + stream.read(_EDGE_BYTES))
            stream.seek(max(size_bytes - _EDGE_BYTES, 0))
            digest.update(stream.read(_EDGE_BYTES))
    except FileNotFoundError:
        raise InputNotFoundError(f"{path}: expected the index of the file of ids beside it, found none") from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.digest()


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """An ``.idx``, of which the header and the sizes have been checked."""

    path: Path
    dtype: np.dtype[np.integer]
    num_sequences: int
    num_documents: int
    ids_bytes: int
    """Size of the file of ids."""

    @classmethod
    def open(cls, path: Path, ids_bytes: int) -> MegatronIndex:
        """Reads the header.

        Args:
            path: the index.
            ids_bytes: size of the file of ids.

        Raises:
            CorruptInputError: it is no index of such a file.
        """
        size_bytes = _size(path)
        head = _read(path, 0, min(MEGATRON_HEADER.size, size_bytes))
        if len(head) < MEGATRON_HEADER.size or not head.startswith(MEGATRON_MAGIC):
            raise CorruptInputError(f"{path}: expected Megatron's index ({MEGATRON_MAGIC!r}…), found {head[:9]!r}")
        _, version, code, num_sequences, num_borders = MEGATRON_HEADER.unpack(head)
        if version != MEGATRON_VERSION:
            raise CorruptInputError(f"{path}: expected version {MEGATRON_VERSION}, found {version}")
        if code not in MEGATRON_DTYPES:
            raise CorruptInputError(f"{path}: expected ids of a whole-number type, found the code {code}")
        expected = MEGATRON_HEADER.size + 12 * num_sequences + 8 * num_borders
        if size_bytes != expected:
            modes = (
                " (one with modes, of a multimodal set, is not read)" if size_bytes == expected + num_sequences else ""
            )
            raise CorruptInputError(
                f"{path}: {num_sequences} sequences and {num_borders} borders of documents take {expected} bytes, "
                f"found {size_bytes}{modes}; it is damaged or cut off, copy it again"
            )
        if num_borders == 0:
            raise CorruptInputError(f"{path}: expected borders of documents, found none")
        index = cls(path, np.dtype(MEGATRON_DTYPES[code]), num_sequences, num_borders - 1, ids_bytes)
        index._check_end()
        return index

    def _check_end(self) -> None:
        if int(self._borders(self.num_documents, 1)[0]) != self.num_sequences:
            raise CorruptInputError(
                f"{self.path}: expected the last document to end with sequence {self.num_sequences}, it ends with "
                f"{int(self._borders(self.num_documents, 1)[0])}"
            )
        end = 0
        if self.num_sequences:
            last = self.num_sequences - 1
            end = int(self._pointers(last, 1)[0]) + int(self._lengths(last, 1)[0]) * self.dtype.itemsize
        if end != self.ids_bytes:
            raise CorruptInputError(
                f"{self.path}: the sequences end at byte {end}, the file of ids has {self.ids_bytes} bytes; one of the "
                "two is cut off or of another set"
            )

    def documents(self, first_row: int) -> Iterator[Documents]:
        """The documents from ``first_row`` on, some thousands at a time.

        Raises:
            CorruptInputError: borders go backwards, a length is negative, or sequences do not lie end to end; what is
                before has been yielded.
        """
        row = first_row
        position: int | None = None if first_row else 0
        while row < self.num_documents:
            borders = self._borders(row, min(_PIECE, self.num_documents - row) + 1)
            within = int(borders.min()) >= 0 and int(borders.max()) <= self.num_sequences
            if not within or (row == 0 and borders[0] != 0) or (np.diff(borders) < 0).any():
                raise CorruptInputError(f"{self.path}: the borders of documents {row} on go backwards or too far")
            # Documents of very many sequences come fewer at a time.
            count = max(int(np.searchsorted(borders, borders[0] + _PIECE, side="right")) - 1, 1)
            borders = borders[: count + 1]
            first, num_sequences = int(borders[0]), int(borders[-1] - borders[0])
            lengths = self._lengths(first, num_sequences).astype(np.int64)
            ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
            if num_sequences:
                pointers = self._pointers(first, num_sequences)
                position = int(pointers[0]) if position is None else position
                misplaced = pointers != position + ends[:-1] * self.dtype.itemsize
                end = position + int(ends[-1]) * self.dtype.itemsize
                outside = position < 0 or end > self.ids_bytes or position % self.dtype.itemsize != 0
                if (lengths < 0).any() or misplaced.any() or outside:
                    raise CorruptInputError(
                        f"{self.path}: the sequences {first} to {first + num_sequences - 1} have negative lengths, "
                        "or do not lie end to end in the file of ids"
                    )
                yield position // self.dtype.itemsize, ends[borders[1:] - first]
                position = end
            else:
                yield (position or 0) // self.dtype.itemsize, np.zeros(count, dtype=np.int64)
            row += count

    def _lengths(self, first: int, count: int) -> npt.NDArray[np.int32]:
        return np.frombuffer(_read(self.path, MEGATRON_HEADER.size + 4 * first, 4 * count), dtype="<i4")

    def _pointers(self, first: int, count: int) -> npt.NDArray[np.int64]:
        start = MEGATRON_HEADER.size + 4 * self.num_sequences
        return np.frombuffer(_read(self.path, start + 8 * first, 8 * count), dtype="<i8")

    def _borders(self, first: int, count: int) -> npt.NDArray[np.int64]:
        start = MEGATRON_HEADER.size + 12 * self.num_sequences
        return np.frombuffer(_read(self.path, start + 8 * first, 8 * count), dtype="<i8")


@dataclass(frozen=True, slots=True)
class DatatroveIndex:
    """A ``.ds.index``: the end of each document in ids, uint64, and nothing else."""

    path: Path
    dtype: np.dtype[np.integer]
    num_documents: int
    num_tokens: int

    @classmethod
    def open(cls, path: Path, ids_bytes: int) -> DatatroveIndex:
        """Looks at the index's size and end; the width of an id follows from it and the size of the file of ids.

        Raises:
            CorruptInputError: it is no index of such a file.
        """
        size_bytes = _size(path)
        if size_bytes % 8 or not size_bytes:
            raise CorruptInputError(f"{path}: expected 8 bytes for each of one document or more, found {size_bytes}")
        num_tokens = int.from_bytes(_read(path, size_bytes - 8, 8), "little")
        for width in (2, 4):
            if num_tokens * width == ids_bytes:
                return cls(path, np.dtype(f"<u{width}"), size_bytes // 8, num_tokens)
        raise CorruptInputError(
            f"{path}: the last document ends after {num_tokens} ids, the file of ids has {ids_bytes} bytes, neither "
            "2 nor 4 for each; one of the two is cut off or of another set"
        )

    def documents(self, first_row: int) -> Iterator[Documents]:
        """The documents from ``first_row`` on, some thousands at a time.

        Raises:
            CorruptInputError: an end is before the one before it, or behind the file; what is before has been yielded.
        """
        start = int(self._ends(first_row - 1, 1)[0]) if first_row else 0
        for row in range(first_row, self.num_documents, _PIECE):
            ends = self._ends(row, min(_PIECE, self.num_documents - row))
            within = 0 <= start <= self.num_tokens and int(ends.min()) >= 0 and int(ends.max()) <= self.num_tokens
            if not within or int(np.diff(ends, prepend=start).min()) < 0:
                raise CorruptInputError(f"{self.path}: the ends of documents {row} on go backwards or too far")
            yield start, ends - start
            start = int(ends[-1])

    def _ends(self, first: int, count: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(_read(self.path, 8 * first, 8 * count), dtype="<i8")


def open_index(file: InputFile) -> MegatronIndex | DatatroveIndex:
    """The index of a file of ids.

    Raises:
        CorruptInputError: it is not one, or not of this file.
        SourceError: it cannot be read.
    """
    kind = MegatronIndex if file.format is FileFormat.MEGATRON else DatatroveIndex
    return kind.open(index_path(file), file.size_bytes)


def _read(path: Path, offset: int, num_bytes: int) -> bytes:
    """Bytes of a file; the caller has held offset and number against the file's size."""
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            body = stream.read(num_bytes)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    if len(body) != num_bytes:
        raise CorruptInputError(f"{path}: expected {num_bytes} bytes at {offset}, found {len(body)}: it was cut off")
    return body


def token_tasks(file: InputFile, rules: TokenRules | None, first_row: int) -> Iterator[TokensTask]:
    """The file's documents from ``first_row`` on, cut into tasks of some million ids.

    Raises:
        CorruptInputError: the index contradicts itself; what is before has been yielded.
        SourceError: a document is too large, or a file cannot be read.
    """
    if rules is None:
        raise RuntimeError("tasks of ids need the rules of a vocabulary")
    index = open_index(file)
    row = first_row
    for start, ends in index.documents(first_row):
        first = 0
        while first < len(ends):
            begin = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, begin + TASK_IDS, side="right")), first + 1)
            task_ends = ends[first:last] - begin
            if int(task_ends[-1]) > MAX_DOCUMENT_IDS:
                raise SourceError(
                    f"{file.name}: document {row + first} has {int(task_ends[-1])} ids, expected at most "
                    f"{MAX_DOCUMENT_IDS}"
                )
            yield TokensTask(file, rules, index.dtype.str, row + first, start + begin, task_ends)
            first = last
        row += len(ends)


def token_batches(task: TokensTask) -> Iterator[TokenBatch]:
    """The task's documents as one batch; those of no id at all are left out.

    Raises:
        CorruptInputError: an id is outside the vocabulary or reserved, or EOS does not stand where documents end.
        SourceError: the file cannot be read.
    """
    dtype = np.dtype(task.dtype)
    num_ids = int(task.ends[-1])
    body = _read(Path(task.file.location), task.first_id * dtype.itemsize, num_ids * dtype.itemsize)
    found = np.frombuffer(body, dtype=dtype)
    _check_range(task, found)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), task.ends[:-1]])
    kept = task.ends > starts
    rows, ends = np.flatnonzero(kept) + task.first_row, task.ends[kept]
    lacking = _check_eos(task, found, rows, ends)
    stored_bytes = ends * dtype.itemsize
    ids = found.astype(np.uint32)
    if len(lacking):
        ids = np.insert(ids, ends[lacking], task.rules.eos_id)
        added = np.zeros(len(ends), dtype=np.int64)
        added[lacking] = 1
        ends = ends + np.cumsum(added)
    yield TokenBatch(ids, ends, rows, stored_bytes, task.first_row + len(task.ends))


def _check_range(task: TokensTask, ids: npt.NDArray[np.integer]) -> None:
    rules = task.rules
    if not len(ids):
        return
    if int(ids.max()) >= rules.num_ids or int(ids.min()) < 0:
        wrong = int(np.flatnonzero((ids >= rules.num_ids) | (ids < 0))[0])
        raise _at(
            task, wrong, f"expected ids of 0 to {rules.num_ids - 1}, the store's vocabulary, found {int(ids[wrong])}"
        )
    reserved = np.flatnonzero((ids < rules.num_special) & (ids != rules.eos_id))
    if len(reserved):
        wrong = int(reserved[0])
        raise _at(task, wrong, f"expected no special id but EOS ({rules.eos_id}), found {int(ids[wrong])}")


def _check_eos(
    task: TokensTask, ids: npt.NDArray[np.integer], rows: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.intp]:
    """The numbers, among the documents, of those that do not end with EOS, if they may."""
    is_end = np.zeros(len(ids), dtype=bool)
    is_end[ends - 1] = True
    is_eos = ids == task.rules.eos_id
    inside = np.flatnonzero(is_eos & ~is_end)
    if len(inside):
        raise _at(
            task,
            int(inside[0]),
            f"expected EOS ({task.rules.eos_id}) at the ends of documents only, found it inside one",
        )
    lacking = np.flatnonzero(~is_eos[ends - 1])
    if len(lacking) and not task.rules.append_eos:
        raise CorruptInputError(
            f"{task.file.name}: document {int(rows[lacking[0]])} does not end with EOS ({task.rules.eos_id}), the "
            "store's documents do; if the file was made without (Megatron's --append-eod), give --append-eos"
        )
    return lacking


def _at(task: TokensTask, position: int, what: str) -> CorruptInputError:
    document = int(np.searchsorted(task.ends, position, side="right"))
    start = int(task.ends[document - 1]) if document else 0
    return CorruptInputError(f"{task.file.name}: document {task.first_row + document}, id {position - start}: {what}")


def recorded_vocabularies(plan: InputPlan) -> dict[str, str]:
    """The digests of the vocabularies that files say they were made with, by the files' names.

    That is what ``genesis export shards`` wrote beside them, and datatrove's metadata of such an export. Files that say
    nothing are left out: of those only the ids themselves tell whether they fit.
    """
    found = {}
    for file in plan.files:
        path = Path(file.location)
        for read in (_of_export, _of_metadata):
            digest = read(path, _ENDINGS[file.format][0])
            if digest is not None:
                found[file.name] = digest
                break
    return found


def _of_export(path: Path, ending: str) -> str | None:
    record = path.with_name(EXPORT_RECORD_NAME)
    if not record.is_file():
        return None
    body = parse_object(_read(record, 0, min(_size(record), _RECORD_BYTES)), str(record))
    request = body.get("request")
    of_this_file = isinstance(request, dict) and request.get("name") == path.name.removesuffix(ending)
    return _digest(body.get("vocabulary_sha256")) if of_this_file else None


def _of_metadata(path: Path, ending: str) -> str | None:
    metadata = path.with_name(path.name + ".metadata")
    if ending != ".ds" or not metadata.is_file():
        return None
    tokenizer = _read(metadata, 0, min(_size(metadata), _EDGE_BYTES)).decode(errors="replace").partition("|")[0]
    return _digest(tokenizer.removeprefix(DATATROVE_VOCABULARY)) if tokenizer.startswith(DATATROVE_VOCABULARY) else None


def _digest(value: object) -> str | None:
    return value if isinstance(value, str) and _SHA256.fullmatch(value) else None
