"""Refuses numbers and names in a manifest that no honest store has, before anything is fetched.

The models of `manifests` bound types, counts and keys; here their combination is compared with the layout: every name
must follow from id and digest, every size from the shape. So a manifest can make a loader fetch, hold or write only
objects of sizes and names known beforehand.
"""

from __future__ import annotations

from typing import Final

from loader.errors import HostileStoreError
from manifests import (
    Manifest,
    Segment,
    ShardEntry,
    packed_key,
    segment_key,
    shard_file_bytes,
    vocabulary_key,
)
from manifests.packed_file import max_packed_bytes

MAX_SHARDS: Final = 10_000_000
"""25 trillion ids; what a node must hold for an assignment grows with it (`rendezvous`: 0.2 s and 30 MB)."""


def check_manifest(manifest: Manifest, max_shard_bytes: int) -> None:
    """Checks the sizes and keys of a manifest, and that it vouches for its shards.

    Raises:
        HostileStoreError: one of them is impossible in an honest store.
    """
    if manifest.total_shards > MAX_SHARDS:
        raise HostileStoreError(
            f"manifest.json: expected at most {MAX_SHARDS:,} shards, found {manifest.total_shards:,}"
        )
    size_bytes = shard_file_bytes(manifest.shard_tokens)
    if size_bytes > max_shard_bytes:
        raise HostileStoreError(
            f"manifest.json: expected shards of at most {max_shard_bytes:,} bytes, found shard_tokens "
            f"{manifest.shard_tokens:,} ({size_bytes:,} bytes); raise max_shard_bytes if you trust the store"
        )
    if manifest.total_shards and not manifest.index:
        raise HostileStoreError(
            f"manifest.json: expected an index that vouches for its {manifest.total_shards} shards, found none; "
            "populate the store with this program"
        )
    for number, reference in enumerate(manifest.index):
        _check_key("index segment", reference.key, segment_key(number, reference.sha256))
    if manifest.tokenizer is not None:
        _check_key("vocabulary", manifest.tokenizer.key, vocabulary_key(manifest.tokenizer.sha256))


def check_segment(segment: Segment, number: int, manifest: Manifest) -> None:
    """Checks that a segment is number ``number`` of the manifest, and the sizes and keys of its shards.

    Raises:
        HostileStoreError: it is not, or one of them is impossible in an honest store.
    """
    reference = manifest.index[number]
    first, found = segment.shards[0].id, len(segment.shards)
    if (first, found) != (reference.first_shard, reference.shards):
        raise HostileStoreError(
            f"{reference.key}: expected {reference.shards} shards from {reference.first_shard}, found {found} from "
            f"{first}"
        )
    for entry in segment.shards:
        _check_entry(entry, manifest)


def _check_entry(entry: ShardEntry, manifest: Manifest) -> None:
    what = f"shard {entry.id}"
    size_bytes = shard_file_bytes(manifest.shard_tokens)
    if entry.tokens != manifest.shard_tokens or entry.size_bytes != size_bytes:
        raise HostileStoreError(
            f"{what}: expected {manifest.shard_tokens} ids in {size_bytes} bytes, found {entry.tokens} in "
            f"{entry.size_bytes}"
        )
    if entry.source not in manifest.sources:
        raise HostileStoreError(f"{what}: expected a source the manifest names, found {entry.source!r}")
    if manifest.tokenizer is not None and entry.next_merge_id > manifest.tokenizer.next_merge_id:
        raise HostileStoreError(
            f"{what}: expected ids of the store's vocabulary ({manifest.tokenizer.next_merge_id}), found "
            f"next_merge_id {entry.next_merge_id}"
        )
    if entry.packed is not None:
        _check_key(what, entry.packed.key, packed_key(entry.id))
        largest = max_packed_bytes(entry.tokens, entry.next_merge_id)
        if entry.packed.size_bytes > largest:
            raise HostileStoreError(
                f"{what}: expected a transfer form of at most {largest:,} bytes, found {entry.packed.size_bytes:,}"
            )


def _check_key(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise HostileStoreError(f"{what}: expected the key {expected}, found {found!r}")
