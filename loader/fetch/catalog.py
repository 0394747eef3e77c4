"""Every shard that a manifest vouches for: its entry, its source, and the vocabulary.

manifest → segment → shard is a chain of sha256; a segment or vocabulary is used only if its digest is the one that the
link before it names, whether it comes from a mirror or from disk. Segments are read when one of their shards is asked
for (10 shards of 600,000: one or two of 600 segments) and kept. The trade-off: finding the shards of one source in a
store of several means reading all segments, 200 MB for 600,000 shards, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from loader.errors import CorruptObjectError, DataUnavailableError, HostileStoreError, LoaderUsageError
from loader.fetch.limits import MAX_SEGMENT_BYTES, MAX_VOCABULARY_BYTES, check_segment
from loader.fetch.manifest_keeper import KnownStore
from loader.fetch.mirrors import Mirrors
from manifests import SEGMENT_SHARDS, ContractError, Manifest, Segment, ShardEntry, VocabularyFile, sha256_hex

__all__ = ["Catalog"]

T = TypeVar("T")


class Catalog:
    """What one manifest vouches for.

    Args:
        manifest: a manifest that may be believed.
        mirrors: where its objects are.
        known: where its JSON files are kept.
    """

    def __init__(self, manifest: Manifest, mirrors: Mirrors, known: KnownStore) -> None:
        self.manifest = manifest
        self._mirrors = mirrors
        self._known = known
        self._segments: dict[int, Segment] = {}

    def entry(self, shard_id: int) -> ShardEntry:
        """A shard's entry.

        Raises:
            LoaderUsageError: the store has no such shard.
            LoaderError: its segment cannot be had.
        """
        if not 0 <= shard_id < self.manifest.total_shards:
            raise LoaderUsageError(
                f"expected a shard of 0 to {self.manifest.total_shards - 1}, which the store has, found {shard_id}"
            )
        return self._segment(shard_id // SEGMENT_SHARDS).shards[shard_id % SEGMENT_SHARDS]

    def shards_by_source(self, total_shards: int) -> dict[str, list[int]]:
        """The ids of each source's shards among the first ``total_shards``, ascending.

        Where the manifest tells that there is one source, no segment is read.
        """
        filled = [name for name, totals in self.manifest.sources.items() if totals.shards]
        if len(filled) == 1:
            return {filled[0]: list(range(total_shards))}
        found: dict[str, list[int]] = {}
        for number in range(-(-total_shards // SEGMENT_SHARDS)):
            for entry in self._segment(number).shards:
                if entry.id < total_shards:
                    found.setdefault(entry.source, []).append(entry.id)
        return found

    def vocabulary(self) -> VocabularyFile:
        """The store's newest vocabulary.

        Raises:
            DataUnavailableError: it has none.
            LoaderError: it cannot be had.
        """
        reference = self.manifest.tokenizer
        if reference is None:
            raise DataUnavailableError("expected the manifest to name a vocabulary, found none")

        def parse(body: bytes) -> VocabularyFile:
            return VocabularyFile.from_json(body, name=reference.key)

        return self._json(reference.key, reference.sha256, MAX_VOCABULARY_BYTES, parse)

    def _segment(self, number: int) -> Segment:
        if number not in self._segments:
            reference = self.manifest.index[number]

            def parse(body: bytes) -> Segment:
                segment = Segment.from_json(body, name=reference.key)
                check_segment(segment, reference, self.manifest)
                return segment

            self._segments[number] = self._json(reference.key, reference.sha256, MAX_SEGMENT_BYTES, parse)
        return self._segments[number]

    def _json(self, key: str, sha256: str, max_bytes: int, parse: Callable[[bytes], T]) -> T:
        """A JSON file by its digest: from disk, else from a mirror, then kept on disk."""
        name = key.replace("/", "-")
        body = self._known.read(name)
        if body is None or sha256_hex(body) != sha256:
            body = self._mirrors.fetch(key, max_bytes, lambda found: _checked(found, key, sha256))
            self._known.write(name, body)
        try:
            return parse(body)
        except ContractError as error:
            raise HostileStoreError(f"the manifest vouches for a file that breaks its contract: {error}") from None


def _checked(body: bytes, key: str, sha256: str) -> bytes:
    found = sha256_hex(body)
    if found != sha256:
        raise CorruptObjectError(f"{key}: expected sha256 {sha256}, found {found}")
    return body
