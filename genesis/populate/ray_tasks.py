"""What the machines of a Ray cluster do: read the list of tasks, encode one, make and store one shard.

Plain functions and one class, which `ray_engine.py` makes remote. Each depends on its arguments alone, so that Ray may
do it again wherever a machine has died: the same ids, the same shard, the same names in the store.

A process keeps what is dear to make: its encoder (0.7 s), its connection to the store, one shard image (20 MB).
"""

from __future__ import annotations

import itertools
import logging
import platform
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

import genesis
from genesis.errors import GenesisError
from genesis.populate.committer import ShardFacts, ShardObjects
from genesis.populate.pool import without_text
from genesis.populate.ring import Failed
from genesis.populate.worker import check_no_eos, join_documents
from genesis.sources import tasks
from genesis.sources.base import InputPlan, LinesTask, RowGroupTask, Task, TextBatch, TokenBatch
from genesis.sources.planning import content_digest
from genesis.sources.reading import read_any_batches
from genesis.store import ObjectInfo, Store, open_store
from genesis.tokenizer import EncoderSpec, Engine
from manifests import Cursor, ShardEntry, ShardImage

logger = logging.getLogger(__name__)

CALL_TEXT_BYTES = 64 << 20
"""An encode call ends after so much text and is gone on with by another: it bounds an object (some 32 MB)."""

MAX_TASKS_PER_CALL = 8
"""Tasks that one encode call does: some 32 MB of text. A call costs the driver 2 to 3 ms, whatever is in it."""

_MIN_OBJECT_BYTES = 128 << 10
"""Ray sends results of under 100 KiB to the driver instead of leaving them where they were made."""


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """The next tasks of the input, for one encode call, without their text, which comes beside."""

    tasks: tuple[Task, ...]
    has_text: bool
    """Some task brings its text: the object beside this one is needed."""
    ended: bool
    failure: Failed | None = None
    """Why there are no more, if not because the input has ended."""


class TaskReader:
    """The input's tasks from a cursor on: reads footers, and decompresses what cannot be split."""

    def __init__(self, plan: InputPlan, cursor: Cursor | None) -> None:
        self._tasks = tasks(plan, cursor)

    def next(self, limit: int) -> tuple[TaskGroup, list[bytes | None]]:
        """At most ``limit`` tasks, and the text of each, None for a task that reads its own."""
        named: list[Task] = []
        texts: list[bytes | None] = []
        failure: Failed | None = None
        try:
            for task in itertools.islice(self._tasks, limit):
                named.append(without_text(task))
                texts.append(task.data if isinstance(task, LinesTask) else None)
        except Exception as error:
            logger.debug("reading the tasks", exc_info=True)
            failure = _failed(error)
        ended = failure is not None or len(named) < limit
        has_text = any(text is not None for text in texts)
        return TaskGroup(tuple(named), has_text, ended, failure), texts if has_text else []


@dataclass(frozen=True, slots=True)
class Encoder:
    """A vocabulary, as an object that all machines can get."""

    sha256: str
    reference: list[Any]
    """One object reference: within a list Ray passes it on as it is."""
    narrow: bool
    """Every id fits into 16 bits."""


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """What the driver learns of the documents that were encoded of one task."""

    num_ids: npt.NDArray[np.integer]
    """uint32[D] or int64[D], of each document."""
    text_bytes: npt.NDArray[np.integer]
    """uint32[D] or int64[D], of each document."""
    rows: npt.NDArray[np.int64] | None
    """int64[D], the row of each document; None for the task's ``first_row`` and those behind it, without a gap."""
    end_row: int
    complete: bool
    """The task is read to its end."""


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """What the driver learns of an encode call."""

    node_id: str
    pieces: tuple[EncodedPiece, ...]
    """One for each task that was begun; only the last one may be incomplete."""
    failure: Failed | None = None
    """Why it went no further; what came before the failure is good."""


def encode(
    group: tuple[Task, ...], encoder: Encoder, texts: list[bytes | None] | None, first_text: int
) -> tuple[npt.NDArray[np.integer], EncodedGroup]:
    """Encodes a group of tasks, or the first `CALL_TEXT_BYTES` of it.

    Args:
        group: at least one task.
        encoder: the vocabulary.
        texts: the text of each task that brings it; None where none does.
        first_text: the place in ``texts`` of the first task's.

    Returns:
        uint16[M] or uint32[M], the ids of the documents, each with its EOS, and behind them whatever; what they are.
    """
    spec, engine = _engine(encoder)
    parts: list[npt.NDArray[np.integer]] = []
    pieces: list[EncodedPiece] = []
    failure: Failed | None = None
    room_bytes = CALL_TEXT_BYTES
    for index, named in enumerate(group, first_text):
        text = texts[index] if texts is not None else None
        task = replace(named, data=text) if isinstance(named, LinesTask) and text is not None else named
        batches = _EncodedTask(task)
        try:
            batches.encode(spec, engine, _dtype(encoder.narrow), room_bytes)
        except Exception as error:
            logger.debug("encoding %s", task.first_row, exc_info=True)
            failure = _failed(error)
        parts += batches.ids
        pieces.append(batches.piece())
        room_bytes -= batches.total_bytes
        if room_bytes < CALL_TEXT_BYTES // 2 or not batches.complete:
            break  # Rather than to end inside the next task, which is read again from its beginning to go on.
    node_id = ray.get_runtime_context().get_node_id()
    return _object_of(parts, encoder.narrow), EncodedGroup(node_id, tuple(pieces), failure)


class _EncodedTask:
    """The documents of one task, as far as they are encoded."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._num_ids: list[npt.NDArray[np.int64]] = []
        self._text_bytes: list[npt.NDArray[np.int64]] = []
        self._rows: list[npt.NDArray[np.int64]] = []
        self._end_row = task.first_row
        self.ids: list[npt.NDArray[np.integer]] = []
        self.total_bytes = 0
        self.complete = False

    def encode(self, spec: EncoderSpec, engine: Engine, dtype: np.dtype[Any], room_bytes: int) -> None:
        """Encodes the task to its end, or until ``room_bytes`` of text are encoded if it can be gone on with."""
        for batch in read_any_batches(self._task):
            ids, ends, byte_ends = _documents(batch, spec, engine, dtype)
            self.ids.append(ids)
            self._num_ids.append(np.diff(ends, prepend=0))
            self._text_bytes.append(np.diff(byte_ends, prepend=0))
            self._rows.append(batch.rows)
            self._end_row = batch.end_row
            self.total_bytes += int(byte_ends[-1]) if len(byte_ends) else 0
            if self.total_bytes >= room_bytes and isinstance(self._task, RowGroupTask):
                return
        self.complete = True

    def piece(self) -> EncodedPiece:
        """What the driver learns of them."""
        rows = _joined(self._rows)
        expected = np.arange(self._task.first_row, self._task.first_row + len(rows))
        return EncodedPiece(
            num_ids=_narrowed(_joined(self._num_ids)),
            text_bytes=_narrowed(_joined(self._text_bytes)),
            rows=None if np.array_equal(rows, expected) else rows,
            end_row=self._end_row,
            complete=self.complete,
        )


def _joined(arrays: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def _narrowed(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.integer]:
    """The counts in 32 bits if they fit: 8,000 documents then stay below the 100 KiB that Ray sends at once."""
    return counts.astype(np.uint32) if counts.max(initial=0) < 1 << 32 else counts


def _dtype(narrow: bool) -> np.dtype[np.integer]:
    return np.dtype(np.uint16) if narrow else np.dtype(np.uint32)


def _object_of(parts: list[npt.NDArray[np.integer]], narrow: bool) -> npt.NDArray[np.integer]:
    """The parts one after the other, never so few bytes that they would be sent to the driver."""
    dtype = _dtype(narrow)
    missing = _MIN_OBJECT_BYTES // dtype.itemsize - sum(map(len, parts))
    if missing > 0:
        parts = [*parts, np.zeros(missing, dtype)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _failed(error: Exception) -> Failed:
    return Failed(-1, type(error).__name__, str(error))


def _documents(
    batch: TextBatch | TokenBatch, spec: EncoderSpec, engine: Engine, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The ids of a batch, each document's with its EOS; where each ends; and the bytes up to there."""
    if isinstance(batch, TokenBatch):
        return batch.ids.astype(dtype), batch.ends, batch.stored_bytes
    encoded = engine.encode_batch(batch.texts)
    if spec.is_frozen:
        check_no_eos(encoded.ids, encoded.offsets, batch, spec.eos_id)
    ids = np.empty(len(encoded.ids) + len(batch.texts), dtype)
    ends = join_documents(encoded.ids, encoded.offsets, ids, spec.eos_id)
    lengths = np.fromiter(map(len, batch.texts), dtype=np.int64, count=len(batch.texts))
    return ids, ends, np.cumsum(lengths)


_engines: dict[str, tuple[EncoderSpec, Engine]] = {}


def _engine(encoder: Encoder) -> tuple[EncoderSpec, Engine]:
    """This process's encoder of the vocabulary; another vocabulary's is given up for it."""
    if encoder.sha256 not in _engines:
        _engines.clear()
        spec: EncoderSpec = ray.get(encoder.reference[0])
        _engines[encoder.sha256] = spec, spec.build()
    return _engines[encoder.sha256]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a shard: ``stop - start`` ids of one of the arrays beside it."""

    array: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A shard to be made."""

    facts: ShardFacts
    num_tokens: int
    parts: tuple[Part, ...]
    leftover: Part | None
    """Ids behind the shard that the driver is to have."""
    store_url: str
    replaceable: tuple[tuple[str, ObjectInfo | None], ...] = ()
    """Leftovers that may be replaced, by key, as they were before the driver was found to hold the lease still."""


@dataclass(frozen=True, slots=True)
class StoredOnNode:
    """A shard that is in the store."""

    entry: ShardEntry
    leftover: npt.NDArray[np.uint32] | None
    node_id: str


@dataclass(frozen=True, slots=True)
class NeedsLease:
    """Another object lies under a shard's key; only who holds the lease may replace it."""

    key: str
    found: ObjectInfo | None


class _LeaseNeededError(GenesisError):
    def __init__(self, answer: NeedsLease) -> None:
        super().__init__(f"{answer.key}: expected no object, found another run's")
        self.answer = answer


def store_shard(plan: ShardPlan, *arrays: npt.NDArray[np.integer]) -> StoredOnNode | NeedsLease | Failed:
    """Makes a shard of pieces of ``arrays`` and stores it in all its forms."""
    image = _image(plan.num_tokens)
    filled = 0
    for part in plan.parts:
        size = part.stop - part.start
        image.ids[filled : filled + size] = arrays[part.array][part.start : part.stop]
        filled += size
    if filled != plan.num_tokens:
        raise ValueError(f"expected pieces of {plan.num_tokens} ids, found {filled}")
    store = _store(plan.store_url)
    replaceable = dict(plan.replaceable)

    def may_replace(key: str) -> ObjectInfo | None:
        if key not in replaceable:
            raise _LeaseNeededError(NeedsLease(key, store.head(key)))
        return replaceable[key]

    try:
        entry = ShardObjects(store, may_replace).write(image, plan.facts)
    except _LeaseNeededError as refused:
        return refused.answer
    except GenesisError as error:
        return _failed(error)
    leftover = None
    if plan.leftover is not None:
        leftover = arrays[plan.leftover.array][plan.leftover.start : plan.leftover.stop].astype(np.uint32)
    return StoredOnNode(entry, leftover, ray.get_runtime_context().get_node_id())


@lru_cache(maxsize=1)
def _image(num_tokens: int) -> ShardImage:
    return ShardImage.empty(num_tokens)


@lru_cache(maxsize=1)
def _store(url: str) -> Store:
    return open_store(url)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a machine must see to take part."""

    genesis_version: str
    python_version: str
    files: tuple[tuple[str, int, str], ...]
    """Input files to be found here: path, size in bytes, digest."""
    store_url: str
    token: tuple[str, str] | None
    """A file that the driver wrote into the store's folder, and what is in it."""


def missing(needs: Needs) -> str | None:
    """What this machine lacks, as the end of a sentence; None if nothing."""
    found_version, found_python = genesis.__version__, platform.python_version()
    if found_version != needs.genesis_version:
        return f"has genesis {found_version}, expected {needs.genesis_version}"
    if found_python.rsplit(".", 1)[0] != needs.python_version.rsplit(".", 1)[0]:
        return f"has Python {found_python}, expected {needs.python_version}"
    for path, size_bytes, digest in needs.files:
        seen: tuple[int, str] | None = None
        with suppress(OSError):
            seen = content_digest(Path(path))
        if seen != (size_bytes, digest):
            return f"{'does not have' if seen is None else 'has another'} {path}, which is input"
    if needs.token is not None:
        path, content = needs.token
        written: str | None = None
        with suppress(OSError):
            written = Path(path).read_text(encoding="ascii")
        if written != content:
            return f"does not see the store's folder {Path(path).parent}"
        return None
    try:
        _store(needs.store_url).head("manifest.json")
    except GenesisError as error:
        return f"cannot reach the store ({error})"
    return None
