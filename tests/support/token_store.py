"""Any store, honest or not, made from arrays of ids in a folder, without the populator.

What `publish` vouches for is what `entries` says, so a test that changes an entry, or puts other bytes at a key and
names their digest, has a store whose chain of digests holds and whose contents lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from manifests import (
    MANIFEST_KEY,
    SEGMENT_SHARDS,
    Manifest,
    PackedEntry,
    Segment,
    SegmentRef,
    ShardEntry,
    SourceTotals,
    TokenizerRef,
    VocabularyFile,
    encode_shard,
    pack_ids,
    packed_key,
    segment_key,
    sha256_hex,
    shard_key,
    sign_manifest,
    vocabulary_key,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SHARD_TOKENS = 2_000
VOCABULARY_IDS = 1_000
_TIME = "2026-01-02T03:04:05Z"
_EOS = 2

Ids = npt.NDArray[np.int64]


def fixed_ids(shard_id: int, num_tokens: int = SHARD_TOKENS, next_merge_id: int = VOCABULARY_IDS) -> Ids:
    """A shard's ids by a formula: the same for ever, no two shards alike, an EOS every 40 ids or so."""
    x = np.arange(num_tokens, dtype=np.uint64) + np.uint64(shard_id * 1_000_003 + 1)
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0xD168AAAD)
    x = (x ^ (x >> np.uint64(13))) * np.uint64(0xAF723597)
    x ^= x >> np.uint64(16)
    ids = (x % np.uint64(next_merge_id - 10)).astype(np.int64) + 10
    ids[x % np.uint64(41) == 0] = _EOS
    return ids


def vocabulary_of(next_merge_id: int = VOCABULARY_IDS) -> VocabularyFile:
    merges = {f"{10 + n // 256}_{10 + n % 256}": 266 + n for n in range(next_merge_id - 266)}
    return VocabularyFile.model_validate(
        {"next_merge_id": next_merge_id, "merges": merges, "sources_contributed": {"alpha": len(merges)}}
    )


@dataclass(slots=True)
class TokenStore:
    folder: Path
    shard_tokens: int = SHARD_TOKENS
    next_merge_id: int = VOCABULARY_IDS
    packed: bool = True
    private_key: Ed25519PrivateKey | None = None
    entries: list[ShardEntry] = field(default_factory=list)
    tokenizer: TokenizerRef | None = None

    @classmethod
    def of(cls, folder: Path, shards: int, *, sources: Sequence[str] = ("alpha",), **options: Any) -> Self:
        """A published store of ``shards`` shards of `fixed_ids`, the sources taking turns."""
        store = cls(folder, **options)
        store.grow(shards, sources=sources)
        return store

    @property
    def url(self) -> str:
        return str(self.folder)

    @property
    def manifest(self) -> Manifest:
        return Manifest.from_json((self.folder / MANIFEST_KEY).read_bytes())

    def ids(self, shard_id: int) -> Ids:
        return fixed_ids(shard_id, self.shard_tokens, self.next_merge_id)

    def grow(self, shards: int, *, sources: Sequence[str] = ("alpha",)) -> Manifest:
        for _ in range(shards):
            shard_id = len(self.entries)
            self.add(self.ids(shard_id), source=sources[shard_id % len(sources)])
        return self.publish()

    def add(self, ids: Ids, *, source: str = "alpha") -> ShardEntry:
        """Writes a shard and notes an entry that describes it."""
        shard_id = len(self.entries)
        packed = None
        if self.packed:
            body = pack_ids(ids, self.next_merge_id)
            packed = PackedEntry(
                key=packed_key(shard_id), sha256=self.put(packed_key(shard_id), body), size_bytes=len(body)
            )
        image = bytes(encode_shard(ids))
        entry = ShardEntry(
            id=shard_id,
            sha256=self.put(shard_key(shard_id), image),
            size_bytes=len(image),
            tokens=len(ids),
            source=source,
            first_document=shard_id,
            last_document=shard_id + 1,
            next_merge_id=self.next_merge_id,
            packed=packed,
        )
        self.entries.append(entry)
        return entry

    def change(self, shard_id: int, **fields: Any) -> None:
        """Lets an entry say something else; nothing is checked, and `publish` vouches for it."""
        self.entries[shard_id] = self.entries[shard_id].model_copy(update=fields)

    def put(self, key: str, body: bytes) -> str:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".new-{path.name}")
        temporary.write_bytes(body)
        temporary.replace(path)
        return sha256_hex(body)

    def publish(self, **fields: Any) -> Manifest:
        """Writes segments, a vocabulary and the next manifest, with ``fields`` of the manifest replaced, unchecked."""
        before = self.folder / MANIFEST_KEY
        body = before.read_bytes() if before.exists() else None
        vocabulary = vocabulary_of(self.next_merge_id).to_json()
        digest = self.put("tokenizer.json", vocabulary)
        self.put(vocabulary_key(digest), vocabulary)
        self.tokenizer = TokenizerRef(key=vocabulary_key(digest), sha256=digest, next_merge_id=self.next_merge_id)
        honest = self._describe(
            sequence=Manifest.from_json(body).sequence + 1 if body else 1,
            previous=sha256_hex(body) if body else None,
        )
        return self.put_manifest(honest.model_copy(update=fields))

    def put_manifest(self, manifest: Manifest) -> Manifest:
        """Puts a manifest in place, signed if the store has a key."""
        if self.private_key is not None:
            manifest = sign_manifest(manifest, self.private_key)
        self.put(MANIFEST_KEY, manifest.to_json())
        return manifest

    def put_segment(self, number: int, body: bytes) -> SegmentRef:
        """Writes an index segment of any bytes; the reference tells the truth about its digest."""
        key = segment_key(number, sha256_hex(body))
        part = self.entries[number * SEGMENT_SHARDS : (number + 1) * SEGMENT_SHARDS]
        return SegmentRef(
            key=key, sha256=self.put(key, body), first_shard=number * SEGMENT_SHARDS, shards=max(1, len(part))
        )

    def _describe(self, *, sequence: int, previous: str | None) -> Manifest:
        index = []
        for first in range(0, len(self.entries), SEGMENT_SHARDS):
            segment = Segment.model_construct(shards=tuple(self.entries[first : first + SEGMENT_SHARDS]))
            index.append(self.put_segment(first // SEGMENT_SHARDS, segment.to_json()))
        names = sorted({entry.source for entry in self.entries})
        own = {name: [entry for entry in self.entries if entry.source == name] for name in names}
        return Manifest(
            sequence=sequence,
            previous=previous,
            total_shards=len(self.entries),
            total_tokens=len(self.entries) * self.shard_tokens,
            total_size_bytes=sum(entry.size_bytes for entry in self.entries),
            tokenizer=self.tokenizer,
            sources={
                name: SourceTotals(
                    shards=len(entries),
                    tokens=len(entries) * self.shard_tokens,
                    documents_processed=len(entries),
                    last_shard_id=entries[-1].id,
                )
                for name, entries in own.items()
            },
            shard_tokens=self.shard_tokens,
            index=tuple(index),
            created_at=_TIME,
            updated_at=_TIME,
        )


def digest(batch: Mapping[str, Any]) -> str:
    """Identifies a batch: names, types, shapes and contents of its tensors."""
    parts = [f"{name}:{batch[name].dtype}:{tuple(batch[name].shape)}" for name in sorted(batch)]
    bodies = [sha256_hex(batch[name].numpy().tobytes()) for name in sorted(batch)]
    return sha256_hex("\n".join([*parts, *bodies]).encode())[:24]


def take(batches: Iterable[Mapping[str, Any]], count: int | None = None) -> list[str]:
    return [digest(batch) for batch in islice(iter(batches), count)]
