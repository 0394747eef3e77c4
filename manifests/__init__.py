"""The contracts: a typed model of every file that crosses a border between the parts, and its one spelling.

README.md beside this file is the format page. Guarantees: what was written is read back equal; the same value gives
the same bytes; whatever breaks a contract raises a `ContractError` that says what was expected and found. Nothing
here opens a network connection or unpickles anything.

A name's module is imported when the name is first used: a training node that starts on shards it has already needs no
model of a file, and so neither pydantic nor cryptography, 0.15 s of its 1.2 s.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manifests.checkpoint import Checkpoints, Cursor, SourceCheckpoint, Writer
    from manifests.errors import (
        ContractError,
        InvalidDocumentError,
        ShardFormatError,
        SignatureError,
        UnsupportedFormatError,
    )
    from manifests.ids import BYTE_OFFSET, EOS_ID, FIRST_MERGE_ID, MAX_VOCABULARY, SPECIAL_TOKENS
    from manifests.keys import (
        CHECKPOINTS_KEY,
        MANIFEST_KEY,
        SEGMENT_SHARDS,
        SHARD_TOKENS,
        TOKENIZER_KEY,
        check_key,
        packed_key,
        segment_key,
        shard_key,
        vocabulary_key,
    )
    from manifests.manifest import Manifest, SegmentRef, Signature, SourceTotals, TokenizerRef
    from manifests.packed_file import max_packed_bytes, pack_ids, packed_dtype, unpack_ids
    from manifests.segment import PackedEntry, Segment, ShardEntry
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
    from manifests.spelling import canonical_json, format_time, parse_time, sha256_hex
    from manifests.vocabulary import PATTERN, VocabularyFile

__all__ = [
    "BYTE_OFFSET",
    "CHECKPOINTS_KEY",
    "EOS_ID",
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

_NAMES_BY_MODULE = {
    "checkpoint": (
        "Checkpoints",
        "Cursor",
        "SourceCheckpoint",
        "Writer",
    ),
    "errors": (
        "ContractError",
        "InvalidDocumentError",
        "ShardFormatError",
        "SignatureError",
        "UnsupportedFormatError",
    ),
    "ids": (
        "BYTE_OFFSET",
        "EOS_ID",
        "FIRST_MERGE_ID",
        "MAX_VOCABULARY",
        "SPECIAL_TOKENS",
    ),
    "keys": (
        "CHECKPOINTS_KEY",
        "MANIFEST_KEY",
        "SEGMENT_SHARDS",
        "SHARD_TOKENS",
        "TOKENIZER_KEY",
        "check_key",
        "packed_key",
        "segment_key",
        "shard_key",
        "vocabulary_key",
    ),
    "manifest": (
        "Manifest",
        "SegmentRef",
        "Signature",
        "SourceTotals",
        "TokenizerRef",
    ),
    "packed_file": (
        "max_packed_bytes",
        "pack_ids",
        "packed_dtype",
        "unpack_ids",
    ),
    "segment": (
        "PackedEntry",
        "Segment",
        "ShardEntry",
    ),
    "shard_file": (
        "SHARD_DATA_OFFSET",
        "ShardImage",
        "decode_shard",
        "encode_shard",
        "shard_file_bytes",
        "view_shard",
    ),
    "signing": (
        "generate_private_key",
        "key_id",
        "load_private_key",
        "load_public_key",
        "private_key_pem",
        "public_key_pem",
        "sign_manifest",
        "verify_manifest",
    ),
    "sources": (
        "TOTAL_MERGES",
        "SourcesFile",
        "SourceSpec",
        "builtin_sources",
    ),
    "spelling": (
        "canonical_json",
        "format_time",
        "parse_time",
        "sha256_hex",
    ),
    "vocabulary": (
        "PATTERN",
        "VocabularyFile",
    ),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'manifests' has no attribute {name!r}")
    value = getattr(import_module(f"manifests.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
