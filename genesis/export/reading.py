"""Shards as ids in the type they are exported in, each held against the digests of the index before its ids are used.

The transfer form is read where a shard has it: 3 MB instead of 20 to fetch and to hash, some 9 ms of processor time for
2,500,000 ids instead of 16. If that object is missing or damaged the shard itself is read, which another digest vouches
for. Sizes are known from the index, so no object costs more memory than an honest one.

A few threads read ahead (fetching, hashing and expanding release the interpreter lock); at most ``threads + 1`` shards
of narrow ids wait to be written.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from genesis.errors import ObjectNotFoundError
from genesis.export.options import Ids
from genesis.export.walk import WalkedShard
from genesis.store import ReadableStore
from manifests import (
    PackedEntry,
    ShardEntry,
    ShardFormatError,
    max_packed_bytes,
    narrow_ids,
    packed_key,
    sha256_hex,
    shard_file_bytes,
    shard_key,
    view_shard,
)

logger = logging.getLogger(__name__)


def read_ids(store: ReadableStore, entry: ShardEntry, dtype: np.dtype[np.integer]) -> Ids:
    """A shard's ids.

    Args:
        store: where it is.
        entry: what the index says of it.
        dtype: wide enough for every id below ``entry.next_merge_id``.

    Returns:
        ``dtype``[``entry.tokens``].

    Raises:
        ShardFormatError: it is not what the index vouches for.
        StoreError: it cannot be read.
    """
    if entry.packed is not None:
        try:
            return _read_packed(store, entry, entry.packed, dtype)
        except (ObjectNotFoundError, ShardFormatError) as error:
            logger.warning("%s; reading %s instead", error, shard_key(entry.id))
    return _read_plain(store, entry, dtype)


def _read_packed(store: ReadableStore, entry: ShardEntry, packed: PackedEntry, dtype: np.dtype[np.integer]) -> Ids:
    largest = max_packed_bytes(entry.tokens, entry.next_merge_id)
    if packed.key != packed_key(entry.id) or packed.size_bytes > largest:
        raise ShardFormatError(
            f"shard {entry.id}: expected the packed form {packed_key(entry.id)} of at most {largest} bytes, the index "
            f"says {packed.key} of {packed.size_bytes}"
        )
    body = store.get(packed.key, max_bytes=largest).body
    _check(packed.key, body, packed.size_bytes, packed.sha256)
    return narrow_ids(body, entry.tokens, entry.next_merge_id).astype(dtype, copy=False)


def _read_plain(store: ReadableStore, entry: ShardEntry, dtype: np.dtype[np.integer]) -> Ids:
    key = shard_key(entry.id)
    size_bytes = shard_file_bytes(entry.tokens)
    body = store.get(key, max_bytes=size_bytes).body
    _check(key, body, size_bytes, entry.sha256)
    wide = view_shard(body, entry.tokens)
    lowest, highest = int(wide.min()), int(wide.max())
    if lowest < 0 or highest >= entry.next_merge_id:
        raise ShardFormatError(f"{key}: expected ids of 0 to {entry.next_merge_id - 1}, found {lowest} to {highest}")
    return wide.astype(dtype)


def _check(key: str, body: bytes, size_bytes: int, sha256: str) -> None:
    if len(body) != size_bytes:
        raise ShardFormatError(f"{key}: expected {size_bytes} bytes, found {len(body)}; restore it from a copy")
    found = sha256_hex(body)
    if found != sha256:
        raise ShardFormatError(f"{key}: expected sha256 {sha256}, found {found}; restore it from a copy")


def read_ahead(
    store: ReadableStore, shards: Iterable[WalkedShard], dtype: np.dtype[np.integer], threads: int
) -> Generator[tuple[WalkedShard, Ids], None, None]:
    """The shards with their ids, in order.

    Raises:
        ShardFormatError, StoreError, ContractError: of the first shard or index segment that cannot be had; the shards
            before it have been yielded.
    """
    in_flight: deque[tuple[WalkedShard, Future[Ids]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="export")
    try:
        for shard in shards:
            in_flight.append((shard, pool.submit(read_ids, store, shard.entry, dtype)))
            if len(in_flight) > threads:
                first, ids = in_flight.popleft()
                yield first, ids.result()
        while in_flight:
            first, ids = in_flight.popleft()
            yield first, ids.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
