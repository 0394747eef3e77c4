"""Hypothesis strategies for every model of the contracts, each of them valid."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import strategies as st

from manifests import (
    FIRST_MERGE_ID,
    FROZEN_FORMAT,
    FROZEN_TOKENIZER_VERSION,
    SEGMENT_SHARDS,
    Checkpoints,
    Cursor,
    FrozenVocabularyFile,
    Manifest,
    PackedEntry,
    PartialDocument,
    Segment,
    SegmentRef,
    ShardEntry,
    SourceCheckpoint,
    SourcesFile,
    SourceSpec,
    SourceTotals,
    SpecialToken,
    TokenizerRef,
    VocabularyFile,
    Writer,
    format_time,
    segment_key,
    sha256_hex,
)

COUNTS = st.integers(0, 2**53 - 1)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
NAMES = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,20}\Z").filter(
    lambda name: name not in ("format", "writer", "manifest")
)
KEYS = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,20}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,20}){0,3}\Z")
TIMES = st.datetimes(datetime(2000, 1, 1), datetime(2099, 1, 1)).map(lambda time: format_time(time.replace(tzinfo=UTC)))
TOKEN_IDS = st.integers(0, 2**32 - 1)
TEXTS = st.text(max_size=20)

CURSORS = st.builds(Cursor, repo=TEXTS, revision=TEXTS, file=TEXTS, row_group=COUNTS, row=COUNTS)
PARTIAL_DOCUMENTS = st.builds(
    lambda in_shards, left, digest: PartialDocument(
        tokens_in_shards=in_shards, tokens=in_shards + left, tokenizer_sha256=digest
    ),
    st.integers(1, 2**40),
    st.integers(1, 2**40),
    st.none() | DIGESTS,
)
TAILS = st.fixed_dictionaries(
    {"leftover_tokens": st.lists(TOKEN_IDS, max_size=8).map(tuple), "cursor": st.none() | CURSORS}
) | st.fixed_dictionaries({"leftover_tokens": st.just(()), "cursor": CURSORS, "partial_document": PARTIAL_DOCUMENTS})
"""What is left over of the document that crosses the last shard's end: written out, or where it begins."""
POSITIONS = st.builds(
    lambda tail, **fields: SourceCheckpoint(**tail, **fields),
    TAILS,
    documents_processed=COUNTS,
    last_shard_id=st.integers(-1, 2**40),
    timestamp=TIMES,
    input_fingerprint=st.none() | DIGESTS,
    tokenizer_sha256=st.none() | DIGESTS,
    rows_skipped=COUNTS,
    text_bytes=COUNTS,
    ended=st.booleans(),
    unsharded_tokens=COUNTS,
    unsharded_documents=COUNTS,
)
WRITERS = st.builds(
    Writer,
    id=TEXTS,
    token=COUNTS,
    expires_at=st.none() | TIMES,
    source=st.none() | NAMES,
    tokens_per_s=st.none() | st.floats(0, 1e12),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests whose sums add up, with an index of up to three segments."""
    shard_tokens = draw(st.integers(1, 3_000_000))
    per_source = draw(st.dictionaries(NAMES, st.integers(0, SEGMENT_SHARDS), max_size=3))
    total = sum(per_source.values())
    sources = {
        name: SourceTotals(
            shards=shards,
            tokens=shards * shard_tokens,
            documents_processed=draw(COUNTS),
            last_shard_id=draw(st.integers(-1, 2**40)),
        )
        for name, shards in per_source.items()
    }
    return Manifest(
        sequence=draw(COUNTS),
        previous=draw(st.none() | DIGESTS),
        total_shards=total,
        total_tokens=total * shard_tokens,
        total_size_bytes=draw(COUNTS),
        tokenizer=draw(st.none() | st.builds(TokenizerRef, key=KEYS, sha256=DIGESTS, next_merge_id=TOKEN_IDS)),
        sources=sources,
        shard_tokens=shard_tokens,
        index=tuple(
            _segment_ref(number, min(SEGMENT_SHARDS, total - number * SEGMENT_SHARDS), draw(DIGESTS))
            for number in range(-(-total // SEGMENT_SHARDS))
        ),
        created_at=draw(TIMES),
        updated_at=draw(TIMES),
    )


@st.composite
def frozen_manifests(draw: st.DrawFn) -> Manifest:
    """Of stores whose vocabulary was made elsewhere."""
    own = draw(manifests())
    ids = draw(st.integers(FIRST_MERGE_ID, 2**32 - 1))
    tokenizer = TokenizerRef(
        key=draw(KEYS), sha256=draw(DIGESTS), next_merge_id=ids, eos_id=draw(st.integers(0, ids - 1))
    )
    changes = {"format": FROZEN_FORMAT, "tokenizer_version": FROZEN_TOKENIZER_VERSION, "tokenizer": tokenizer}
    return own.model_copy(update=changes)


@st.composite
def frozen_vocabularies(draw: st.DrawFn) -> FrozenVocabularyFile:
    text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
    ids = draw(st.integers(FIRST_MERGE_ID, 10_000))
    special = st.builds(SpecialToken, id=st.integers(0, ids - 1), token=st.text(min_size=1, max_size=10))
    return FrozenVocabularyFile(
        origin=draw(st.sampled_from(["tokenizer.json", "tiktoken:gpt2"])),
        next_merge_id=ids,
        eos=draw(special),
        bos=draw(st.none() | special),
        pad=draw(st.none() | special),
        tokenizer_json=text,
        tokenizer_sha256=sha256_hex(text.encode()),
    )


def _segment_ref(number: int, shards: int, digest: str) -> SegmentRef:
    key = segment_key(number, digest)
    return SegmentRef(key=key, sha256=digest, first_shard=number * SEGMENT_SHARDS, shards=shards)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    first = draw(st.integers(0, 600)) * SEGMENT_SHARDS
    return Segment(shards=tuple(draw(_entries(first + number)) for number in range(draw(st.integers(1, 5)))))


@st.composite
def _entries(draw: st.DrawFn, shard_id: int) -> ShardEntry:
    first, last = sorted((draw(COUNTS), draw(COUNTS)))
    return ShardEntry(
        id=shard_id,
        sha256=draw(DIGESTS),
        size_bytes=draw(COUNTS),
        tokens=draw(st.integers(1, 2**28 - 1)),
        source=draw(NAMES),
        first_document=first,
        last_document=last,
        next_merge_id=draw(TOKEN_IDS),
        packed=draw(st.none() | st.builds(PackedEntry, key=KEYS, sha256=DIGESTS, size_bytes=COUNTS)),
    )


@st.composite
def merges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Merges that refer to bytes and to earlier merges, none twice."""
    pairs: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 30))):
        side = st.integers(10, FIRST_MERGE_ID + len(pairs) - 1)
        pairs.append(draw(st.tuples(side, side).filter(lambda pair: pair not in pairs)))
    return pairs


@st.composite
def vocabularies(draw: st.DrawFn) -> VocabularyFile:
    return VocabularyFile.from_pairs(draw(merges()), draw(st.dictionaries(NAMES, COUNTS, max_size=3)))


SPECS = st.builds(
    SourceSpec,
    name=NAMES,
    hf_path=st.just("owner/name"),
    hf_name=st.none() | TEXTS,
    text_field=st.text(min_size=1, max_size=9),
    target_shards=COUNTS,
    priority=COUNTS,
    enabled=st.booleans(),
    revision=TEXTS,
    data_files=st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3).map(tuple),
    merges=st.integers(0, 7_000),
)
SOURCES = st.lists(SPECS, max_size=4, unique_by=lambda spec: spec.name).map(lambda specs: SourcesFile(sources=specs))
CHECKPOINTS = st.builds(
    Checkpoints,
    sources=st.dictionaries(NAMES, POSITIONS, max_size=3),
    writer=st.none() | WRITERS,
    manifest=st.none() | manifests(),
)
