"""``checkpoints.json``: what the populator resumes from; replacing it (compare-and-swap) *is* the commit.

Top level (spec G-18): one object per source, under the source's name. Beside them ``format``, ``writer`` (who may
write: a lease with a fencing token) and ``manifest`` (the unsigned manifest this checkpoint stands for, so that a
populator killed before publishing can publish at its next start).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from manifests.documents import Document, Part
from manifests.errors import InvalidDocumentError
from manifests.fields import Count, Sha256, SourceName, Time, TokenId
from manifests.manifest import FROZEN_FORMAT, Manifest

MAX_LEFTOVER_TOKENS: Final = 16_384
"""The longest tail that is written out, some 0.1 MB of JSON; a longer one is a `PartialDocument`."""

_RESERVED = ("format", "writer", "manifest")
_FORMAT_WITH_PARTIAL: Final = 2


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


class PartialDocument(Part):
    """The one document that crosses the end of the last shard, where its rest is too long to be written out.

    Its rest is had by encoding it again, with the same vocabulary, and leaving out what shards hold.
    """

    version: Literal[1] = 1
    tokens_in_shards: Annotated[int, Field(strict=True, ge=1)]
    """Its first ids, which shards hold."""
    tokens: Count
    """All of its ids, its EOS included: another number at the next start means another document."""
    tokenizer_sha256: Sha256 | None = None
    """Vocabulary it is encoded with, where that is an earlier one than the checkpoint's."""

    @model_validator(mode="after")
    def _has_a_rest(self) -> Self:
        if self.tokens_in_shards >= self.tokens:
            raise ValueError(f"expected fewer tokens_in_shards than its {self.tokens} tokens")
        return self

    @property
    def tokens_left(self) -> int:
        """Its ids that no shard holds."""
        return self.tokens - self.tokens_in_shards


class SourceCheckpoint(Part):
    """How far one source has been turned into shards."""

    documents_processed: Count
    """Documents whose every id is in a shard or in what is left over of the last of them."""
    last_shard_id: int = Field(ge=-1)
    leftover_tokens: tuple[TokenId, ...]
    """Tail of the one document that crosses the end of the last shard; the next shard begins with it."""
    partial_document: PartialDocument | None = None
    """Instead of a tail of over `MAX_LEFTOVER_TOKENS`. The cursor then stands at that document, not behind it."""
    timestamp: Time
    cursor: Cursor | None = None
    input_fingerprint: Sha256 | None = None
    """Digest over the input files up to the cursor's; files after it may be added, these may not change."""
    earlier_fingerprint: Sha256 | None = None
    """The same over the files before the cursor's: those hold still even where that one was mended meanwhile."""
    tokenizer_sha256: Sha256 | None = None
    """Vocabulary the source's last shard and its ``leftover_tokens`` or ``partial_document`` were written with."""
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

    @model_validator(mode="after")
    def _one_tail(self) -> Self:
        if self.partial_document is not None and (self.cursor is None or self.leftover_tokens):
            raise ValueError("expected partial_document with a cursor and without leftover_tokens")
        return self

    @property
    def tokens_left_over(self) -> int:
        """Ids of the document that crosses the end of the last shard, written out or not."""
        return self.partial_document.tokens_left if self.partial_document else len(self.leftover_tokens)


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
    """``checkpoints.json``.

    Its format is 1; it is 2 if the manifest's is, and while a source stands inside a document: a release that knows no
    ``partial_document`` would write the beginning of that document twice, and so must refuse the file.
    """

    FILE: ClassVar[str] = "checkpoints.json"
    FORMATS: ClassVar[tuple[int, ...]] = (1, FROZEN_FORMAT)

    sources: dict[SourceName, SourceCheckpoint] = Field(default_factory=dict)
    writer: Writer | None = None
    manifest: Manifest | None = None

    @classmethod
    def from_object(cls, value: dict[str, Any], *, name: str | None = None) -> Self:
        """Gathers the top-level source objects under ``sources``."""
        manifest = value.get("manifest")
        is_frozen = isinstance(manifest, dict) and manifest.get("format") == FROZEN_FORMAT
        if value.get("format") == _FORMAT_WITH_PARTIAL and not is_frozen:
            value = {**value, "format": cls.FORMAT}
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
        if any(source.partial_document for source in self.sources.values()):
            value["format"] = _FORMAT_WITH_PARTIAL
        return {**value, **sources}
