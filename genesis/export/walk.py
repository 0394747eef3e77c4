"""Which shards an export reads, in which order, and which of their documents it takes.

One source after the other, by name; each source's shards in the order of their ids, whatever lies between them: a
source's documents run on from one of its shards to the next of its own. A document belongs to the shard it begins in.
So the first shard of a range gives up what a document of an earlier shard left in it, and behind the range reading goes
on until the last document ends: exports of 0:100 and of 100:200 hold every document once, and ranges can be exported by
several machines at once. All of that is told from the index; no shard is read here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from genesis.errors import UsageError
from genesis.snapshot import previous_of_source, read_segment
from genesis.store import ReadableStore
from manifests import SEGMENT_SHARDS, ContractError, Manifest, Segment, ShardEntry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WalkedShard:
    """A shard, and which part of it is wanted."""

    entry: ShardEntry
    follows: ShardEntry | None = None
    """The source's shard before it in the walk; None for its first."""
    skips_head: bool = False
    """What comes before its first EOS belongs to a document of an earlier shard."""
    is_tail: bool = False
    """It lies behind the range: only the document that is still open is wanted."""
    ends_source: bool = False
    """The walk's last shard of this source."""


@dataclass(slots=True)
class ShardWalk:
    """The chosen shards of a store; iterating reads the index, some 0.35 MB for 1,000 shards.

    Attributes:
        store: where the index is.
        manifest: the store's.
        total_shards: shards with this id or a higher one are left out.
        source: only this source; None for all.
        first_shard: the first shard.
        end_shard: the shard after the last; None for ``total_shards``.
    """

    store: ReadableStore
    manifest: Manifest
    total_shards: int
    source: str | None
    first_shard: int
    end_shard: int | None
    _tail: Segment | None = field(default=None)
    """The last segment: a populator deletes it an hour after a longer one took its place, the others never."""

    def open(self) -> None:
        """Reads the end of the index, and checks that there is something to walk over.

        Raises:
            UsageError: the store has no such source or shard, or no index.
            StoreError, ContractError: the index cannot be read.
        """
        if not self.manifest.index:
            raise UsageError(f"{self.store.url}: expected an index of shards, found none; there is nothing to export")
        if self.source is not None and self.source not in self.manifest.sources:
            known = ", ".join(sorted(self.manifest.sources))
            raise UsageError(f"--source: expected one of {known} in {self.store.url}, found {self.source!r}")
        if self.first_shard >= self.total_shards:
            raise UsageError(
                f"--shards: {self.store.url} has shards 0 to {self.total_shards - 1}, asked for {self.first_shard} on"
            )
        self._tail = read_segment(self.store, self.manifest.index[-1])

    @property
    def expected_shards(self) -> int:
        """How many shards the walk has, documents that go on behind the range aside; at most."""
        end = self.total_shards if self.end_shard is None else min(self.end_shard, self.total_shards)
        within = end - self.first_shard
        return within if self.source is None else min(within, self.manifest.sources[self.source].shards)

    def __iter__(self) -> Iterator[WalkedShard]:
        """The shards, from the first.

        Raises:
            StoreError, ContractError: the index cannot be read, or contradicts itself.
        """
        for name in sorted(self.manifest.sources) if self.source is None else [self.source]:
            yield from self._of_source(name)

    def _of_source(self, name: str) -> Iterator[WalkedShard]:
        waiting: WalkedShard | None = None
        skipped_document = -1
        gap_told = False
        for entry in self._entries(name):
            is_tail = self.end_shard is not None and entry.id >= self.end_shard
            if waiting is None:
                if is_tail:
                    return
                before = previous_of_source(self.store, self.manifest, entry) if self.first_shard else None
                waiting = WalkedShard(entry, skips_head=_goes_on(before, entry))
                skipped_document = entry.first_document if waiting.skips_head else -1
                continue
            last = waiting.entry
            goes_on = _goes_on(last, entry)
            if is_tail and (not goes_on or last.last_document == skipped_document):
                break
            if waiting.is_tail and last.last_document > last.first_document:
                break
            if entry.id != last.id + 1 and not gap_told:
                gap_told = True
                logger.info(
                    "%s: its shards are not contiguous (after %d comes %d); its documents are joined across the "
                    "shards of "
                    "other sources between them", name, last.id, entry.id,
                )  # fmt: skip
            yield waiting
            waiting = WalkedShard(entry, follows=last, is_tail=is_tail)
        if waiting is not None:
            yield replace(waiting, ends_source=True)

    def _entries(self, name: str) -> Iterator[ShardEntry]:
        last_shard_id = min(self.manifest.sources[name].last_shard_id, self.total_shards - 1)
        for reference in self.manifest.index[self.first_shard // SEGMENT_SHARDS : last_shard_id // SEGMENT_SHARDS + 1]:
            is_last = reference is self.manifest.index[-1]
            segment = self._tail if is_last and self._tail is not None else read_segment(self.store, reference)
            for entry in segment.shards:
                if self.first_shard <= entry.id <= last_shard_id and entry.source == name:
                    self._check(entry)
                    yield entry

    def _check(self, entry: ShardEntry) -> None:
        newest = self.manifest.tokenizer
        if entry.tokens != self.manifest.shard_tokens:
            raise ContractError(
                f"shard {entry.id}: expected {self.manifest.shard_tokens} ids as in the manifest, the index says "
                f"{entry.tokens}; run 'genesis verify'"
            )
        if newest is not None and entry.next_merge_id > newest.next_merge_id:
            raise ContractError(
                f"shard {entry.id}: expected a vocabulary of at most {newest.next_merge_id} ids as in the manifest, "
                f"the index says {entry.next_merge_id}; run 'genesis verify'"
            )


def _goes_on(before: ShardEntry | None, entry: ShardEntry) -> bool:
    """Whether ``entry`` begins with the rest of a document of the source's shard before it."""
    if before is None:
        return False
    if entry.first_document - before.last_document not in (0, 1):
        raise ContractError(
            f"shard {entry.id}: expected document {before.last_document} or the next after shard {before.id} of "
            f"{entry.source}, the index says {entry.first_document}; run 'genesis verify'"
        )
    return entry.first_document == before.last_document
