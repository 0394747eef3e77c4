"""A store as readers see it at one moment: what its JSON files say, each held against the digest that vouches for it.

Used by everything that only looks (``genesis status``, ``verify``, ``inspect``, ``export``). Nothing here writes, and
nothing asks more of a store than `get`, so an address of a CDN will do. The trade-off: every call reads from the store
anew (a segment is at most 0.35 MB, a vocabulary of 32,000 ids 0.6 MB); a caller that asks often keeps the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from genesis.errors import GenesisError, ObjectNotFoundError, UsageError
from genesis.store import ReadableStore
from manifests import (
    CHECKPOINTS_KEY,
    MANIFEST_KEY,
    SEGMENT_SHARDS,
    TOKENIZER_KEY,
    Checkpoints,
    ContractError,
    Manifest,
    Segment,
    SegmentRef,
    ShardEntry,
    TokenizerRef,
    Vocabulary,
    read_vocabulary_file,
    sha256_hex,
)


class StoreEmptyError(GenesisError):
    """There is no store at the address, or nothing was committed to it yet."""


@dataclass(frozen=True, slots=True)
class PublishedManifest:
    """``manifest.json`` as it came."""

    manifest: Manifest
    body: bytes

    @property
    def sha256(self) -> str:
        """Digest of the file."""
        return sha256_hex(self.body)


def read_manifest(store: ReadableStore) -> PublishedManifest | None:
    """The published manifest; None if there is none.

    Raises:
        StoreError: the store cannot be read.
        ContractError: the file is not a manifest.
    """
    try:
        body = store.get(MANIFEST_KEY).body
    except ObjectNotFoundError:
        return None
    return PublishedManifest(Manifest.from_json(body), body)


def require_manifest(store: ReadableStore) -> PublishedManifest:
    """`read_manifest` for callers that can do nothing without.

    Raises:
        StoreEmptyError: nothing was committed.
    """
    published = read_manifest(store)
    if published is None:
        raise StoreEmptyError(
            f"{store.url}: expected a store, found no {MANIFEST_KEY}; check --store, or fill it with 'genesis populate'"
        )
    return published


def read_checkpoints_if_there(store: ReadableStore) -> Checkpoints | None:
    """The checkpoints; None if there are none.

    Raises:
        StoreError: they cannot be read (behind a CDN they need not be public).
        ContractError: the file is damaged.
    """
    try:
        return Checkpoints.from_json(store.get(CHECKPOINTS_KEY).body)
    except ObjectNotFoundError:
        return None


def read_segment(store: ReadableStore, reference: SegmentRef) -> Segment:
    """An index segment, held against its link in the chain.

    Raises:
        StoreError: it cannot be read.
        ContractError: it is not what the manifest names.
    """
    return Segment.from_json(_vouched_body(store, reference), name=reference.key)


def _vouched_body(store: ReadableStore, reference: SegmentRef | TokenizerRef) -> bytes:
    body = store.get(reference.key).body
    if sha256_hex(body) != reference.sha256:
        raise ContractError(
            f"{reference.key}: expected sha256 {reference.sha256}, found {sha256_hex(body)}; "
            "restore that object from a copy"
        )
    return body


def read_vocabulary(store: ReadableStore, manifest: Manifest | None) -> Vocabulary:
    """The newest vocabulary, of either kind: the manifest's, or the ``tokenizer.json`` of a store that has only that.

    Raises:
        StoreEmptyError: there is none.
        StoreError: it cannot be read.
        ContractError: it is not what the manifest names.
    """
    if manifest is None or manifest.tokenizer is None:
        try:
            return read_vocabulary_file(store.get(TOKENIZER_KEY).body)
        except ObjectNotFoundError:
            raise StoreEmptyError(
                f"{store.url}: expected a vocabulary, found none; learn one with 'genesis learn' or 'genesis populate'"
            ) from None
    return read_vocabulary_file(_vouched_body(store, manifest.tokenizer), name=manifest.tokenizer.key)


def find_shard(store: ReadableStore, manifest: Manifest, shard_id: int) -> tuple[SegmentRef, ShardEntry]:
    """A shard's entry and the segment it stands in.

    Raises:
        UsageError: the store has no such shard, or no index.
        StoreError, ContractError: the segment cannot be read.
    """
    if not 0 <= shard_id < manifest.total_shards:
        has = f"shards 0 to {manifest.total_shards - 1}" if manifest.total_shards else "no shard"
        raise UsageError(f"{store.url} has {has}, asked for shard {shard_id}")
    if not manifest.index:
        raise UsageError(f"{store.url}: the manifest has no index (an older program wrote it); nothing is known of it")
    reference = manifest.index[shard_id // SEGMENT_SHARDS]
    return reference, read_segment(store, reference).shards[shard_id % SEGMENT_SHARDS]


def previous_of_source(store: ReadableStore, manifest: Manifest, entry: ShardEntry) -> ShardEntry | None:
    """The shard of the same source that came before; None for its first.

    Reads segments backwards, usually just the one the shard stands in.

    Raises:
        StoreError, ContractError: a segment cannot be read.
    """
    return next((each for each in _backwards(store, manifest, entry.id) if each.source == entry.source), None)


def _backwards(store: ReadableStore, manifest: Manifest, before: int) -> Iterator[ShardEntry]:
    for reference in reversed(manifest.index[: before // SEGMENT_SHARDS + 1]):
        for entry in reversed(read_segment(store, reference).shards):
            if entry.id < before:
                yield entry
