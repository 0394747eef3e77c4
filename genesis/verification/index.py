"""The chain from its head: manifest, signature, checkpoint; then the index, entry by entry.

Every segment is held against its link in the manifest, every entry against its neighbours, sums against totals. Entries
are handed out one by one, each with whether its last document goes on in the source's next shard; that takes one entry
of look-ahead a source. Memory: two segments (2,000 entries), however long the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from genesis.errors import StoreError
from genesis.snapshot import PublishedManifest, read_checkpoints_if_there, require_manifest
from genesis.store import ReadableStore
from genesis.verification.report import Findings
from genesis.verification.shards import ShardCheck
from manifests import (
    BYTE_OFFSET,
    CHECKPOINTS_KEY,
    MANIFEST_KEY,
    SEGMENT_SHARDS,
    Checkpoints,
    ContractError,
    Manifest,
    Segment,
    SegmentRef,
    ShardEntry,
    SignatureError,
    SourceCheckpoint,
    segment_key,
    sha256_hex,
    shard_file_bytes,
    verify_manifest,
)

SignatureState = Literal["verified", "invalid", "not checked", "unsigned"]


@dataclass(frozen=True, slots=True)
class CheckedManifest:
    """The manifest, as far as it can be used; None if it is none."""

    manifest: Manifest | None
    signature: SignatureState = "unsigned"
    key_id: str | None = None


def check_manifest(store: ReadableStore, public_key: Ed25519PublicKey | None, findings: Findings) -> CheckedManifest:
    """Reads the manifest and checks its form, its sums and its signature.

    A wrong signature is a problem, but the store is still held against the manifest: that tells what was changed.

    Raises:
        StoreEmptyError: there is none.
        StoreError: the store cannot be read.
    """
    try:
        published = require_manifest(store)
    except ContractError as error:
        findings.problem(MANIFEST_KEY, error)
        return CheckedManifest(None)
    manifest = published.manifest
    if manifest.total_shards and not manifest.index:
        findings.problem(MANIFEST_KEY, "expected an index, found none: nothing vouches for the shards, none is checked")
    if manifest.total_shards and manifest.tokenizer is None:
        findings.problem(MANIFEST_KEY, "expected the vocabulary its shards were written with, found none")
    state = _signature_state(published, public_key, findings)
    return CheckedManifest(manifest, state, manifest.signature.key_id if manifest.signature else None)


def _signature_state(
    published: PublishedManifest, public_key: Ed25519PublicKey | None, findings: Findings
) -> SignatureState:
    signature = published.manifest.signature
    if public_key is None:
        return "unsigned" if signature is None else "not checked"
    try:
        verify_manifest(published.body, public_key)
    except SignatureError as error:
        findings.problem(MANIFEST_KEY, error)
        return "invalid" if signature else "unsigned"
    return "verified"


def check_checkpoints(store: ReadableStore, manifest: Manifest, findings: Findings) -> Checkpoints | None:
    """Holds checkpoints.json, where it can be read, against the manifest; returned if both are of one commit."""
    try:
        checkpoints = read_checkpoints_if_there(store)
    except ContractError as error:
        findings.problem(CHECKPOINTS_KEY, error)
        return None
    except StoreError as error:
        findings.note(f"checkpoints.json cannot be read and is not checked ({error})")
        return None
    if checkpoints is None or checkpoints.manifest is None:
        findings.note("there is no checkpoint to go on from: the store can be read, but not added to")
        return None
    committed = checkpoints.manifest
    if committed.sequence > manifest.sequence:
        findings.note(
            f"checkpoints.json stands at commit {committed.sequence}, manifest.json at {manifest.sequence}: a "
            "populator is at work, or was stopped before it published (it will at its next start)"
        )
        return None
    if committed.sequence < manifest.sequence:
        findings.problem(
            CHECKPOINTS_KEY,
            f"expected commit {manifest.sequence} as in manifest.json, found {committed.sequence}; "
            "restore the newest copy",
        )
        return None
    if committed != manifest.model_copy(update={"signature": None}):
        findings.problem(CHECKPOINTS_KEY, "expected the manifest it stands for to be manifest.json, found another")
    for name, source in checkpoints.sources.items():
        for what in _source_problems(name, source, manifest):
            findings.problem(CHECKPOINTS_KEY, f"{name}: {what}")
    return checkpoints


def _source_problems(name: str, source: SourceCheckpoint, manifest: Manifest) -> list[str]:
    problems = []
    totals = manifest.sources.get(name)
    last_shard_id = totals.last_shard_id if totals else -1
    if source.last_shard_id != last_shard_id:
        problems.append(f"expected last_shard_id {last_shard_id} as in the manifest, found {source.last_shard_id}")
    documents = totals.documents_processed if totals else 0
    if source.documents_processed != documents:
        problems.append(
            f"expected documents_processed {documents} as in the manifest, found {source.documents_processed}"
        )
    leftover = source.leftover_tokens
    if leftover and manifest.tokenizer and max(leftover) >= manifest.tokenizer.next_merge_id:
        problems.append(f"expected leftover_tokens below {manifest.tokenizer.next_merge_id}, found {max(leftover)}")
    eos_id, least = manifest.eos_id, 0 if manifest.is_frozen else BYTE_OFFSET
    specials = [token for token in leftover if token < least or token == eos_id]
    if leftover and (specials != [eos_id] or leftover[-1] != eos_id):
        problems.append("expected leftover_tokens to end with their only EOS and to hold no other special id")
    return problems


def goes_on_after(checkpoints: Checkpoints | None) -> Mapping[int, bool]:
    """By the id of each source's last shard: whether its last document goes on behind it."""
    if checkpoints is None:
        return {}
    return {source.last_shard_id: source.tokens_left_over > 0 for source in checkpoints.sources.values()}


@dataclass(slots=True)
class _Sum:
    """What the entries of one source add up to."""

    shards: int = 0
    tokens: int = 0
    last: ShardEntry | None = None


@dataclass(slots=True)
class IndexWalk:
    """One walk over a store's index.

    Attributes:
        store: where the segments are.
        manifest: names them.
        goes_on: by shard id, whether its last document goes on; known only for the last shard of a source.
        vocabulary_sizes: after the walk, every ``next_merge_id`` that shards were written with.
        segments: segments that could be read.
    """

    store: ReadableStore
    manifest: Manifest
    goes_on: Mapping[int, bool]
    findings: Findings
    vocabulary_sizes: set[int] = field(default_factory=set)
    segments: int = 0
    _sums: dict[str, _Sum] = field(default_factory=dict)
    _size_bytes: int = 0
    _gap: bool = False
    _largest: int = 0

    def checks(self) -> Iterator[ShardCheck]:
        """Every shard that the index knows, in order of the following shard of its source."""
        for reference, segment in self._read_segments():
            if segment is None:
                yield from self._forget()
                continue
            for entry in segment.shards:
                yield from self._take(entry, reference.key)
        yield from self._flush()
        if not self._gap:
            self._check_totals()

    def _read_segments(self) -> Iterator[tuple[SegmentRef, Segment | None]]:
        if not self.manifest.index:
            return
        # A populator deletes the last segment an hour after a longer one took its place; the others stay for ever.
        *sealed, last = self.manifest.index
        tail = self._read(last)
        for reference in sealed:
            yield reference, self._read(reference)
        yield last, tail

    def _read(self, reference: SegmentRef) -> Segment | None:
        try:
            body = self.store.get(reference.key).body
            self.findings.count_bytes(len(body))
            if sha256_hex(body) != reference.sha256:
                self._problem(reference.key, f"expected sha256 {reference.sha256}, found {sha256_hex(body)}")
            segment = Segment.from_json(body, name=reference.key)
        except (StoreError, ContractError) as error:
            self._problem(reference.key, f"{error}; its {reference.shards} shards are not checked")
            return None
        number = reference.first_shard // SEGMENT_SHARDS
        if reference.key != segment_key(number, reference.sha256):
            self._problem(reference.key, f"expected the key {segment_key(number, reference.sha256)}")
        if (segment.shards[0].id, len(segment.shards)) != (reference.first_shard, reference.shards):
            self._problem(
                reference.key,
                f"expected {reference.shards} shards from {reference.first_shard}, "
                f"found {len(segment.shards)} from {segment.shards[0].id}; they are not checked",
            )
            return None
        self.segments += 1
        return segment

    def _problem(self, where: str, what: str) -> None:
        self.findings.problem(where, what)

    def _take(self, entry: ShardEntry, where: str) -> Iterator[ShardCheck]:
        """Checks an entry, and hands out the one before it of the same source."""
        for what in self._entry_problems(entry):
            self._problem(where, f"shard {entry.id}: {what}")
        self.vocabulary_sizes.add(entry.next_merge_id)
        self._largest = max(self._largest, entry.next_merge_id)
        self._size_bytes += entry.size_bytes
        source = self._sums.setdefault(entry.source, _Sum())
        before, source.last = source.last, entry
        source.shards += 1
        source.tokens += entry.tokens
        if before is None:
            if entry.first_document and not self._gap:
                self._problem(where, f"shard {entry.id}: expected first_document 0, found {entry.first_document}")
            return
        if entry.first_document not in (before.last_document, before.last_document + 1):
            self._problem(
                where,
                f"shard {entry.id}: expected first_document {before.last_document} or {before.last_document + 1} after "
                f"shard {before.id} of {entry.source}, found {entry.first_document}",
            )
            yield self._check(before, None)
        else:
            yield self._check(before, entry.first_document == before.last_document)

    def _check(self, entry: ShardEntry, continues: bool | None) -> ShardCheck:
        return ShardCheck(entry, continues, self.manifest.eos_id, self.manifest.is_frozen)

    def _entry_problems(self, entry: ShardEntry) -> list[str]:
        problems = []
        if entry.tokens != self.manifest.shard_tokens:
            problems.append(f"expected {self.manifest.shard_tokens} tokens, found {entry.tokens}")
        if entry.size_bytes != shard_file_bytes(entry.tokens):
            problems.append(f"expected {shard_file_bytes(entry.tokens)} bytes, found {entry.size_bytes}")
        newest = self.manifest.tokenizer
        if newest is not None and entry.next_merge_id > newest.next_merge_id:
            problems.append(f"expected next_merge_id of at most {newest.next_merge_id}, found {entry.next_merge_id}")
        if entry.next_merge_id < self._largest:
            problems.append(f"expected next_merge_id of at least {self._largest}, found {entry.next_merge_id}")
        if entry.source not in self.manifest.sources:
            problems.append(f"expected a source of the manifest, found {entry.source!r}")
        return problems

    def _forget(self) -> Iterator[ShardCheck]:
        """After a segment that could not be read: nothing is known of what joins on to what."""
        self._gap = True
        for source in self._sums.values():
            if source.last is not None:
                yield self._check(source.last, None)
                source.last = None

    def _flush(self) -> Iterator[ShardCheck]:
        """The last shard of every source."""
        for source in self._sums.values():
            if source.last is not None:
                yield self._check(source.last, self.goes_on.get(source.last.id))

    def _check_totals(self) -> None:
        if not self.manifest.index:
            return
        if self._size_bytes != self.manifest.total_size_bytes:
            self._problem(
                MANIFEST_KEY,
                f"expected total_size_bytes {self._size_bytes} by the index, found {self.manifest.total_size_bytes}",
            )
        for name, totals in self.manifest.sources.items():
            found = self._sums.get(name, _Sum())
            last = found.last
            expected = {
                "shards": found.shards,
                "tokens": found.tokens,
                "last_shard_id": last.id if last else -1,
                "documents_processed": last.last_document + 1 if last else 0,
            }
            for field_name, value in expected.items():
                if getattr(totals, field_name) != value:
                    self._problem(
                        MANIFEST_KEY,
                        f"{name}: expected {field_name} {value} by the index, found {getattr(totals, field_name)}",
                    )
