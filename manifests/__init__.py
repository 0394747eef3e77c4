"""The contracts: a typed model of every file that crosses a border between the parts, and its one spelling.

README.md beside this file is the format page. Guarantees: what was written is read back equal; the same value gives
the same bytes; whatever breaks a contract raises a `ContractError` that says what was expected and found. Nothing
here opens a network connection or unpickles anything.
"""

from __future__ import annotations

from manifests.checkpoint import Checkpoints, Cursor, SourceCheckpoint, Writer
from manifests.documents import canonical_json, format_time, parse_time, sha256_hex
from manifests.errors import (
    ContractError,
    InvalidDocumentError,
    ShardFormatError,
    SignatureError,
    UnsupportedFormatError,
)
from manifests.fields import SHARD_TOKENS
from manifests.keys import (
    CHECKPOINTS_KEY,
    MANIFEST_KEY,
    TOKENIZER_KEY,
    check_key,
    packed_key,
    segment_key,
    shard_key,
    vocabulary_key,
)
from manifests.manifest import Manifest, SegmentRef, Signature, SourceTotals, TokenizerRef
from manifests.packed_file import max_packed_bytes, pack_ids, packed_dtype, unpack_ids
from manifests.segment import SEGMENT_SHARDS, PackedEntry, Segment, ShardEntry
from manifests.shard_file import (
    SHARD_DATA_OFFSET,
    ShardImage,
    decode_shard,
    encode_shard,
    shard_file_bytes,
    view_shard,
)
from manifests.signing import (
    generate_private_key,
    key_id,
    load_private_key,
    load_public_key,
    private_key_pem,
    public_key_pem,
    sign_manifest,
    verify_manifest,
)
from manifests.sources import TOTAL_MERGES, SourcesFile, SourceSpec, builtin_sources
from manifests.vocabulary import BYTE_OFFSET, FIRST_MERGE_ID, MAX_VOCABULARY, PATTERN, SPECIAL_TOKENS, VocabularyFile

__all__ = [
    "BYTE_OFFSET",
    "CHECKPOINTS_KEY",
    "FIRST_MERGE_ID",
    "MANIFEST_KEY",
    "MAX_VOCABULARY",
    "PATTERN",
    "SEGMENT_SHARDS",
    "SHARD_DATA_OFFSET",
    "SHARD_TOKENS",
    "SPECIAL_TOKENS",
    "TOKENIZER_KEY",
    "TOTAL_MERGES",
    "Checkpoints",
    "ContractError",
    "Cursor",
    "InvalidDocumentError",
    "Manifest",
    "PackedEntry",
    "Segment",
    "SegmentRef",
    "ShardEntry",
    "ShardFormatError",
    "ShardImage",
    "Signature",
    "SignatureError",
    "SourceCheckpoint",
    "SourceSpec",
    "SourceTotals",
    "SourcesFile",
    "TokenizerRef",
    "UnsupportedFormatError",
    "VocabularyFile",
    "Writer",
    "builtin_sources",
    "canonical_json",
    "check_key",
    "decode_shard",
    "encode_shard",
    "format_time",
    "generate_private_key",
    "key_id",
    "load_private_key",
    "load_public_key",
    "max_packed_bytes",
    "pack_ids",
    "packed_dtype",
    "packed_key",
    "parse_time",
    "private_key_pem",
    "public_key_pem",
    "segment_key",
    "sha256_hex",
    "shard_file_bytes",
    "shard_key",
    "sign_manifest",
    "unpack_ids",
    "verify_manifest",
    "view_shard",
    "vocabulary_key",
]
