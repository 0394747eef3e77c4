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

PIECE_TEXT_BYTES = 64 << 20
"""A task of more text ends after so much of it and is gone on with by another: it bounds an object (some 32 MB)."""

TASKS_A_CALL = 4
"""Tasks that the reader of the input names at once: 16 MB of text where a task brings its text."""

_MIN_OBJECT_BYTES = 128 << 10
"""Ray sends results of under 100 KiB to the driver instead of leaving them where they were made."""


@dataclass(frozen=True, slots=True)
class NamedTasks:
    """The next tasks of the input, without their text, which comes beside."""

    tasks: tuple[Task, ...]
    ended: bool
    failure: Failed | None = None
    """Why there are no more, if not because the input has ended."""


class TaskReader:
    """The input's tasks from a cursor on: reads footers, and decompresses what cannot be split."""

    def __init__(self, plan: InputPlan, cursor: Cursor | None) -> None:
        self._tasks = tasks(plan, cursor)

    def next(self) -> tuple[object, ...]:
        """`NamedTasks`, and `TASKS_A_CALL` texts, None for a task that reads its own and where there is none."""
        named: list[Task] = []
        texts: list[bytes | None] = []
        failure: Failed | None = None
        try:
            for task in itertools.islice(self._tasks, TASKS_A_CALL):
                named.append(without_text(task))
                texts.append(task.data if isinstance(task, LinesTask) else None)
        except Exception as error:
            logger.debug("reading the tasks", exc_info=True)
            failure = _failed(error)
        ended = failure is not None or len(named) < TASKS_A_CALL
        absent = [None] * (TASKS_A_CALL - len(texts))
        return (NamedTasks(tuple(named), ended, failure), *texts, *absent)


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
    """What the driver learns of the documents that a task encoded; arrays as in `EncodedBlock`."""

    node_id: str
    ends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    text_bytes: npt.NDArray[np.int64]
    end_row: int
    complete: bool
    """The task is read to its end."""
    failure: Failed | None = None
    """Why it is not; what came before the failure is good."""


def encode(task: Task, text: bytes | None, encoder: Encoder) -> tuple[npt.NDArray[np.integer], EncodedPiece]:
    """Encodes a task, or the first `PIECE_TEXT_BYTES` of one that can be gone on with.

    Returns:
        uint16[M] or uint32[M], the ids of the documents, each with its EOS, and behind them whatever; what they are.
    """
    if isinstance(task, LinesTask) and text is not None:
        task = replace(task, data=text)
    spec, engine = _engine(encoder)
    dtype = _dtype(encoder.narrow)
    parts: list[npt.NDArray[np.integer]] = []
    ends: list[npt.NDArray[np.int64]] = []
    rows: list[npt.NDArray[np.int64]] = []
    text_bytes: list[npt.NDArray[np.int64]] = []
    total_ids = total_bytes = 0
    end_row = task.first_row
    complete, failure = False, None
    try:
        for batch in read_any_batches(task):
            ids, batch_ends, batch_bytes = _documents(batch, spec, engine, dtype)
            ends.append(batch_ends + total_ids)
            text_bytes.append(batch_bytes + total_bytes)
            parts.append(ids)
            rows.append(batch.rows)
            total_ids, end_row = total_ids + len(ids), batch.end_row
            total_bytes += int(batch_bytes[-1]) if len(batch_bytes) else 0
            if total_bytes >= PIECE_TEXT_BYTES and isinstance(task, RowGroupTask):
                break
        else:
            complete = True
    except Exception as error:
        logger.debug("encoding %s", task.first_row, exc_info=True)
        failure = _failed(error)
    piece = EncodedPiece(
        node_id=ray.get_runtime_context().get_node_id(),
        ends=_joined(ends),
        rows=_joined(rows),
        text_bytes=_joined(text_bytes),
        end_row=end_row,
        complete=complete,
        failure=failure,
    )
    return _object_of(parts, encoder.narrow), piece


def _joined(arrays: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


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
