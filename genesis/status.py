"""What a store holds and how it is coming along, from nothing but reading it (`genesis status`).

Works on any address, also a CDN's where ``checkpoints.json`` may not be public: then it tells what the manifest alone
knows, and says so in ``notes``. The figures are those of the newest commit. Costs three small reads; the vocabulary
(0.6 MB for 32,000 ids) is read again only when it has changed. The result's JSON is the documented, stable form of
docs/status.md.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from genesis.errors import LeaseHeldError, StoreError
from genesis.populate.lease import check_free, describe_writer
from genesis.snapshot import (
    PublishedManifest,
    StoreEmptyError,
    read_checkpoints_if_there,
    read_manifest,
    read_vocabulary,
)
from genesis.store import ReadableStore
from manifests import (
    FIRST_MERGE_ID,
    Checkpoints,
    ContractError,
    InputRead,
    Manifest,
    SourceCheckpoint,
    SourcesFile,
    SourceTotals,
    Writer,
    format_time,
    parse_time,
    shard_file_bytes,
)

STATUS_FORMAT = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class SourceStatus(_Part):
    """How far one source is. None: not known from what can be read, or it makes no sense."""

    name: str
    shards: int
    target_shards: int | None
    tokens: int
    """Ids in the source's shards."""
    documents: int
    shard_bytes: int
    text_bytes: int | None
    """UTF-8 bytes of the documents processed."""
    rows_skipped: int | None
    leftover_tokens: int | None
    """Ids of the one document that crosses the end of the source's last shard."""
    unsharded_tokens: int | None
    """Ids that fill no shard, once the source was read to its end."""
    unsharded_documents: int | None
    ended: bool | None
    """The source was read to its end."""
    last_commit: str | None
    last_commit_age_s: float | None
    tokens_per_s: float | None
    """Speed, while a populator is at work on this source."""
    eta_s: float | None
    """Seconds to the end of the input or to the target, whichever comes first, at that speed."""
    input_bytes_read: int | None = None
    """Stored bytes of the input before the end of the source's last shard, within some MB; all, once it has ended."""
    input_bytes: int | None = None
    """Stored bytes of all its input files."""


class WriterStatus(_Part):
    """Who may write: the lease."""

    state: Literal["alive", "stale", "released"]
    id: str
    description: str
    token: int
    source: str | None
    expires_at: str | None
    tokens_per_s: float | None


class VocabularyStatus(_Part):
    """The newest vocabulary; the last three are None if its file cannot be read."""

    sha256: str
    ids: int
    """All ids, specials and bytes included (``next_merge_id``)."""
    merges: int
    limit: int | None
    sources_contributed: dict[str, int] | None
    """Merges learned from each source."""
    pattern: str | None


class StoreTotals(_Part):
    """Sums over the sources."""

    shards: int
    tokens: int
    documents: int
    shard_bytes: int
    text_bytes: int | None


class StoreStatus(_Part):
    """A store at one moment: docs/status.md."""

    format: int = STATUS_FORMAT
    url: str
    read_at: str
    sequence: int
    """Of the newest commit."""
    published_sequence: int | None
    """Of manifest.json; below ``sequence`` between a commit and its publication."""
    created_at: str | None
    updated_at: str | None
    signed_by: str | None
    """Key id in the manifest's signature, which is not checked here."""
    shard_tokens: int | None
    totals: StoreTotals
    sources: tuple[SourceStatus, ...]
    pending: tuple[str, ...]
    """Enabled sources that the store has nothing of yet, by priority."""
    writer: WriterStatus | None
    vocabulary: VocabularyStatus | None
    notes: tuple[str, ...]


def read_status(
    store: ReadableStore,
    sources: SourcesFile,
    *,
    now: datetime | None = None,
    previous: StoreStatus | None = None,
) -> StoreStatus:
    """Reads a store's status.

    Args:
        store: which.
        sources: gives the targets.
        now: for ages and leases; by default the clock.
        previous: an earlier status of this store, to spare reading an unchanged vocabulary.

    Raises:
        StoreEmptyError: there is no store, or nothing in it.
        StoreError: it cannot be read.
        ContractError: its manifest is damaged.
    """
    now = now or datetime.now(UTC)
    notes: list[str] = []
    published = read_manifest(store)
    checkpoints = _checkpoints(store, notes)
    manifest = _newest(published, checkpoints, notes)
    writer = _writer(checkpoints.writer, store.url, now) if checkpoints and checkpoints.writer else None
    if manifest is None and writer is None:
        raise StoreEmptyError(
            f"{store.url}: expected a store, found nothing in it; check --store, or fill it with 'genesis populate'"
        )
    rows = _sources(manifest, checkpoints, writer, sources, now)
    return StoreStatus(
        url=store.url,
        read_at=format_time(now),
        sequence=manifest.sequence if manifest else 0,
        published_sequence=published.manifest.sequence if published else None,
        created_at=manifest.created_at if manifest else None,
        updated_at=manifest.updated_at if manifest else None,
        signed_by=published.manifest.signature.key_id if published and published.manifest.signature else None,
        shard_tokens=manifest.shard_tokens if manifest else None,
        totals=_totals(manifest, rows),
        sources=rows,
        pending=tuple(spec.name for spec in sources.enabled() if spec.name not in {row.name for row in rows}),
        writer=writer,
        vocabulary=_vocabulary(store, manifest, previous, notes),
        notes=tuple(notes),
    )


def _checkpoints(store: ReadableStore, notes: list[str]) -> Checkpoints | None:
    try:
        found = read_checkpoints_if_there(store)
    except (StoreError, ContractError) as error:
        notes.append(f"checkpoints.json cannot be read, so this is what the manifest alone tells ({error})")
        return None
    if found is None:
        notes.append("there is no checkpoints.json, so this is what the manifest alone tells")
    return found


def _newest(published: PublishedManifest | None, checkpoints: Checkpoints | None, notes: list[str]) -> Manifest | None:
    """The manifest of the newest commit: the checkpoint's, unless only an older checkpoint could be had."""
    shown = published.manifest if published else None
    committed = checkpoints.manifest if checkpoints else None
    if committed is None or (shown is not None and shown.sequence >= committed.sequence):
        return shown
    shown_sequence = f"is at {shown.sequence}" if shown else "is missing"
    notes.append(f"commit {committed.sequence} is not published yet: manifest.json {shown_sequence}")
    return committed


def _writer(writer: Writer, url: str, now: datetime) -> WriterStatus:
    return WriterStatus(
        state=_lease_state(writer, url, now),
        id=writer.id,
        description=describe_writer(writer),
        token=writer.token,
        source=writer.source,
        expires_at=writer.expires_at,
        tokens_per_s=writer.tokens_per_s,
    )


def _lease_state(writer: Writer, url: str, now: datetime) -> Literal["alive", "stale", "released"]:
    """By the rule populators take a lease over by, so that the two never disagree."""
    if writer.expires_at is None:
        return "released"
    try:
        check_free(writer, url, now)
    except LeaseHeldError:
        return "alive"
    return "stale"


def _sources(
    manifest: Manifest | None,
    checkpoints: Checkpoints | None,
    writer: WriterStatus | None,
    sources: SourcesFile,
    now: datetime,
) -> tuple[SourceStatus, ...]:
    totals = manifest.sources if manifest else {}
    positions = checkpoints.sources if checkpoints else {}
    reads = (checkpoints.writer.input_read if checkpoints and checkpoints.writer else None) or {}
    busy = {writer.source} if writer and writer.state == "alive" and writer.source else set()
    names = sorted(totals.keys() | positions.keys() | busy, key=lambda name: (_priority(sources, name), name))
    return tuple(
        _source(
            name, manifest, totals.get(name), positions.get(name), reads.get(name), writer, _target(sources, name), now
        )
        for name in names
    )


def _source(
    name: str,
    manifest: Manifest | None,
    totals: SourceTotals | None,
    position: SourceCheckpoint | None,
    read: InputRead | None,
    writer: WriterStatus | None,
    target: int | None,
    now: datetime,
) -> SourceStatus:
    shards = totals.shards if totals else 0
    busy = writer is not None and writer.state == "alive" and writer.source == name
    tokens_per_s = writer.tokens_per_s if writer and busy else None
    shard_tokens = manifest.shard_tokens if manifest else None
    ended = position.ended if position else None
    return SourceStatus(
        name=name,
        shards=shards,
        target_shards=target,
        tokens=totals.tokens if totals else 0,
        documents=totals.documents_processed if totals else 0,
        shard_bytes=shards * shard_file_bytes(shard_tokens) if shard_tokens else 0,
        text_bytes=position.text_bytes if position else None,
        rows_skipped=position.rows_skipped if position else None,
        leftover_tokens=len(position.leftover_tokens) if position else None,
        unsharded_tokens=position.unsharded_tokens if position and ended else None,
        unsharded_documents=position.unsharded_documents if position and ended else None,
        ended=ended,
        last_commit=position.timestamp if position else None,
        last_commit_age_s=_age_s(position.timestamp, now) if position else None,
        tokens_per_s=tokens_per_s,
        eta_s=None if ended else _eta_s(shards, target, shard_tokens, read, tokens_per_s),
        input_bytes_read=(read.total_bytes if ended else read.read_bytes) if read else None,
        input_bytes=read.total_bytes if read else None,
    )


def _eta_s(
    shards: int, target: int | None, shard_tokens: int | None, read: InputRead | None, tokens_per_s: float | None
) -> float | None:
    """Time to the first of the two ends; the rest of the input is taken to hold tokens as what was read did."""
    if not shard_tokens or not tokens_per_s:
        return None
    ends: list[float] = [] if target is None else [max(target - shards, 0) * shard_tokens]
    if read is not None and read.read_bytes and shards:
        ends.append((read.total_bytes - read.read_bytes) * shards * shard_tokens / read.read_bytes)
    return round(min(ends) / tokens_per_s, 1) if ends else None


def _age_s(timestamp: str, now: datetime) -> float:
    """Zero rather than negative where the writer's clock is ahead of ours."""
    return max(round((now - parse_time(timestamp)).total_seconds(), 1), 0.0)


def _priority(sources: SourcesFile, name: str) -> float:
    spec = sources.get(name)
    return spec.priority if spec else float("inf")


def _target(sources: SourcesFile, name: str) -> int | None:
    spec = sources.get(name)
    return spec.target_shards or None if spec else None


def _totals(manifest: Manifest | None, rows: tuple[SourceStatus, ...]) -> StoreTotals:
    texts = [row.text_bytes for row in rows]
    known = [text for text in texts if text is not None]
    return StoreTotals(
        shards=manifest.total_shards if manifest else 0,
        tokens=manifest.total_tokens if manifest else 0,
        documents=sum(row.documents for row in rows),
        shard_bytes=manifest.total_size_bytes if manifest else 0,
        text_bytes=sum(known) if len(known) == len(texts) else None,
    )


def _vocabulary(
    store: ReadableStore, manifest: Manifest | None, previous: StoreStatus | None, notes: list[str]
) -> VocabularyStatus | None:
    reference = manifest.tokenizer if manifest else None
    if reference is None:
        return None
    known = previous.vocabulary if previous else None
    if known is not None and known.sha256 == reference.sha256 and known.pattern is not None:
        return known
    try:
        file = read_vocabulary(store, manifest)
    except (StoreError, ContractError) as error:
        notes.append(f"the vocabulary cannot be read ({error})")
        file = None
    return VocabularyStatus(
        sha256=reference.sha256,
        ids=reference.next_merge_id,
        merges=reference.next_merge_id - FIRST_MERGE_ID,
        limit=file.vocab_size if file else None,
        sources_contributed=file.sources_contributed if file else None,
        pattern=file.pattern if file else None,
    )
