"""What the loader needs to know of a manifest and of its shards, as plain values.

The models of `manifests` check a file when it comes; from then on its JSON lies on this machine under a digest, and is
read back into these without them. So a start on known shards does not import pydantic, 0.1 s of 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manifests import SHARD_TOKENS

__all__ = ["LinkFacts", "ObjectFacts", "ShardFacts", "StoreFacts", "VocabularyFacts"]


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object that is vouched for."""

    key: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """A shard, as its index entry has it (`manifests.ShardEntry`)."""

    id: int
    sha256: str
    size_bytes: int
    tokens: int
    source: str
    next_merge_id: int
    packed: ObjectFacts | None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> ShardFacts:
        """Reads an entry that was checked before."""
        packed = entry.get("packed")
        return cls(
            id=entry["id"],
            sha256=entry["sha256"],
            size_bytes=entry["size_bytes"],
            tokens=entry["tokens"],
            source=entry["source"],
            next_merge_id=entry["next_merge_id"],
            packed=ObjectFacts(packed["key"], packed["sha256"], packed["size_bytes"]) if packed else None,
        )


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A link of the chain (`manifests.SegmentRef`)."""

    key: str
    sha256: str


@dataclass(frozen=True, slots=True)
class VocabularyFacts:
    """The newest vocabulary (`manifests.TokenizerRef`)."""

    key: str
    sha256: str
    next_merge_id: int


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """A store, as its manifest has it (`manifests.Manifest`)."""

    sequence: int
    previous: str | None
    is_signed: bool
    total_shards: int
    shard_tokens: int
    updated_at: str
    sources: Mapping[str, int]
    """Shards by source."""
    index: tuple[LinkFacts, ...]
    tokenizer: VocabularyFacts | None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> StoreFacts:
        """Reads a manifest that was checked before; a field it may lack has the model's default."""
        vocabulary = manifest.get("tokenizer")
        return cls(
            sequence=manifest.get("sequence", 0),
            previous=manifest.get("previous"),
            is_signed=manifest.get("signature") is not None,
            total_shards=manifest["total_shards"],
            shard_tokens=manifest.get("shard_tokens", SHARD_TOKENS),
            updated_at=manifest["updated_at"],
            sources={name: totals["shards"] for name, totals in manifest["sources"].items()},
            index=tuple(LinkFacts(reference["key"], reference["sha256"]) for reference in manifest.get("index", ())),
            tokenizer=VocabularyFacts(vocabulary["key"], vocabulary["sha256"], vocabulary["next_merge_id"])
            if vocabulary
            else None,
        )
