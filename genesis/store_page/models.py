"""The JSON of the store's page: what its routes answer and what a report holds (docs/store-page.md).

Lists are cut to a length that a page can show; a count beside them says how many there are. Texts of strangers come as
they are: `dom.js` shows them harmlessly. Bytes that are no UTF-8 by themselves come as hexadecimal digits.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from genesis.status import SourceStatus, StoreTotals, VocabularyStatus

OVERVIEW_FORMAT = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class WriterState(_Part):
    """The lease, without what names the machine that holds it."""

    state: Literal["alive", "stale", "released"]
    source: str | None
    expires_at: str | None
    tokens_per_s: float | None


class SeenCommit(_Part):
    """A commit that was published while this process looked."""

    sequence: int
    seen_at: str
    total_shards: int
    total_tokens: int


class VocabularyStep(_Part):
    """The first shard that was written with a vocabulary of so many ids."""

    ids: int
    first_shard: int
    source: str


class VerifiedRecord(_Part):
    """A result of ``genesis verify`` that was given to this process."""

    finished_at: str | None
    sequence: int
    ok: bool
    shards_verified: int
    num_problems: int
    problems: tuple[str, ...]
    """The first 20."""


class IndexState(_Part):
    """How much of the index was read, and what was checked of the shards that it names."""

    indexed_shards: int
    """The others are known by number alone."""
    packed_shards: int
    """Of those indexed, shards that have the transfer form too."""
    verified_shards: int
    """Of those indexed, shards whose every byte was held against the index: by ``genesis verify``, or here when one of
    their documents was read."""
    verified_here: int
    damaged_shards: int
    problem: str | None
    """Why the index cannot be read on."""


class StoreOverview(_Part):
    """``/api/store``: a store at one moment."""

    format: int = OVERVIEW_FORMAT
    state: Literal["ready", "empty", "damaged", "unreadable"]
    problem: str | None
    """In one line, what keeps it from being ready."""
    name: str
    read_at: str
    sequence: int = 0
    published_sequence: int | None = None
    created_at: str | None = None
    updated_at: str | None = None
    signed_by: str | None = None
    """Key id in the manifest's signature, which is not checked here."""
    shard_tokens: int | None = None
    totals: StoreTotals | None = None
    sources: tuple[SourceStatus, ...] = ()
    num_sources: int = 0
    pending: tuple[str, ...] = ()
    writer: WriterState | None = None
    vocabulary: VocabularyStatus | None = None
    vocabulary_steps: tuple[VocabularyStep, ...] = ()
    index: IndexState | None = None
    verified: VerifiedRecord | None = None
    commits: tuple[SeenCommit, ...] = ()
    """The newest first."""
    notes: tuple[str, ...] = ()


class GridCell(_Part):
    """Some shards that follow each other."""

    first_shard: int
    num_shards: int
    by_source: tuple[int, ...]
    """How many are of each of the grid's sources; the rest is not indexed yet."""
    packed: int
    verified: int
    damaged: int


class ShardGrid(_Part):
    """``/api/shards``: a range of shards in at most so many cells."""

    total_shards: int
    first_shard: int
    num_shards: int
    cell_shards: int
    sources: tuple[str, ...]
    """Those with the most shards, and last ``other sources`` if there are more."""
    indexed_shards: int
    """Within the range."""
    cells: tuple[GridCell, ...]


class ShardFacts(_Part):
    """``/api/shard``: what the index says of one shard, and what was checked."""

    id: int
    source: str
    tokens: int
    size_bytes: int
    sha256: str
    packed_bytes: int | None
    first_document: int
    last_document: int
    vocabulary_ids: int
    segment: str
    check: Literal["not checked", "verified", "damaged"]
    previous_shard: int | None
    """Of the same source; None where there is none, or the index is not read so far."""
    next_shard: int | None


class Piece(_Part):
    """What one id spells."""

    id: int
    text: str | None = None
    """None: the bytes are no UTF-8 by themselves."""
    hex: str | None = None
    special: str | None = None
    """The name of an id that spells nothing: the end of a document, an id that the vocabulary lacks."""
    num_bytes: int | None = None
    """Where only the beginning is given."""


class DocumentPage(_Part):
    """``/api/document``: some ids of one document of one shard."""

    shard: int
    source: str
    document: int
    """Among the documents of the shard, from 0."""
    num_documents: int
    """That the shard holds something of."""
    ordinal: int
    """Among the documents of the source, from 0."""
    begins_before: bool | None
    """It began in an earlier shard of the source; None: the index is not read so far."""
    continues_after: bool
    num_tokens: int
    """Of its ids in this shard, the one that ends it included."""
    first_token: int
    pieces: tuple[Piece, ...]
    next_token: int | None
    """Where the next page begins; None at the end."""
    vocabulary_ids: int
    """Of the vocabulary that the shard was written with."""
    previous_shard: int | None
    next_shard: int | None


class TokenFacts(_Part):
    """One id of the vocabulary."""

    piece: Piece
    num_bytes: int
    parents: tuple[Piece, ...] = ()
    """The two that are merged into it."""
    used_in: tuple[Piece, ...] = ()
    """The first merges that it is part of."""
    num_used_in: int = 0


class VocabularySearch(_Part):
    """``/api/vocabulary``: an id, or the ids whose bytes hold a text, and how the text is encoded."""

    ids: int
    eos_id: int
    token: TokenFacts | None = None
    """The id asked for, or the one that spells exactly the text."""
    encoded: tuple[Piece, ...] = ()
    matches: tuple[Piece, ...] = ()
    num_matches: int = 0
    is_complete: bool = True
    """False: there are more matches than were counted."""
    longest: tuple[Piece, ...] = ()
    """Where nothing was asked for."""
    mean_token_bytes: float | None = None
