"""`StoreView`: what the page shows, read from a store when it is asked for.

A look at the store (three small files) is good for a second, whoever asks; index segments and the vocabulary are read
once and kept as long as the manifest names them; shards are read by ranges. Memory: 33 bytes a shard, the vocabulary's
table, 32 MB of document ends. It follows the published manifest, so it shows what any reader of the store can read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, TypeVar

import numpy as np

from genesis.errors import StoreError, StoreUnavailableError, UsageError
from genesis.snapshot import StoreEmptyError, read_segment, read_vocabulary
from genesis.status import StoreStatus, VocabularyStatus, read_status
from genesis.store import ReadableStore
from genesis.store_page.models import (
    DocumentPage,
    Piece,
    SeenCommit,
    ShardFacts,
    ShardGrid,
    StoreOverview,
    VerifiedRecord,
    VocabularySearch,
    WriterState,
)
from genesis.store_page.pieces import document_bounds, num_documents
from genesis.store_page.shard_reading import ShardReader
from genesis.store_page.shard_table import DAMAGED, UNCHECKED, VERIFIED_BEFORE, ShardTable
from genesis.store_page.vocabulary import TokenTable
from genesis.verification import VerifyReport
from manifests import (
    MANIFEST_KEY,
    SEGMENT_SHARDS,
    ContractError,
    Manifest,
    Segment,
    ShardEntry,
    SourcesFile,
    format_time,
)

MAX_PAGE_TOKENS = 2_000
_FRESH_S = 1.0
_MAX_ROWS = 200
_MAX_TEXT = 2_000
_MAX_COMMITS = 50
_MAX_SEGMENTS = 4
_MAX_MANIFEST_BYTES = 64 << 20

T = TypeVar("T")


@dataclass(slots=True)
class StoreView:
    """One store as the page sees it. Safe from many threads.

    Attributes:
        store: where it is.
        name: what to call it.
        sources: gives the targets.
        table: what is read of its index.
        shards: reads its shards, and tells the table's `note_check` of each.
        clock: seconds, never going back.
    """

    store: ReadableStore
    name: str
    sources: SourcesFile
    table: ShardTable
    shards: ShardReader
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looked_at: float = float("-inf")
    _overview: StoreOverview | None = None
    _status: StoreStatus | None = None
    _manifest: Manifest | None = None
    _manifest_etag: str | None = None
    _tokens: tuple[str, TokenTable] | None = None
    _tokens_lock: threading.Lock = field(default_factory=threading.Lock)
    _segments: OrderedDict[str, Segment] = field(default_factory=OrderedDict)
    _commits: deque[SeenCommit] = field(default_factory=lambda: deque(maxlen=_MAX_COMMITS))
    _report: VerifyReport | None = None

    def overview(self) -> StoreOverview:
        """The store now, or as it was less than a second ago."""
        with self._lock:
            if self._overview is None or self.clock() - self._looked_at >= _FRESH_S:
                self._overview = self._look()
                self._looked_at = self.clock()
            return self._overview

    def refreshed(self) -> StoreOverview:
        """The store now, however short ago it was looked at."""
        with self._lock:
            self._looked_at = float("-inf")
        return self.overview()

    def _look(self) -> StoreOverview:
        now = datetime.now(UTC)
        base = StoreOverview(state="ready", problem=None, name=self.name, read_at=format_time(now))
        state: Literal["empty", "damaged", "unreadable"]
        try:
            self._follow()
            status = self._status = read_status(self.store, self.sources, now=now, previous=self._status)
        except StoreEmptyError:
            state, problem = "empty", "nothing is committed to this store yet; 'genesis populate' fills it"
        except ContractError as error:
            state, problem = "damaged", str(error)
        except StoreError as error:
            state, problem = "unreadable", str(error)
        else:
            return self._filled(base, status)
        return base.model_copy(update={"state": state, "problem": self._told(problem)})

    def _told(self, text: str) -> str:
        """In one line, bounded, with the store's name instead of its address."""
        line = " ".join(text.split()).replace(f"{self.store.url}/", "").replace(self.store.url, self.name)
        return line[:_MAX_TEXT]

    def _filled(self, base: StoreOverview, status: StoreStatus) -> StoreOverview:
        report = self._report
        writer = status.writer
        index = self.table.state()
        return base.model_copy(
            update={
                "sequence": status.sequence,
                "published_sequence": status.published_sequence,
                "created_at": status.created_at,
                "updated_at": status.updated_at,
                "signed_by": status.signed_by,
                "shard_tokens": status.shard_tokens,
                "totals": status.totals,
                "sources": status.sources[:_MAX_ROWS],
                "num_sources": len(status.sources),
                "pending": status.pending[:_MAX_ROWS],
                "writer": writer
                and WriterState(
                    state=writer.state,
                    source=writer.source,
                    expires_at=writer.expires_at,
                    tokens_per_s=writer.tokens_per_s,
                ),
                "vocabulary": _bounded(status.vocabulary),
                "vocabulary_steps": self.table.vocabulary_steps(),
                "index": index.model_copy(update={"problem": index.problem and self._told(index.problem)}),
                "verified": report and _record_of(report),
                "commits": tuple(reversed(self._commits)),
                "notes": tuple(self._told(note) for note in status.notes[:20]),
            }
        )

    def _follow(self) -> None:
        """Takes over a manifest that has changed, and notes the commit."""
        if self._manifest_etag is None:
            try:
                found = self.store.get(MANIFEST_KEY, max_bytes=_MAX_MANIFEST_BYTES)
            except StoreError:
                return  # There is none, or `read_status` says why not.
        else:
            changed = self.store.get_if_changed(MANIFEST_KEY, self._manifest_etag, max_bytes=_MAX_MANIFEST_BYTES)
            if changed is None:
                return
            found = changed
        manifest = Manifest.from_json(found.body)
        self.table.follow(manifest)
        self._manifest, self._manifest_etag = manifest, found.etag
        self._take_report()
        if not self._commits or self._commits[-1].sequence != manifest.sequence:
            self._commits.append(
                SeenCommit(
                    sequence=manifest.sequence,
                    seen_at=format_time(datetime.now(UTC)),
                    total_shards=manifest.total_shards,
                    total_tokens=manifest.total_tokens,
                )
            )

    def give_report(self, report: VerifyReport) -> None:
        """Takes over what ``genesis verify`` found, if it is of this store.

        Raises:
            UsageError: it is not, or of a release that did not say which shards it verified.
        """
        self.overview()
        with self._lock:
            if report.verified_shards is None or report.created_at is None:
                raise UsageError(
                    "expected a report that says which shards were verified, found none of these; make it with "
                    "'genesis verify --json' of this release"
                )
            manifest = self._manifest
            if manifest is not None and not _is_of(report, manifest):
                raise UsageError(
                    f"expected a report on this store (created {manifest.created_at}, commit {manifest.sequence}), "
                    f"found one on a store created {report.created_at}, commit {report.sequence}"
                )
            self._report = report
            self._take_report()
            self._looked_at = float("-inf")

    def _take_report(self) -> None:
        report, manifest = self._report, self._manifest
        if report is None or manifest is None or not _is_of(report, manifest):
            return
        checks = np.full(min(report.counts.shards, manifest.total_shards), UNCHECKED, np.uint8)
        for first, last in report.verified_shards or ():
            checks[first : last + 1] = VERIFIED_BEFORE
        for first, last in report.damaged_shards or ():
            checks[first : last + 1] = DAMAGED
        self.table.report(checks)

    def read_index(self) -> bool:
        """Reads one more segment of the index; False: there is none to read now."""
        return self.table.read_next(self.store)

    def grid(self, first_shard: int, num_shards: int, max_cells: int) -> ShardGrid:
        """A range of shards in cells; a range within one segment is indexed first."""
        self.overview()
        if num_shards <= 2 * SEGMENT_SHARDS:
            for shard_id in {first_shard, first_shard + max(0, num_shards - 1)}:
                self.table.read_of(self.store, shard_id)
        return self.table.grid(first_shard, num_shards, max_cells)

    def shard(self, shard_id: int) -> ShardFacts:
        """What the index says of a shard.

        Raises:
            UsageError: there is no such shard.
            StoreError, ContractError: the index cannot be read.
        """
        manifest = self._ready()
        entry, segment_key = self._entry(manifest, shard_id)
        before, after = self.table.neighbours(shard_id)
        check = self.table.check_of(shard_id)
        return ShardFacts(
            id=entry.id,
            source=entry.source,
            tokens=entry.tokens,
            size_bytes=entry.size_bytes,
            sha256=entry.sha256,
            packed_bytes=entry.packed.size_bytes if entry.packed else None,
            first_document=entry.first_document,
            last_document=entry.last_document,
            vocabulary_ids=entry.next_merge_id,
            segment=segment_key,
            check="damaged" if check == DAMAGED else "not checked" if check == UNCHECKED else "verified",
            previous_shard=before,
            next_shard=after,
        )

    def document(self, shard_id: int, document: int, first_token: int = 0, max_tokens: int = 1_000) -> DocumentPage:
        """Some ids of a document of a shard.

        Args:
            shard_id: which shard.
            document: which of its documents, from 0; negative: from its end.
            first_token: which of the document's ids in this shard is the first.
            max_tokens: how many ids at most, up to `MAX_PAGE_TOKENS`.

        Raises:
            UsageError: there is no such shard or document.
            StoreError, ContractError: it cannot be read, or is damaged.
        """
        manifest = self._ready()
        tokens = self.tokens(manifest)
        entry, _ = self._entry(manifest, shard_id)
        ends = self.shards.ends(entry, manifest.eos_id)
        number = num_documents(ends, entry.tokens)
        place = document + number if document < 0 else document
        if not 0 <= place < number:
            raise UsageError(f"shard {shard_id} has documents 0 to {number - 1}, asked for {document}")
        start, end = document_bounds(ends, entry.tokens, place)
        if not 0 <= first_token < end - start:
            raise UsageError(f"the document has {end - start} ids in shard {shard_id}, asked for {first_token}")
        last = min(end, start + first_token + min(max(1, max_tokens), MAX_PAGE_TOKENS))
        ids = self.shards.ids(entry, start + first_token, last)
        before, after = self.table.neighbours(shard_id)
        return DocumentPage(
            shard=shard_id,
            source=entry.source,
            document=place,
            num_documents=number,
            ordinal=entry.first_document + place,
            begins_before=self.table.begins_before(shard_id) if place == 0 else False,
            continues_after=end == entry.tokens and (len(ends) == 0 or int(ends[-1]) != entry.tokens - 1),
            num_tokens=end - start,
            first_token=first_token,
            pieces=tokens.pieces(ids.tolist()),
            next_token=last - start if last < end else None,
            vocabulary_ids=entry.next_merge_id,
            previous_shard=before,
            next_shard=after,
        )

    def document_of_source(
        self, source: str, ordinal: int, first_token: int = 0, max_tokens: int = 1_000
    ) -> DocumentPage:
        """The beginning of a document by its place among those of its source; see `document`.

        Raises:
            UsageError: the source, or the document, is in no shard.
            StoreUnavailableError: the index is not read so far.
            StoreError, ContractError: it cannot be read, or is damaged.
        """
        manifest = self._ready()
        totals = manifest.sources.get(source)
        if totals is None or not totals.shards:
            known = ", ".join(sorted(name for name, each in manifest.sources.items() if each.shards)[:20])
            raise UsageError(f"expected one of the sources {known}, found {source[:64]!r}")
        shard_id = self.table.shard_of(source, ordinal)
        if shard_id is None:
            state = self.table.state()
            if state.problem is None and state.indexed_shards < self.table.total_shards:
                raise StoreUnavailableError(
                    f"the index is read up to {state.indexed_shards} of {self.table.total_shards} shards; try again"
                )
            raise UsageError(f"no shard holds document {ordinal} of {source}; its last is {self._last_of(source)}")
        entry, _ = self._entry(manifest, shard_id)
        return self.document(shard_id, ordinal - entry.first_document, first_token, max_tokens)

    def _last_of(self, source: str) -> int:
        manifest = self._ready()
        entry, _ = self._entry(manifest, manifest.sources[source].last_shard_id)
        return entry.last_document

    def vocabulary(self, token_id: int | None = None, text: str = "") -> VocabularySearch:
        """Looks something up in the newest vocabulary.

        Raises:
            UsageError: nothing of the kind is in it, or what was asked is too long.
            StoreEmptyError: there is no vocabulary.
            StoreError, ContractError, TokenizerError: it cannot be read.
        """
        return self.tokens(self._ready()).search(token_id=token_id, text=text)

    def all_tokens(self, max_ids: int) -> tuple[Piece, ...]:
        """The whole newest vocabulary; nothing if it has more ids. Raises as `vocabulary` does."""
        table = self.tokens(self._ready())
        return table.pieces(range(len(table.token_bytes))) if len(table.token_bytes) <= max_ids else ()

    def tokens(self, manifest: Manifest) -> TokenTable:
        """The newest vocabulary's table, made once for each that the manifest names."""
        sha256 = manifest.tokenizer.sha256 if manifest.tokenizer else ""
        with self._tokens_lock:
            if self._tokens is None or self._tokens[0] != sha256:
                self._tokens = sha256, TokenTable.of(read_vocabulary(self.store, manifest))
            return self._tokens[1]

    def _ready(self) -> Manifest:
        overview = self.overview()
        manifest = self._manifest
        if manifest is None:
            raise StoreEmptyError(overview.problem or "nothing is published yet")
        return manifest

    def _entry(self, manifest: Manifest, shard_id: int) -> tuple[ShardEntry, str]:
        if not 0 <= shard_id < manifest.total_shards:
            has = f"shards 0 to {manifest.total_shards - 1}" if manifest.total_shards else "no shard"
            raise UsageError(f"the store has {has}, asked for shard {str(shard_id)[:30]}")
        if not manifest.index:
            raise UsageError("the manifest has no index (an older program wrote it); nothing is known of its shards")
        reference = manifest.index[shard_id // SEGMENT_SHARDS]
        with self._lock:
            segment = self._segments.get(reference.sha256)
        if segment is None:
            segment = read_segment(self.store, reference)
            if (segment.shards[0].id, len(segment.shards)) != (reference.first_shard, reference.shards):
                raise ContractError(f"{reference.key}: expected the shards that the manifest names, found others")
            with self._lock:
                self._segments[reference.sha256] = segment
                while len(self._segments) > _MAX_SEGMENTS:
                    self._segments.popitem(last=False)
        self.table.read_of(self.store, shard_id)
        return segment.shards[shard_id % SEGMENT_SHARDS], reference.key


def _is_of(report: VerifyReport, manifest: Manifest) -> bool:
    return report.created_at == manifest.created_at and (report.sequence or 0) <= manifest.sequence


def _record_of(report: VerifyReport) -> VerifiedRecord:
    return VerifiedRecord(
        finished_at=report.finished_at,
        sequence=report.sequence or 0,
        ok=report.ok,
        shards_verified=report.counts.shards_verified,
        num_problems=report.num_problems,
        problems=tuple(str(problem)[:_MAX_TEXT] for problem in report.problems[:20]),
    )


def _bounded(vocabulary: VocabularyStatus | None) -> VocabularyStatus | None:
    """With what a stranger wrote into the file cut to what a page can show."""
    if vocabulary is None:
        return None
    contributed = vocabulary.sources_contributed
    return vocabulary.model_copy(
        update={
            "pattern": vocabulary.pattern and vocabulary.pattern[:_MAX_TEXT],
            "origin": vocabulary.origin and vocabulary.origin[:_MAX_TEXT],
            "eos_token": vocabulary.eos_token and vocabulary.eos_token[:_MAX_TEXT],
            "sources_contributed": contributed
            and dict(sorted(contributed.items(), key=lambda item: -item[1])[:_MAX_ROWS]),
        }
    )
