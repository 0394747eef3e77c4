"""One export from start to end: shards read and verified ahead, cut into documents, written, checkpointed.

    index ──walk──▶ shards, read ahead ──EOS──▶ documents ──▶ growing files ──sync──▶ genesis-export.json
                      sha256 of each              joined            (or whole MDS files)       the checkpoint

Guarantees (each held by a test): the files are a function of the chosen shards alone; killed at any moment, the same
command goes on and ends with the same bytes; nothing carries its final name before it is whole; no id is written that
no digest of the index vouches for. A store may grow meanwhile: an export holds the shards there were when it began.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from genesis.errors import InputChangedError, UsageError
from genesis.export.files import PART_ENDING
from genesis.export.mds import INDEX_NAME, make_mds_writer
from genesis.export.options import ExportFormat, ExportOptions, Ids, id_dtype
from genesis.export.reading import read_ahead
from genesis.export.record import RECORD_NAME, ExportPosition, ExportRecord, ExportRequest
from genesis.export.walk import ShardWalk, WalkedShard
from genesis.export.writing import IdBlock, TokenWriter, make_row_writer
from genesis.file_lock import FileLock, FileLockedError
from genesis.populate.crashpoint import crash_point
from genesis.snapshot import require_manifest
from genesis.store import ReadableStore, folder_of
from genesis.store.durable import make_folders, remove_leftovers
from genesis.store.folder import folder_errors
from genesis.tokenizer.export import write_file
from manifests import ContractError, Manifest, verify_manifest

logger = logging.getLogger(__name__)

_LOCK_NAME = ".genesis-export.lock"


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What a run did, and where the export stands."""

    folder: str
    to: str
    files: tuple[str, ...]
    """Names of the files; of an unfinished export none."""
    shards: int
    """Read and written, in all runs of this export."""
    documents: int
    """Documents (MDS with windows: windows) in the files."""
    tokens: int
    """Their ids, EOS included."""
    skipped_tokens: int
    """Ids of documents that began in shards before the chosen ones."""
    cut_tokens: int
    """Ids behind a source's last document (MDS with windows: window) that the store has whole."""
    dtype: str
    id_bytes: int
    """Bytes of ids that this run wrote."""
    seconds: float
    complete: bool
    was_complete: bool
    """An earlier run had made all of it; this one did nothing."""
    interrupted: bool
    """The run was asked to stop; the same command goes on."""


def export_shards(
    store: ReadableStore,
    folder: Path,
    options: ExportOptions,
    *,
    public_key: Ed25519PublicKey | None = None,
    stop: threading.Event | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportResult:
    """Exports a store's shards into ``folder``, going on where an earlier run of the same export was stopped.

    Args:
        store: only read.
        folder: made if it is not there; files in it that are not the export's stay.
        options: what and how.
        public_key: whose signature the manifest must carry; None to ask for none.
        stop: set it to checkpoint what is in hand and return.
        on_progress: told (shards written, shards expected) after each.

    Raises:
        UsageError: there is nothing to export, or other files lie where the export's would.
        StoreError: the store cannot be read, or the folder not written.
        ContractError: the store is damaged, or the folder holds an export with other options.
        InputChangedError: the folder holds an export of another store.
    """
    if folder_of(store.url) == folder.resolve():
        raise UsageError(f"{folder} is the store itself; give another folder")
    published = require_manifest(store)
    if public_key is not None:
        verify_manifest(published.body, public_key)
    with folder_errors(folder, f"write {folder}"):
        make_folders(folder)
        lock = FileLock(folder / _LOCK_NAME, required=False)
        try:
            lock.acquire()
        except FileLockedError:
            raise UsageError(
                f"{folder}: another export is writing there; wait for it, or give another folder"
            ) from None
    try:
        return _Run(store, published.manifest, folder, options, stop or threading.Event(), on_progress).run()
    finally:
        (folder / _LOCK_NAME).unlink(missing_ok=True)
        lock.release()


class _Run:
    """One run; holds what its steps share."""

    def __init__(
        self,
        store: ReadableStore,
        manifest: Manifest,
        folder: Path,
        options: ExportOptions,
        stop: threading.Event,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._folder = folder
        self._options = options
        self._stop = stop
        self._on_progress = on_progress
        self._id_bytes = 0
        self._started_s = time.monotonic()

    def run(self) -> ExportResult:
        remove_leftovers(self._folder, grace_s=0.0)
        record = self._read_record() or self._new_record()
        if record.complete:
            self._remove_spare(record)
            return self._result(record, was_complete=True)
        if record.total_shards > self._manifest.total_shards:
            raise _other_store(self._folder, self._store)
        walk = ShardWalk(
            self._store, self._manifest, record.total_shards,
            self._options.source, self._options.first_shard, self._options.end_shard,
        )  # fmt: skip
        walk.open()
        self._save(record)  # Before anything has a name that another export would stumble over.
        make = make_mds_writer if record.request.to is ExportFormat.MDS else make_row_writer
        with closing(make(self._folder, record)) as writer:
            record = self._write(writer, walk, record)
            if self._stop.is_set():
                return self._result(record, interrupted=True)
            return self._finish(writer, record)

    def _read_record(self) -> ExportRecord | None:
        path = self._folder / RECORD_NAME
        with folder_errors(self._folder, f"read {path}"):
            if not path.exists():
                return None
            record = ExportRecord.from_json(path.read_bytes(), name=str(path))
        record.check_request(ExportRequest.of(self._options), str(self._folder))
        return record

    def _new_record(self) -> ExportRecord:
        request = ExportRequest.of(self._options)
        for name in _final_names(request):
            found = next(iter(sorted([*self._folder.glob(name), *self._folder.glob(name + PART_ENDING)])), None)
            if found is not None:
                raise UsageError(
                    f"{found} is there already, and no {RECORD_NAME} says that it is of this export; give another "
                    "folder or --name, or delete it"
                )
        tokenizer = self._manifest.tokenizer
        if tokenizer is None:
            raise ContractError(
                f"{self._store.url}: expected the vocabulary its shards were written with in the manifest, found none; "
                "run 'genesis verify'"
            )
        return ExportRecord(
            request=request,
            store=self._store.url,
            total_shards=self._manifest.total_shards,
            vocabulary_ids=tokenizer.next_merge_id,
            vocabulary_sha256=tokenizer.sha256,
            eos_id=self._manifest.eos_id,
            dtype=id_dtype(request.to, tokenizer.next_merge_id).str,
        )

    def _write(self, writer: TokenWriter, walk: ShardWalk, record: ExportRecord) -> ExportRecord:
        """Writes all shards, or those before a stop; returns the record of the last checkpoint."""
        self._save(record)
        crash_point("export-begun")
        position = record.position
        shards = self._behind(walk, position)
        dtype = np.dtype(record.dtype)
        with closing(read_ahead(self._store, shards, dtype, self._options.threads)) as blocks:
            ended_with_eos = None
            for shard, ids in blocks:
                ends = np.flatnonzero(ids == record.eos_id) + 1
                _check_documents(shard, ends, len(ids), ended_with_eos)
                ended_with_eos = bool(len(ends)) and int(ends[-1]) == len(ids)
                position = self._write_shard(writer, shard, ids, ends, position)
                if self._on_progress is not None:
                    self._on_progress(position.shard, walk.expected_shards)
                if writer.checkpoint_due() or self._stop.is_set():
                    record = self._checkpoint(writer, record, position)
                if self._stop.is_set():
                    return record
        return record.model_copy(update={"position": position})

    def _behind(self, walk: ShardWalk, position: ExportPosition) -> Iterator[WalkedShard]:
        """The shards that are left, the first ones held against what the record says of them."""
        shards = iter(walk)
        passed = ExportPosition()
        for _ in range(position.shard):
            shard = next(shards, None)
            if shard is None:
                raise _other_store(self._folder, self._store)
            passed = passed.behind(shard.entry.sha256)
        if passed.shards_sha256 != position.shards_sha256:
            raise _other_store(self._folder, self._store)
        return shards

    def _write_shard(
        self, writer: TokenWriter, shard: WalkedShard, ids: Ids, ends: npt.NDArray[np.int64], position: ExportPosition
    ) -> ExportPosition:
        """Writes the wanted part of a shard; returns the position behind it."""
        start, stop = position.offset, len(ids)
        skipping = position.skipping if shard.follows is not None or start else shard.skips_head
        if skipping:
            start = int(ends[0]) if len(ends) else len(ids)
            skipping = not len(ends)
            position = position.model_copy(update={"skipped_tokens": position.skipped_tokens + start})
        if shard.is_tail and len(ends):
            stop = int(ends[0])
        wanted = ends[(ends > start) & (ends <= stop)] - start
        if stop > start:
            at = position.model_copy(update={"offset": start, "skipping": False})
            writer.write(IdBlock(ids[start:stop], wanted, at))
            self._id_bytes += (stop - start) * ids.itemsize
        position = position.behind(shard.entry.sha256).model_copy(update={"skipping": skipping})
        if shard.ends_source:
            cut = writer.end_source()
            position = position.model_copy(update={"skipping": False, "cut_tokens": position.cut_tokens + cut})
        return position

    def _checkpoint(self, writer: TokenWriter, record: ExportRecord, now: ExportPosition) -> ExportRecord:
        position, file_bytes = writer.sync(now)
        crash_point("export-synced")
        record = record.model_copy(
            update={
                "position": position,
                "file_bytes": file_bytes,
                "documents": writer.documents,
                "tokens": writer.tokens,
            }
        )
        self._save(record)
        crash_point("export-checkpointed")
        return record

    def _finish(self, writer: TokenWriter, record: ExportRecord) -> ExportResult:
        crash_point("export-written")
        if writer.is_empty:
            raise UsageError(
                f"{self._store.url}: expected a document that ends in the chosen shards, found none; nothing is "
                "exported"
            )
        writer.finish()
        crash_point("export-published")
        record = record.model_copy(
            update={"complete": True, "file_bytes": {}, "documents": writer.documents, "tokens": writer.tokens}
        )
        self._save(record)
        crash_point("export-completed")
        for path in writer.spare_files():
            path.unlink(missing_ok=True)
        return self._result(record)

    def _remove_spare(self, record: ExportRecord) -> None:
        """A run that was killed after its last checkpoint left these."""
        for name in (f"{record.request.name}.ends.part", f"{INDEX_NAME}.part"):
            (self._folder / name).unlink(missing_ok=True)

    def _files(self, request: ExportRequest) -> tuple[str, ...]:
        return tuple(sorted(path.name for name in _final_names(request) for path in self._folder.glob(name)))

    def _save(self, record: ExportRecord) -> None:
        write_file(self._folder / RECORD_NAME, record.to_json())

    def _result(self, record: ExportRecord, *, was_complete: bool = False, interrupted: bool = False) -> ExportResult:
        return ExportResult(
            folder=str(self._folder),
            to=record.request.to.value,
            files=self._files(record.request) if record.complete else (),
            shards=record.position.shard,
            documents=record.documents,
            tokens=record.tokens,
            skipped_tokens=record.position.skipped_tokens,
            cut_tokens=record.position.cut_tokens,
            dtype=record.dtype,
            id_bytes=self._id_bytes,
            seconds=round(time.monotonic() - self._started_s, 3),
            complete=record.complete,
            was_complete=was_complete,
            interrupted=interrupted,
        )


def _final_names(request: ExportRequest) -> list[str]:
    """Patterns of the names that its files have, some only while they are made."""
    name = request.name
    return {
        ExportFormat.MEGATRON: [f"{name}.bin", f"{name}.idx", f"{name}.ends"],
        ExportFormat.MDS: [INDEX_NAME, "shard.*.mds*"],
        ExportFormat.DATATROVE: [f"{name}.ds", f"{name}.ds.index", f"{name}.ds.metadata", f"{name}.ends"],
        ExportFormat.NPY: [f"{name}.npy", f"{name}.ends.npy", f"{name}.ends"],
    }[request.to]


def _check_documents(shard: WalkedShard, ends: npt.NDArray[np.int64], num_ids: int, before_ended: bool | None) -> None:
    """Holds a shard's EOS ids against the documents that the index says it has, and against the shard before it.

    Raises:
        ContractError: they contradict each other, so that documents would be joined or cut wrongly.
    """
    entry, ends_with_eos = shard.entry, bool(len(ends)) and int(ends[-1]) == num_ids
    expected = entry.last_document - entry.first_document + (1 if ends_with_eos else 0)
    if len(ends) != expected:
        raise ContractError(
            f"shard {entry.id}: expected {expected} documents to end in it, found {len(ends)} EOS ids; run 'genesis "
            "verify'"
        )
    if shard.follows is None or before_ended is None:
        return
    if before_ended != (entry.first_document != shard.follows.last_document):
        raise ContractError(
            f"shard {entry.id}: document {shard.follows.last_document} of {entry.source} "
            f"{'ended' if before_ended else 'did not end'} in shard {shard.follows.id}, the index says otherwise; run "
            "'genesis verify'"
        )


def _other_store(folder: Path, store: ReadableStore) -> InputChangedError:
    return InputChangedError(
        f"{folder} holds the beginning of an export of other shards than {store.url} has; give the store it was begun "
        f"from, another folder, or delete the files of that export with {RECORD_NAME}"
    )
