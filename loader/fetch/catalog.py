"""Every shard that a manifest vouches for: its entry, its source, and the vocabulary.

manifest → segment → shard is a chain of sha256; a segment or vocabulary is used only if it has the digest that the link
before it names, whether it comes from a mirror or from disk. Segments are read when one of their shards is needed (10
shards of 600,000: one or two of 600 segments) and kept. The trade-off: finding the shards of one source in a
store of several means reading all segments, 200 MB for 600,000 shards, once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from loader.errors import DataUnavailableError, HostileStoreError, LoaderUsageError
from loader.fetch.known_store import KnownStore, ShardFacts, StoreFacts, TrustedManifest, known_name
from loader.fetch.mirrors import Mirrors
from loader.fetch.shards import check_digest
from manifests import SEGMENT_SHARDS, ContractError, sha256_hex

if TYPE_CHECKING:
    from manifests import Manifest, Vocabulary

MAX_SEGMENT_BYTES: Final = 1 << 20
"""1,000 shards take 0.5 MB."""
_KEPT_SEGMENTS: Final = 100
"""In a store with more, segments that are only searched for a source's shards are not kept on disk."""


class Catalog:
    """What one manifest vouches for; ``known`` is the folder of its JSON files."""

    def __init__(self, trusted: TrustedManifest, mirrors: Mirrors, known: KnownStore) -> None:
        self.trusted = trusted
        self._mirrors = mirrors
        self._known = known
        self._segments: dict[int, list[dict[str, Any]]] = {}
        self.manifest: StoreFacts = trusted.facts

    def document(self) -> Manifest:
        """The whole manifest."""
        from manifests import Manifest

        return Manifest.from_json(self.trusted.body)

    def entry(self, shard_id: int) -> ShardFacts:
        """A shard's entry.

        Raises:
            LoaderUsageError: the store has no such shard.
            LoaderError: its segment is unavailable.
        """
        if not 0 <= shard_id < self.manifest.total_shards:
            raise LoaderUsageError(
                f"expected a shard of 0 to {self.manifest.total_shards - 1}, which the store has, found {shard_id}"
            )
        return ShardFacts.of(self._segment(shard_id // SEGMENT_SHARDS)[shard_id % SEGMENT_SHARDS])

    def shards_by_source(self, total_shards: int) -> dict[str, Sequence[int]]:
        """The ids of each source's shards among the first ``total_shards``, ascending.

        If the manifest names one source only, no segment is read.
        """
        filled = [name for name, shards in self.manifest.sources.items() if shards]
        if len(filled) == 1:
            return {filled[0]: range(total_shards)}
        keep = len(self.manifest.index) <= _KEPT_SEGMENTS
        found: dict[str, list[int]] = {}
        for number in range(-(-total_shards // SEGMENT_SHARDS)):
            # Not kept: 600,000 entries take 0.7 GB, their ids 20 MB.
            for entry in self._segments.get(number) or self._read_segment(number, keep=keep):
                if entry["id"] < total_shards:
                    found.setdefault(entry["source"], []).append(entry["id"])
        return {**found}

    def vocabulary(self) -> Vocabulary:
        """The store's newest vocabulary: of our own, or made elsewhere.

        Raises:
            DataUnavailableError: it has none.
            HostileStoreError: it is not of the kind, or has not the EOS, that the manifest says.
            LoaderError: it is unavailable.
        """
        reference = self.manifest.tokenizer
        if reference is None:
            raise DataUnavailableError("expected the manifest to name a vocabulary, found none")

        from manifests import FrozenVocabularyFile, max_vocabulary_bytes, read_vocabulary_file

        def check(body: bytes) -> None:
            read_vocabulary_file(body, name=reference.key)

        most = max_vocabulary_bytes(reference.next_merge_id, is_frozen=self.manifest.is_frozen)
        found = read_vocabulary_file(self._json(reference.key, reference.sha256, most, check), name=reference.key)
        is_frozen = isinstance(found, FrozenVocabularyFile)
        if (is_frozen, found.eos_id) != (self.manifest.is_frozen, self.manifest.eos_id):
            raise HostileStoreError(
                f"{reference.key}: expected the vocabulary with EOS {self.manifest.eos_id} that the manifest names, "
                f"found one with {found.eos_id}"
            )
        return found

    def _segment(self, number: int) -> list[dict[str, Any]]:
        if number not in self._segments:
            self._segments[number] = self._read_segment(number, keep=True)
        return self._segments[number]

    def _read_segment(self, number: int, *, keep: bool) -> list[dict[str, Any]]:
        reference = self.manifest.index[number]

        def check(body: bytes) -> None:
            from loader.fetch.limits import check_segment
            from manifests import Segment

            check_segment(Segment.from_json(body, name=reference.key), number, self.document())

        body = self._json(reference.key, reference.sha256, MAX_SEGMENT_BYTES, check, keep=keep)
        entries: list[dict[str, Any]] = json.loads(body)["shards"]
        if not self._fits(number, entries):
            check(body)  # It was right for another manifest; the check names what is wrong for this one.
            raise HostileStoreError(f"{reference.key}: expected a part of this store, found one of another")
        return entries

    def _fits(self, number: int, entries: list[dict[str, Any]]) -> bool:
        """Whether a segment that fits some manifest fits this one: 0.2 ms for 1,000 shards."""
        first, store = number * SEGMENT_SHARDS, self.manifest
        return (
            len(entries) == min(SEGMENT_SHARDS, store.total_shards - first)
            and entries[0]["id"] == first
            and all(entry["tokens"] == store.shard_tokens and entry["source"] in store.sources for entry in entries)
        )

    def _json(
        self, key: str, sha256: str, max_bytes: int, check: Callable[[bytes], None], *, keep: bool = True
    ) -> bytes:
        """Reads a JSON file by its digest from this machine, where it was checked before, or from a mirror."""
        name = known_name(key)
        body = self._known.read(name)
        if body is not None and sha256_hex(body) == sha256:
            return body
        body = self._mirrors.fetch(key, max_bytes, lambda found: check_digest(found, sha256, key))
        try:
            check(body)
        except ContractError as error:
            raise HostileStoreError(f"the manifest vouches for a file that breaks its contract: {error}") from None
        if keep:
            self._known.write(name, body)
        return body
