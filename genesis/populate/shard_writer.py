"""One full image into the store: seal it, pack it, put both forms, and say what the index will say of it.

    image ──seal──▶ shard_{id}.pt ──put if absent──▶ packed/shard_{id}.zst ──put if absent──▶ entry

Nothing here is committed yet, so whatever lies under those names already is a leftover of a run that was killed or
ousted. A shard's bytes depend on its ids alone: an equal leftover is taken as stored, any other is replaced. Packed
bytes depend on the version of zstd too: a leftover that expands to the very same ids is kept and its own digest
recorded, so that resuming with another zstd overwrites nothing; any other is replaced as a shard is.

A thread spends some 50 ms of processor time on a shard of 2,500,000 ids, 35 of them on packing; all of it releases the
interpreter lock.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from genesis.errors import ObjectNotFoundError, PreconditionFailedError
from genesis.populate.commit_log import CommitLog
from genesis.populate.crashpoint import crash_point
from genesis.populate.packer import FilledShard
from genesis.store.base import CachePolicy
from manifests import (
    PackedEntry,
    ShardEntry,
    ShardFormatError,
    max_packed_bytes,
    pack_ids,
    packed_key,
    sha256_hex,
    shard_key,
    unpack_ids,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """Writes the shards of one source; may be used from several threads.

    Attributes:
        commit_log: the store's, open.
        source: name of the source.
        next_merge_id: of the vocabulary the shards are written with.
        packed: also write the transfer form.
    """

    commit_log: CommitLog
    source: str
    next_merge_id: int
    packed: bool

    def write(self, shard_id: int, shard: FilledShard) -> ShardEntry:
        """Stores a shard in both forms.

        Returns:
            What the index is to say of it.

        Raises:
            GenesisError: the store cannot be written, or was taken over.
        """
        image = shard.image
        image.seal()
        crash_point("shard-sealed")
        self._put(shard_key(shard_id), image.buffer)
        crash_point("shard-stored")
        packed = self._write_packed(packed_key(shard_id), image.ids) if self.packed else None
        return ShardEntry(
            id=shard_id,
            sha256=sha256_hex(image.buffer),
            size_bytes=len(image.buffer),
            tokens=len(image.ids),
            source=self.source,
            first_document=shard.first_document,
            last_document=shard.last_document,
            next_merge_id=self.next_merge_id,
            packed=packed,
        )

    def _write_packed(self, key: str, ids: npt.NDArray[np.int64]) -> PackedEntry:
        body = pack_ids(ids, self.next_merge_id)
        try:
            self.commit_log.store.put(key, body, cache=CachePolicy.IMMUTABLE, if_absent=True)
        except PreconditionFailedError:
            leftover = self._equivalent(key, ids)
            if leftover is None:
                self._replace(key, body)
            else:
                body = leftover
        crash_point("packed-stored")
        return PackedEntry(key=key, sha256=sha256_hex(body), size_bytes=len(body))

    def _equivalent(self, key: str, ids: npt.NDArray[np.int64]) -> bytes | None:
        """The packed object an earlier run left under ``key``, if it expands to ``ids``."""
        found = self.commit_log.store.head(key)
        if found is None or found.size_bytes > max_packed_bytes(len(ids), self.next_merge_id):
            return None
        expanded = np.empty_like(ids)
        try:
            body = self.commit_log.store.get(key).body
            unpack_ids(body, expanded, self.next_merge_id)
        except (ObjectNotFoundError, ShardFormatError):
            return None
        return body if np.array_equal(expanded, ids) else None

    def _put(self, key: str, body: Buffer) -> None:
        try:
            self.commit_log.store.put(key, body, cache=CachePolicy.IMMUTABLE, if_absent=True)
        except PreconditionFailedError:
            self._replace(key, body)

    def _replace(self, key: str, body: Buffer) -> None:
        """Replaces an uncommitted leftover of a run with other input.

        Allowed only if this process still holds the lease after reading what it replaces.
        """
        leftover = self.commit_log.store.head(key)
        self.commit_log.renew()
        logger.info("%s: replacing an uncommitted leftover of an earlier run", key)
        self.commit_log.store.put(
            key,
            body,
            cache=CachePolicy.IMMUTABLE,
            if_absent=leftover is None,
            if_match=leftover.etag if leftover else None,
        )
