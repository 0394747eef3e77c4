"""The result of `read_status`; its JSON is the documented, stable form of docs/status.md."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

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
    """Seconds to the target at that speed."""


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
