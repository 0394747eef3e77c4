"""The store of the format page's example, made by the code it documents."""

from __future__ import annotations

import json
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manifests import (
    CHECKPOINTS_KEY,
    MANIFEST_KEY,
    TOKENIZER_KEY,
    Checkpoints,
    Cursor,
    Manifest,
    PackedEntry,
    Segment,
    SegmentRef,
    ShardEntry,
    SourceCheckpoint,
    SourceTotals,
    TokenizerRef,
    VocabularyFile,
    Writer,
    encode_shard,
    pack_ids,
    packed_key,
    segment_key,
    sha256_hex,
    shard_key,
    sign_manifest,
    vocabulary_key,
)

EXAMPLE_KEY = Ed25519PrivateKey.from_private_bytes(sha256(b"the key of the example; never use it").digest())
DOCUMENTS = ("hello hello", "oh, hello there")
MERGES = [(114, 111), (118, 118), (266, 267), (268, 121)]
"""``he``, ``ll``, ``hell``, ``hello``."""
IDS = (269, 42, 269, 2, 121, 114, 54, 42)
"""The first document, its EOS, and the second as far as the shard of eight ids goes."""
LEFTOVER = (269, 42, 126, 266, 124, 111, 2)
"""The rest of the second document, and its EOS."""

_TIME = "2026-11-20T17:32:03Z"


def example_files() -> dict[str, bytes]:
    vocabulary = VocabularyFile.from_pairs(MERGES, {"tiny": len(MERGES)})
    shard, packed = bytes(encode_shard(np.array(IDS))), pack_ids(np.array(IDS), vocabulary.next_merge_id)
    vocabulary_body = vocabulary.to_json()
    segment_body = Segment(shards=(_entry(shard, packed, vocabulary),)).to_json()
    manifest = _manifest(vocabulary_body, vocabulary, segment_body, len(shard))
    return {
        MANIFEST_KEY: sign_manifest(manifest, EXAMPLE_KEY).to_json(),
        manifest.index[0].key: segment_body,
        CHECKPOINTS_KEY: _checkpoints(manifest, vocabulary_body).to_json(),
        TOKENIZER_KEY: vocabulary_body,
        vocabulary_key(sha256_hex(vocabulary_body)): vocabulary_body,
        shard_key(0): shard,
        packed_key(0): packed,
    }


def _entry(shard: bytes, packed: bytes, vocabulary: VocabularyFile) -> ShardEntry:
    return ShardEntry(
        id=0,
        sha256=sha256_hex(shard),
        size_bytes=len(shard),
        tokens=len(IDS),
        source="tiny",
        first_document=0,
        last_document=1,
        next_merge_id=vocabulary.next_merge_id,
        packed=PackedEntry(key=packed_key(0), sha256=sha256_hex(packed), size_bytes=len(packed)),
    )


def _manifest(vocabulary_body: bytes, vocabulary: VocabularyFile, segment_body: bytes, size_bytes: int) -> Manifest:
    vocabulary_digest, segment_digest = sha256_hex(vocabulary_body), sha256_hex(segment_body)
    return Manifest(
        sequence=3,
        previous=sha256_hex(b"the manifest before"),
        total_shards=1,
        total_tokens=len(IDS),
        total_size_bytes=size_bytes,
        tokenizer=TokenizerRef(
            key=vocabulary_key(vocabulary_digest), sha256=vocabulary_digest, next_merge_id=vocabulary.next_merge_id
        ),
        sources={"tiny": SourceTotals(shards=1, tokens=len(IDS), documents_processed=2, last_shard_id=0)},
        shard_tokens=len(IDS),
        index=(SegmentRef(key=segment_key(0, segment_digest), sha256=segment_digest, first_shard=0, shards=1),),
        created_at=_TIME,
        updated_at=_TIME,
    )


def _checkpoints(manifest: Manifest, vocabulary_body: bytes) -> Checkpoints:
    position = SourceCheckpoint(
        documents_processed=2,
        last_shard_id=0,
        leftover_tokens=LEFTOVER,
        timestamp=_TIME,
        cursor=Cursor(file="tiny.jsonl", row=3),
        input_fingerprint=sha256_hex(b"name, size and digest of tiny.jsonl"),
        tokenizer_sha256=sha256_hex(vocabulary_body),
        rows_skipped=1,
        text_bytes=sum(len(text.encode()) for text in DOCUMENTS),
    )
    writer = Writer(
        id="gpu-7:4711:318372:3d73849c-4026531836",
        token=1,
        expires_at="2026-11-20T17:33:03Z",
        source="tiny",
        tokens_per_s=12_500_000.0,
    )
    return Checkpoints(sources={"tiny": position}, writer=writer, manifest=manifest)


def example_text(key: str) -> str:
    """A JSON file of the example as the page shows it: indented, keys sorted; a checkpoint's manifest is shortened."""
    value = json.loads(example_files()[key])
    if key == CHECKPOINTS_KEY:
        value["manifest"] = {"sequence": value["manifest"]["sequence"], "…": "as above, without its signature"}
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
