"""A shard's ids by ranges, of a shard that was held against the index first.

The first document that is read of a shard costs one pass over its file in pieces of 1 MiB: sha256, and where documents
end (40 ms for 20 MB). What is kept is that list, 4 bytes a document; every further read is of the ids asked for. So no
id is shown that the index does not vouch for, and no request holds a shard. A file that was replaced is another file
(inode, time, size) and is checked again; one that is damaged is said to be so, and nothing of it is decoded.

`FolderShards` reads a folder, as ``genesis serve`` does. `StoreShards` reads any store, a whole shard at a time: for a
report, which is made once.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from genesis.errors import StoreUnavailableError, UsageError
from genesis.export.reading import read_ids
from genesis.serve.objects import OpenObject, open_object
from genesis.store import ReadableStore
from genesis.store_page.pieces import Ends
from manifests import ShardEntry, ShardFormatError, shard_file_bytes, shard_key
from manifests.shard_file import SHARD_DATA_OFFSET

MAX_TOKENS = 1 << 24
"""Ids of a shard that is still read for a page: 134 MB."""
_PIECE_BYTES = 1 << 20
_KEPT_BYTES = 32 << 20

OnCheck = Callable[[ShardEntry, bool], None]
"""Told of each shard that was held against the index, and whether it is what the index says."""


class ShardReader(Protocol):
    """Where documents are read from."""

    def ends(self, entry: ShardEntry, eos_id: int) -> Ends:
        """Where the shard's ids that end a document stand.

        Raises:
            ShardFormatError: it is not what the index says.
            StoreError: it cannot be read.
            UsageError: it is too large for a page.
        """

    def ids(self, entry: ShardEntry, start: int, end: int) -> npt.NDArray[np.int64]:
        """The ids of a range; of a shard whose `ends` were asked for before."""


@dataclass(slots=True)
class _Scanned:
    etag: str
    sha256: str
    ends: Ends


@dataclass(slots=True)
class FolderShards:
    """Shards of a folder. Safe from many threads.

    Attributes:
        root: the store's folder.
        on_check: see `OnCheck`.
    """

    root: Path
    on_check: OnCheck
    _scanned: OrderedDict[int, _Scanned] = field(default_factory=OrderedDict)
    _kept_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ends(self, entry: ShardEntry, eos_id: int) -> Ends:
        """See `ShardReader`."""
        _check_size(entry)
        found = self._open(entry)
        try:
            with self._lock:
                known = self._scanned.get(entry.id)
                if known is not None and (known.etag, known.sha256) == (found.etag, entry.sha256):
                    self._scanned.move_to_end(entry.id)
                    return known.ends
            try:
                ends = _scan(found, entry, eos_id)
            except ShardFormatError:
                self.on_check(entry, False)
                raise
        finally:
            found.close()
        self.on_check(entry, True)
        self._keep(entry.id, _Scanned(found.etag, entry.sha256, ends))
        return ends

    def ids(self, entry: ShardEntry, start: int, end: int) -> npt.NDArray[np.int64]:
        """See `ShardReader`."""
        found = self._open(entry)
        try:
            with self._lock:
                known = self._scanned.get(entry.id)
            body = found.read(SHARD_DATA_OFFSET + 8 * start, 8 * (end - start))
            if known is None or known.etag != found.etag or len(body) != 8 * (end - start) or not found.unchanged():
                raise StoreUnavailableError(f"{shard_key(entry.id)} was replaced while it was read; try again")
        finally:
            found.close()
        return np.frombuffer(body, dtype="<i8")

    def _open(self, entry: ShardEntry) -> OpenObject:
        key = shard_key(entry.id)
        try:
            found = open_object(self.root, key)
        except OSError as error:
            raise StoreUnavailableError(f"{key} cannot be read: {error.strerror}") from None
        if found is None:
            self.on_check(entry, False)
            raise ShardFormatError(f"{key}: expected a shard, found no such object; restore it from a copy")
        return found

    def _keep(self, shard_id: int, scanned: _Scanned) -> None:
        with self._lock:
            old = self._scanned.pop(shard_id, None)
            self._kept_bytes += scanned.ends.nbytes - (old.ends.nbytes if old else 0)
            self._scanned[shard_id] = scanned
            while self._kept_bytes > _KEPT_BYTES and len(self._scanned) > 1:
                _, oldest = self._scanned.popitem(last=False)
                self._kept_bytes -= oldest.ends.nbytes


def _check_size(entry: ShardEntry) -> None:
    if entry.tokens > MAX_TOKENS:
        raise UsageError(
            f"shard {entry.id} has {entry.tokens:,} ids; a page reads shards of at most {MAX_TOKENS:,}, "
            "'genesis inspect shard' any"
        )


def _scan(found: OpenObject, entry: ShardEntry, eos_id: int) -> Ends:
    """Holds a file against the index, and finds where documents end in it."""
    key, expected_bytes = shard_key(entry.id), shard_file_bytes(entry.tokens)
    if not found.size_bytes == expected_bytes == entry.size_bytes:
        raise ShardFormatError(
            f"{key}: expected {expected_bytes} bytes, found {found.size_bytes}; restore it from a copy"
        )
    digest = hashlib.sha256(found.read(0, SHARD_DATA_OFFSET))
    parts: list[Ends] = []
    ids_end = SHARD_DATA_OFFSET + 8 * entry.tokens
    for offset in range(SHARD_DATA_OFFSET, ids_end, _PIECE_BYTES):
        body = found.read(offset, min(_PIECE_BYTES, ids_end - offset))
        digest.update(body)
        whole = np.frombuffer(body, dtype="<i8", count=len(body) // 8)
        parts.append((np.flatnonzero(whole == eos_id) + (offset - SHARD_DATA_OFFSET) // 8).astype(np.int32))
    digest.update(found.read(ids_end, expected_bytes - ids_end))
    if digest.hexdigest() != entry.sha256:
        raise ShardFormatError(
            f"{key}: expected sha256 {entry.sha256}, found {digest.hexdigest()}; restore it from a copy"
        )
    return np.concatenate(parts)


@dataclass(slots=True)
class StoreShards:
    """Shards of any store, one of them in memory; for one thread.

    Attributes:
        store: where they are.
        on_check: see `OnCheck`.
    """

    store: ReadableStore
    on_check: OnCheck
    _held: tuple[str, npt.NDArray[np.integer]] | None = None

    def ends(self, entry: ShardEntry, eos_id: int) -> Ends:
        """See `ShardReader`."""
        return np.flatnonzero(self._whole(entry) == eos_id).astype(np.int32)

    def ids(self, entry: ShardEntry, start: int, end: int) -> npt.NDArray[np.int64]:
        """See `ShardReader`."""
        return self._whole(entry)[start:end].astype(np.int64)

    def _whole(self, entry: ShardEntry) -> npt.NDArray[np.integer]:
        if self._held is None or self._held[0] != entry.sha256:
            _check_size(entry)
            try:
                ids = read_ids(self.store, entry, np.dtype(np.uint32))
            except ShardFormatError:
                self.on_check(entry, False)
                raise
            self.on_check(entry, True)
            self._held = entry.sha256, ids
        return self._held[1]
