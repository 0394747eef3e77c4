"""``checkpoints.json``: what the populator resumes from; replacing it (compare-and-swap) *is* the commit.

Top level (spec G-18): one object per source, under the source's name. Beside them ``format``, ``writer`` (who may
write: a lease with a fencing token) and ``manifest`` (the unsigned manifest this checkpoint stands for, so that a
populator killed before publishing can publish at its next start).
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field

from manifests.documents import Document, Part
from manifests.errors import InvalidDocumentError
from manifests.fields import Count, Sha256, SourceName, Time, TokenId
from manifests.manifest import FROZEN_FORMAT, Manifest

_RESERVED = ("format", "writer", "manifest")


class Cursor(Part):
    """The next row to read. Our own, since the state of ``datasets`` iterators is not exact (datasets#8145, #8308)."""

    repo: str = ""
    """Hub repository; empty for local files."""
    revision: str = ""
    """Commit the repository is pinned to; empty for local files."""
    file: str
    """Name of the file in the source's file list."""
    row_group: Count = 0
    """Parquet row group; 0 for formats without."""
    row: Count
    """Rows of that row group (lines, for formats by line) before the next one."""


class SourceCheckpoint(Part):
    """How far one source has been turned into shards."""

    documents_processed: Count
    """Documents whose every id is in a shard or in ``leftover_tokens``."""
    last_shard_id: int = Field(ge=-1)
    leftover_tokens: tuple[TokenId, ...]
    """Tail of the one document that crosses the end of the last shard; the next shard begins with it."""
    timestamp: Time
    cursor: Cursor | None = None
    input_fingerprint: Sha256 | None = None
    """Digest over the input files up to the cursor's; files after it may be added, these may not change."""
    earlier_fingerprint: Sha256 | None = None
    """The same over the files before the cursor's: those hold still even where that one was mended meanwhile."""
    tokenizer_sha256: Sha256 | None = None
    """Vocabulary the source's last shard and ``leftover_tokens`` were written with."""
    rows_skipped: Count = 0
    """Rows that were null, not a string, not valid Unicode, or empty."""
    text_bytes: Count = 0
    """UTF-8 bytes of the documents processed; of imported ids, their bytes in the files."""
    ended: bool = False
    """The source was read to its end; what follows says what fills no shard and stays behind the cursor."""
    unsharded_tokens: Count = 0
    unsharded_documents: Count = 0
    encoder: str | None = None
    """What encoded the source's last documents, in a store whose vocabulary was made elsewhere; the ids do not depend
    on it."""


class InputRead(Part):
    """How far a source's input was turned into shards, in its stored (compressed) bytes.

    For telling people, nothing else: it may differ between two stores of the same text, one of which was populated in
    several runs. Where reading goes on is for the cursor to say.
    """

    read_bytes: Count
    """Before the end of the last shard, within some MB."""
    total_bytes: Count
    """Of all input files."""


class Writer(Part):
    """The lease: who may write to the store."""

    id: str
    """``{host}:{pid}:…``: the process, distinct from every other."""
    token: Count
    """Fencing token: raised by one each time the lease changes hands."""
    expires_at: Time | None = None
    """When the lease goes stale unless renewed; None once it has been given back."""
    source: SourceName | None = None
    """What the writer is populating."""
    tokens_per_s: float | None = None
    """Mean speed of the writer's run so far, counted in committed shards, for ``genesis status``."""
    input_read: dict[SourceName, InputRead] | None = None
    """By source; kept when the lease is given back. None in stores that no release with this field has written to."""


class Checkpoints(Document):
    """``checkpoints.json``; of format 2 if the manifest is."""

    FILE: ClassVar[str] = "checkpoints.json"
    FORMATS: ClassVar[tuple[int, ...]] = (1, FROZEN_FORMAT)

    sources: dict[SourceName, SourceCheckpoint] = Field(default_factory=dict)
    writer: Writer | None = None
    manifest: Manifest | None = None

    @classmethod
    def from_object(cls, value: dict[str, Any], *, name: str | None = None) -> Self:
        """Gathers the top-level source objects under ``sources``."""
        sources = {key: entry for key, entry in value.items() if key not in _RESERVED}
        rest = {key: entry for key, entry in value.items() if key in _RESERVED}
        return super().from_object({**rest, "sources": sources}, name=name)

    def to_object(self) -> dict[str, Any]:
        """The file's layout: sources at the top level.

        Raises:
            InvalidDocumentError: a source is named like one of the other top-level fields.
        """
        value = super().to_object()
        sources = value.pop("sources")
        taken = [name for name in sources if name in _RESERVED]
        if taken:
            raise InvalidDocumentError(f"a source may not be called {taken[0]!r}; rename it in sources.json")
        return {**value, **sources}
