"""A shard by its id, as ids in a mapped file that holds what the manifest vouches for.

Fetched in the transfer form where the index lists it (1.2 bytes an id instead of 8), expanded to the very bytes of the
`.pt`, and held against both digests; a transfer form that is missing or wrong is made up for by the `.pt`. The file in
the cache is digested when a process first opens it (20 MB in 12 ms), and its ids are held against the vocabulary.
Nothing is unpickled: the one form a shard has is compared byte for byte with what it must be.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from loader.cache import ShardCache
from loader.errors import CorruptObjectError, HostileStoreError
from loader.fetch.facts import ObjectFacts, ShardFacts
from loader.fetch.mirrors import Mirrors, ObjectAbsentError
from manifests import ShardFormatError, ShardImage, sha256_hex, shard_key, unpack_ids, view_shard

T = TypeVar("T", bound=Buffer)

__all__ = ["OpenShard", "ShardOpener", "cache_name"]

logger = logging.getLogger(__name__)

_IDS_PER_PAGE: Final = 512


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


class ShardOpener:
    """Opens shards.

    Args:
        mirrors: where they are.
        cache: where they are kept.
    """

    def __init__(self, mirrors: Mirrors, cache: ShardCache) -> None:
        self._mirrors = mirrors
        self._cache = cache

    def open(self, entry: ShardFacts) -> OpenShard:
        """The shard, verified.

        Raises:
            DataUnavailableError: no mirror gave it in time.
            CorruptObjectError: no mirror has it as the manifest vouches for it.
            HostileStoreError: the manifest vouches for what is no shard.
        """
        file = self._cache.open(
            cache_name(entry),
            entry.size_bytes,
            produce=lambda: self._download(entry),
            check=lambda view: _check_file(view, entry),
        )
        ids = view_shard(file.buffer, entry.tokens)
        if file.reopened:
            # Nothing has read the map yet: its pages are better found here, ahead, than by the batches.
            ids[::_IDS_PER_PAGE].max()
        return OpenShard(entry.id, ids, file.from_cache, file.cached)

    def _download(self, entry: ShardFacts) -> Buffer:
        body = self._fetch(entry)
        checked_ids(memoryview(body), entry)  # Before it costs disk.
        return body

    def _fetch(self, entry: ShardFacts) -> Buffer:
        if entry.packed is not None:
            try:
                return self._download_packed(entry, entry.packed)
            except (CorruptObjectError, ObjectAbsentError) as error:
                logger.warning("%s; fetching %s instead", error, shard_key(entry.id))
        key = shard_key(entry.id)
        return self._mirrors.fetch(key, entry.size_bytes, lambda body: check_digest(body, entry.sha256, key))

    def _download_packed(self, entry: ShardFacts, packed: ObjectFacts) -> Buffer:
        body = self._mirrors.fetch(
            packed.key, packed.size_bytes, lambda found: check_digest(found, packed.sha256, packed.key)
        )
        image = ShardImage.empty(entry.tokens)
        try:
            unpack_ids(body, image.ids, entry.next_merge_id)
        except ShardFormatError as error:
            raise CorruptObjectError(f"{packed.key}: the manifest vouches for it, but {error}") from None
        image.seal()
        return check_digest(image.buffer, entry.sha256, f"{packed.key}, expanded")


def _check_file(view: memoryview, entry: ShardFacts) -> None:
    check_digest(view, entry.sha256, cache_name(entry))
    checked_ids(view, entry)


def cache_name(entry: ShardFacts) -> str:
    """What a shard's file is called in the cache: shards of other stores, or of another content, are other files."""
    return f"shard_{entry.id}-{entry.sha256[:16]}.pt"


def check_digest(body: T, sha256: str, name: str) -> T:
    """Returns ``body``.

    Raises:
        CorruptObjectError: its sha256 is another.
    """
    found = sha256_hex(body)
    if found != sha256:
        raise CorruptObjectError(f"{name}: expected sha256 {sha256}, found {found}")
    return body


def checked_ids(buffer: memoryview, entry: ShardFacts) -> npt.NDArray[np.int64]:
    """The ids of a shard's file.

    Raises:
        HostileStoreError: the file is no shard, or holds ids outside the vocabulary it was written with.
    """
    try:
        ids = view_shard(buffer, entry.tokens)
    except ShardFormatError as error:
        raise HostileStoreError(f"{shard_key(entry.id)}: the manifest vouches for it, but {error}") from None
    # As unsigned words a negative id is a large one, so one pass tells both.
    highest = int(ids.view(np.uint64).max())
    if highest >= entry.next_merge_id:
        position = int(ids.view(np.uint64).argmax())
        raise HostileStoreError(
            f"{shard_key(entry.id)}: expected ids of 0 to {entry.next_merge_id - 1}, found {int(ids[position])} at "
            f"position {position}"
        )
    return ids
