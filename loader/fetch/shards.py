"""A shard by its index entry, as ids in a mapped file that holds what the manifest vouches for; and the next one ahead.

A shard is fetched in the transfer form where the index lists it (1.2 bytes an id instead of 8), expanded to the very
bytes of the `.pt`, and checked against both digests; if the transfer form is missing or wrong, the `.pt` is fetched. A
cached file is hashed when a process first opens it (20 MB in 12 ms), and its ids are checked against the vocabulary.
Nothing is unpickled: the one form a shard has is compared byte for byte with what it must be.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from loader.cache import ShardCache
from loader.errors import CorruptObjectError, DataUnavailableError, HostileStoreError
from loader.fetch.known_store import ObjectFacts, ShardFacts
from loader.fetch.mirrors import Mirrors, ObjectAbsentError
from manifests import (
    BYTE_OFFSET,
    EOS_ID,
    ShardFormatError,
    ShardImage,
    sha256_hex,
    shard_key,
    unpack_ids,
    view_shard,
)

T = TypeVar("T", bound=Buffer)

logger = logging.getLogger(__name__)

_IDS_PER_PAGE: Final = 512
_TRIES: Final = 2
"""Opening a shard may try for the transfer form in vain and then for the file; its own error says more than ours."""


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard in memory: mapped from the cache, or, where nothing can be cached, of this process alone.

    Attributes:
        ids: int64[N]; writable, but writes stay in this process. While it or a view of it lives, the file is in use.
    """

    shard_id: int
    ids: npt.NDArray[np.int64]
    from_cache: bool
    cached: bool


def open_shard(mirrors: Mirrors, cache: ShardCache, entry: ShardFacts, *, is_frozen: bool) -> OpenShard:
    """Opens a shard of a store, whose vocabulary is ``is_frozen`` or not, from the cache or the mirrors, verified.

    Raises:
        DataUnavailableError: no mirror gave it in time.
        CorruptObjectError: no mirror has it as the manifest vouches for it.
        HostileStoreError: the manifest vouches for something that is not a shard.
    """
    name = cache_name(entry)

    def check(view: memoryview) -> None:
        check_digest(view, entry.sha256, name)
        check_ids(view, entry, is_frozen=is_frozen)

    file = cache.open(name, entry.size_bytes, produce=lambda: _download(mirrors, entry, is_frozen), check=check)
    ids = view_shard(file.buffer, entry.tokens)
    if file.reopened:
        # Nothing has read the map yet: its pages are better found here, ahead, than by the batches.
        ids[::_IDS_PER_PAGE].max()
    return OpenShard(entry.id, ids, file.from_cache, file.cached)


def _download(mirrors: Mirrors, entry: ShardFacts, is_frozen: bool) -> Buffer:
    key = shard_key(entry.id)
    body: Buffer | None = None
    if entry.packed is not None:
        try:
            body = _download_packed(mirrors, entry, entry.packed)
        except (CorruptObjectError, ObjectAbsentError) as error:
            logger.warning("%s; fetching %s instead", error, key)
    if body is None:
        body = mirrors.fetch(key, entry.size_bytes, lambda found: check_digest(found, entry.sha256, key))
    check_ids(memoryview(body), entry, is_frozen=is_frozen)  # Before it costs disk.
    return body


def _download_packed(mirrors: Mirrors, entry: ShardFacts, packed: ObjectFacts) -> Buffer:
    body = mirrors.fetch(packed.key, packed.size_bytes, lambda found: check_digest(found, packed.sha256, packed.key))
    image = ShardImage.empty(entry.tokens)
    try:
        unpack_ids(body, image.ids, entry.next_merge_id)
    except ShardFormatError as error:
        raise CorruptObjectError(f"{packed.key}: the manifest vouches for it, but {error}") from None
    image.seal()
    return check_digest(image.buffer, entry.sha256, f"{packed.key}, expanded")


def cache_name(entry: ShardFacts) -> str:
    """The name of a shard's file in the cache, which identifies its content."""
    return f"shard_{entry.id}-{entry.sha256[:16]}.pt"


def check_digest(body: T, sha256: str, name: str) -> T:
    """Returns ``body`` if it has this digest.

    Raises:
        CorruptObjectError: it has another.
    """
    found = sha256_hex(body)
    if found != sha256:
        raise CorruptObjectError(f"{name}: expected sha256 {sha256}, found {found}")
    return body


def check_ids(buffer: memoryview, entry: ShardFacts, *, is_frozen: bool) -> None:
    """Checks the form and the ids of a shard's file; a frozen vocabulary has its special ids anywhere.

    Raises:
        HostileStoreError: the file is not a shard, or holds ids that text under its vocabulary does not yield.
    """
    try:
        ids = view_shard(buffer, entry.tokens)
    except ShardFormatError as error:
        raise HostileStoreError(f"{shard_key(entry.id)}: the manifest vouches for it, but {error}") from None
    words = ids.view(np.uint64)  # In which a negative id is a large one.
    if int(words.max()) >= entry.next_merge_id:
        position = int(words.argmax())
        raise HostileStoreError(
            f"{shard_key(entry.id)}: expected ids of 0 to {entry.next_merge_id - 1}, found {int(ids[position])} at "
            f"position {position}"
        )
    if is_frozen:
        return
    special = np.flatnonzero(words < BYTE_OFFSET)
    reserved = special[ids[special] != EOS_ID]
    if len(reserved):
        raise HostileStoreError(
            f"{shard_key(entry.id)}: expected no special id but EOS ({EOS_ID}), found {int(ids[reserved[0]])} at "
            f"position {int(reserved[0])} ({len(reserved)} in all)"
        )


class Prefetcher:
    """Opens the next shards in the background while the present ones are read.

    Each shard has a daemon thread of its own, so there is nothing to shut down and a process ends whether or not a
    download does. What failed before it was needed is tried again in the foreground. The trade-off: a second shard is
    mapped (20 MB, of which the kernel keeps what it likes).

    Args:
        open_shard: opens one; called in threads.
        timeout_s: how long opening one may try for each of its objects.
    """

    def __init__(self, open_shard: Callable[[int], OpenShard], timeout_s: float) -> None:
        self._open_shard = open_shard
        self._timeout_s = timeout_s
        self._futures: dict[int, Future[OpenShard]] = {}

    def want(self, shard_ids: set[int]) -> None:
        """Opens these shards in the background, and drops others that were wanted before."""
        for shard_id in self._futures.keys() - shard_ids:
            del self._futures[shard_id]
        for shard_id in shard_ids - self._futures.keys():
            future: Future[OpenShard] = Future()
            self._futures[shard_id] = future
            threading.Thread(target=self._run, args=(shard_id, future), name=f"shard-{shard_id}", daemon=True).start()

    def take(self, shard_id: int) -> OpenShard:
        """The shard; waits for it if it is being opened, opens it if it is not.

        Raises:
            LoaderError: it cannot be opened.
        """
        future = self._futures.pop(shard_id, None)
        if future is not None and future.done() and (failure := future.exception()) is not None:
            logger.info("shard %d was not fetched ahead (%s); fetching it now", shard_id, failure)
            future = None
        if future is None:
            return self._open_shard(shard_id)
        try:
            return future.result(_TRIES * self._timeout_s)
        except FutureTimeoutError:
            raise DataUnavailableError(
                f"shard {shard_id} was not fetched in {_TRIES * self._timeout_s:.0f} s; check the network"
            ) from None

    def _run(self, shard_id: int, future: Future[OpenShard]) -> None:
        try:
            future.set_result(self._open_shard(shard_id))
        except Exception as error:
            logger.debug("shard %d", shard_id, exc_info=True)
            future.set_exception(error)
