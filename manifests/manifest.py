"""``manifest.json``: what readers trust.

The names of spec G-16, plus the chain: manifest → segment → shard, each link a sha256, so that one signature
over the manifest vouches for every byte of the store. Everything a manifest names is immutable and was in the store
before it; a reader with any manifest, however old, finds a consistent store.

Format 2 is that of a store with a vocabulary made elsewhere (`manifests.frozen_vocabulary`): its ids below 10 are
ordinary tokens and its documents end in ``tokenizer.eos_id``, so a reader that knows only format 1 must stop. Every
other store stays at format 1, byte for byte.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from manifests.documents import Document, Part
from manifests.fields import Count, Key, Sha256, ShardTokens, SourceName, Time, TokenId
from manifests.ids import EOS_ID
from manifests.keys import SEGMENT_SHARDS, SHARD_TOKENS

FROZEN_FORMAT = 2
"""``format`` of the manifest and the checkpoints of a store whose vocabulary was made elsewhere."""
FROZEN_TOKENIZER_VERSION = "hf_v1"
"""``tokenizer_version`` of such a store."""


class SourceTotals(Part):
    """What one source has given to the store."""

    shards: Count
    tokens: Count
    """Ids in the source's shards; what does not fill a shard yet is not counted here."""
    documents_processed: Count
    last_shard_id: int
    """−1 while the source has no shard."""


class TokenizerRef(Part):
    """The newest vocabulary."""

    key: Key
    sha256: Sha256
    next_merge_id: TokenId
    eos_id: TokenId | None = None
    """What ends a document, where the vocabulary was made elsewhere; None for one of our own, whose EOS is 2."""


class SegmentRef(Part):
    """A link of the chain: an index segment and what it covers."""

    key: Key
    sha256: Sha256
    first_shard: Count
    shards: Count


class Signature(Part):
    """Ed25519 over the canonical JSON of all other fields of the manifest."""

    algorithm: Literal["ed25519"]
    key_id: str
    """First 16 hexadecimal digits of the sha256 of the raw public key."""
    value: str
    """Base64 of the 64 bytes."""


class Manifest(Document):
    """``manifest.json``. A manifest without the added fields (spec G-16) reads as an unindexed store."""

    FILE: ClassVar[str] = "manifest.json"
    FORMATS: ClassVar[tuple[int, ...]] = (1, FROZEN_FORMAT)

    sequence: Count = 0
    """Counts commits; a reader refuses a manifest older than the last it saw."""
    previous: Sha256 | None = None
    """sha256 of the manifest file this one replaced."""
    total_shards: Count
    total_tokens: Count
    total_size_bytes: Count
    tokenizer_version: str = "bpe_v1"
    tokenizer: TokenizerRef | None = None
    sources: dict[SourceName, SourceTotals]
    shard_tokens: ShardTokens = SHARD_TOKENS
    dtype: Literal["int64"] = "int64"
    index: tuple[SegmentRef, ...] = ()
    created_at: Time
    updated_at: Time
    signature: Signature | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether the vocabulary was made elsewhere."""
        return self.format == FROZEN_FORMAT

    @property
    def eos_id(self) -> int:
        """The id that ends every document."""
        own = self.tokenizer.eos_id if self.tokenizer else None
        return EOS_ID if own is None else own

    @model_validator(mode="after")
    def _vocabulary_is_of_one_kind(self) -> Self:
        named = self.tokenizer is not None and self.tokenizer.eos_id is not None
        version = self.tokenizer_version == FROZEN_TOKENIZER_VERSION
        if not (self.is_frozen == named == version):
            raise ValueError(
                f"format {FROZEN_FORMAT}, tokenizer_version {FROZEN_TOKENIZER_VERSION!r} and tokenizer.eos_id go "
                f"together, found format {self.format} and tokenizer_version {self.tokenizer_version!r}"
            )
        if self.tokenizer is not None and self.eos_id >= self.tokenizer.next_merge_id and self.is_frozen:
            raise ValueError(f"tokenizer.eos_id {self.eos_id} is not below {self.tokenizer.next_merge_id}")
        return self

    @model_validator(mode="after")
    def _totals_add_up(self) -> Self:
        if sum(source.shards for source in self.sources.values()) != self.total_shards:
            raise ValueError(f"total_shards {self.total_shards} is not the sum over sources")
        if sum(source.tokens for source in self.sources.values()) != self.total_tokens:
            raise ValueError(f"total_tokens {self.total_tokens} is not the sum over sources")
        if self.index:
            self._check_index()
        return self

    def _check_index(self) -> None:
        for number, segment in enumerate(self.index):
            if segment.first_shard != number * SEGMENT_SHARDS:
                raise ValueError(f"segment {number} should begin at shard {number * SEGMENT_SHARDS}")
            last = number == len(self.index) - 1
            if not (1 <= segment.shards <= SEGMENT_SHARDS and (last or segment.shards == SEGMENT_SHARDS)):
                raise ValueError(f"segment {number} holds {segment.shards} shards")
        covered = sum(segment.shards for segment in self.index)
        if covered != self.total_shards:
            raise ValueError(f"total_shards is {self.total_shards}, the index covers {covered}")
        if self.total_tokens != self.total_shards * self.shard_tokens:
            raise ValueError(f"total_tokens is {self.total_tokens}, not {self.total_shards} × {self.shard_tokens}")
