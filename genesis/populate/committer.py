"""From full images to commits: stores shards in threads, commits them in order in another.

Sealing, packing, digesting and writing 20 MB release the interpreter lock, so a few threads keep a disk or an uplink
busy while the main thread fills the next image. Shards are stored in any order but committed in theirs; shards that
become ready during a commit share the next one.

The images are the bound: at most ``num_threads + 2`` exist (20 MB each), and `new_image` waits for one to be free.

Storing one image: seal it, pack it, put both forms, and say what the index will say of it.

    image ──seal──▶ shard_{id}.pt ──put if absent──▶ packed/shard_{id}.zst ──put if absent──▶ entry

Nothing of that is committed yet, so whatever lies under those names already is a leftover of a run that was killed or
ousted. A shard's bytes depend on its ids alone: an equal leftover is taken as stored, any other is replaced. Packed
bytes depend on the version of zstd too: a leftover that expands to the very same ids is kept and its own digest
recorded, so that resuming with another zstd overwrites nothing; any other is replaced as a shard is.

A thread spends some 50 ms of processor time on a shard of 2,500,000 ids, 35 of them on packing; all of it releases the
interpreter lock.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from genesis.errors import GenesisError, ObjectNotFoundError, PreconditionFailedError, StoreUnavailableError
from genesis.populate.commit_log import CommitLog
from genesis.populate.crashpoint import crash_point
from genesis.populate.packer import FilledShard, ImageT, Position
from genesis.store.base import CachePolicy, ObjectInfo, Store
from manifests import (
    PackedEntry,
    ShardEntry,
    ShardFormatError,
    ShardImage,
    max_packed_bytes,
    pack_ids,
    packed_key,
    sha256_hex,
    shard_key,
    unpack_ids,
)

logger = logging.getLogger(__name__)

_GROUP = 64
_ABANDON_S = 300.0
_DRAIN_S = 3600.0
"""Deadline for storing what is in hand; every single store operation has its own, far shorter one."""


@dataclass(frozen=True, slots=True)
class CommitGroup:
    """What one commit added."""

    entries: tuple[ShardEntry, ...]
    position: Position


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard that is in the store, and the position to commit with it."""

    entry: ShardEntry
    position: Position


class ShardStorage(Protocol[ImageT]):
    """Takes shards to the store; its commit log is open."""

    @property
    def commit_log(self) -> CommitLog:
        """The store's."""

    def new_image(self) -> ImageT:
        """One more image to fill."""

    def store(self, shard_id: int, shard: FilledShard[ImageT]) -> StoredShard:
        """Stores a shard in all its forms; called from several threads. The image may be filled again afterwards.

        Raises:
            GenesisError: it cannot be stored.
        """


class Committer(Generic[ImageT]):
    """Stores and commits the shards of one source.

    Args:
        writer: stores a shard.
        commit: commits entries with the position behind them; called in the commit thread.
        num_threads: shards stored at once.
        interval_s: pause behind a commit, while shards for the next one gather.
    """

    def __init__(
        self,
        writer: ShardStorage[ImageT],
        commit: Callable[[CommitGroup], None],
        num_threads: int,
        interval_s: float = 0.0,
    ) -> None:
        self._writer = writer
        self._interval_s = interval_s
        self._commit_log = writer.commit_log
        self._commit = commit
        self._next_shard_id = writer.commit_log.next_shard_id
        self._free: queue.LifoQueue[ImageT] = queue.LifoQueue()
        self._images_left = num_threads + 2
        self._in_flight: deque[Future[StoredShard]] = deque()
        self._closed = self._abandoned = False
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="store")
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
        self._failure: GenesisError | None = None

    def start(self) -> None:
        """Starts the commit thread."""
        self._thread.start()

    def new_image(self) -> ImageT:
        """An image to fill.

        Raises:
            GenesisError: storing or committing an earlier shard failed.
        """
        if self._free.empty() and self._images_left:
            self._images_left -= 1
            return self._writer.new_image()
        while True:
            self.raise_failure()
            try:
                return self._free.get(timeout=0.5)
            except queue.Empty:
                continue

    def submit(self, shard: FilledShard[ImageT]) -> None:
        """Takes a full image; it is stored and committed in the background."""
        shard_id, self._next_shard_id = self._next_shard_id, self._next_shard_id + 1
        stored = self._pool.submit(self._store, shard_id, shard)
        with self._changed:
            self._in_flight.append(stored)
            self._changed.notify()

    def raise_failure(self) -> None:
        """Raises what went wrong in the background, if anything did."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Waits until everything submitted is committed.

        Raises:
            GenesisError: storing or committing failed; what was committed before stays.
        """
        self._close()
        self._thread.join(_DRAIN_S)
        self.raise_failure()
        self._pool.shutdown(wait=False)
        if self._thread.is_alive():
            raise StoreUnavailableError(
                f"{self._commit_log.store.url}: the last shards were not stored in {_DRAIN_S:.0f} s"
            )

    def abandon(self) -> None:
        """Commits nothing more, and returns once nothing more can be; the next run makes the rest again."""
        with self._changed:
            self._abandoned = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._close()
        self._thread.join(_ABANDON_S)

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _store(self, shard_id: int, shard: FilledShard[ImageT]) -> StoredShard:
        try:
            return self._writer.store(shard_id, shard)
        finally:
            self._free.put(shard.image)

    def _run(self) -> None:
        try:
            while (group := self._next_group()) and not self._abandoned:
                self._commit(CommitGroup(tuple(each.entry for each in group), group[-1].position))
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, self._interval_s)
        except CancelledError:
            pass  # Abandoned.
        except GenesisError as error:
            self._failure = error
        except Exception as error:
            logger.debug("commit thread", exc_info=True)
            self._failure = StoreUnavailableError(f"committing failed: {type(error).__name__}: {error}")

    def _next_group(self) -> list[StoredShard]:
        """The next shard, once stored, and those behind it that are stored too; empty when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight or self._closed)
            if not self._in_flight:
                return []
            group = [self._in_flight.popleft()]
        group[0].result()
        with self._changed:
            while self._in_flight and len(group) < _GROUP and _is_stored(self._in_flight[0]):
                group.append(self._in_flight.popleft())
        return [each.result() for each in group]


def _is_stored(stored: Future[StoredShard]) -> bool:
    return stored.done() and not stored.cancelled() and stored.exception() is None


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """Writes the shards of one source from this process's memory; may be used from several threads.

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

    def new_image(self) -> ShardImage:
        """One more image to fill."""
        return ShardImage.empty(self.commit_log.shard_tokens)

    def store(self, shard_id: int, shard: FilledShard[ShardImage]) -> StoredShard:
        """Stores a shard in both forms."""
        return StoredShard(self.write(shard_id, shard), shard.position)

    def write(self, shard_id: int, shard: FilledShard[ShardImage]) -> ShardEntry:
        """Stores a shard in both forms.

        Returns:
            What the index is to say of it.

        Raises:
            GenesisError: the store cannot be written, or was taken over.
        """
        objects = ShardObjects(self.commit_log.store, self._may_replace)
        return objects.write(
            shard.image,
            ShardFacts(
                shard_id=shard_id,
                source=self.source,
                first_document=shard.first_document,
                last_document=shard.last_document,
                next_merge_id=self.next_merge_id,
                packed=self.packed,
            ),
        )

    def _may_replace(self, key: str) -> ObjectInfo | None:
        leftover = self.commit_log.store.head(key)
        self.commit_log.renew()
        return leftover


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What is said of a shard beside its ids."""

    shard_id: int
    source: str
    first_document: int
    last_document: int
    next_merge_id: int
    packed: bool
    """Write the transfer form too."""


@dataclass(frozen=True, slots=True)
class ShardObjects:
    """Puts the objects of shards; on a cluster, on the machine that has the ids.

    Attributes:
        target: where to.
        may_replace: called with the key of an uncommitted leftover of a run with other input that must be replaced.
            Returns the leftover as it was *before* this process was found to hold the lease still; raises if it does
            not, so that whoever was ousted replaces nothing.
    """

    target: Store
    may_replace: Callable[[str], ObjectInfo | None]

    def write(self, image: ShardImage, facts: ShardFacts) -> ShardEntry:
        """Stores a full image in both forms.

        Raises:
            GenesisError: the store cannot be written, or what is there may not be replaced.
        """
        image.seal()
        crash_point("shard-sealed")
        self._put(shard_key(facts.shard_id), image.buffer)
        crash_point("shard-stored")
        packed = None
        if facts.packed:
            packed = self._write_packed(packed_key(facts.shard_id), image.ids, facts.next_merge_id)
        return ShardEntry(
            id=facts.shard_id,
            sha256=sha256_hex(image.buffer),
            size_bytes=len(image.buffer),
            tokens=len(image.ids),
            source=facts.source,
            first_document=facts.first_document,
            last_document=facts.last_document,
            next_merge_id=facts.next_merge_id,
            packed=packed,
        )

    def _write_packed(self, key: str, ids: npt.NDArray[np.int64], next_merge_id: int) -> PackedEntry:
        body = pack_ids(ids, next_merge_id)
        try:
            self.target.put(key, body, cache=CachePolicy.IMMUTABLE, if_absent=True)
        except PreconditionFailedError:
            leftover = self._equivalent(key, ids, next_merge_id)
            if leftover is None:
                self._replace(key, body)
            else:
                body = leftover
        crash_point("packed-stored")
        return PackedEntry(key=key, sha256=sha256_hex(body), size_bytes=len(body))

    def _equivalent(self, key: str, ids: npt.NDArray[np.int64], next_merge_id: int) -> bytes | None:
        """The packed object an earlier run left under ``key``, if it expands to ``ids``."""
        found = self.target.head(key)
        if found is None or found.size_bytes > max_packed_bytes(len(ids), next_merge_id):
            return None
        expanded = np.empty_like(ids)
        try:
            body = self.target.get(key).body
            unpack_ids(body, expanded, next_merge_id)
        except (ObjectNotFoundError, ShardFormatError):
            return None
        return body if np.array_equal(expanded, ids) else None

    def _put(self, key: str, body: Buffer) -> None:
        try:
            self.target.put(key, body, cache=CachePolicy.IMMUTABLE, if_absent=True)
        except PreconditionFailedError:
            self._replace(key, body)

    def _replace(self, key: str, body: Buffer) -> None:
        """Replaces an uncommitted leftover of a run with other input."""
        leftover = self.may_replace(key)
        logger.info("%s: replacing an uncommitted leftover of an earlier run", key)
        self.target.put(
            key,
            body,
            cache=CachePolicy.IMMUTABLE,
            if_absent=leftover is None,
            if_match=leftover.etag if leftover else None,
        )
