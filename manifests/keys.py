"""Names of the objects in a store (format page, "Layout").

A key is relative to the store's root, with forward slashes, never absolute and never climbing out of it.
"""

from __future__ import annotations

import re

from manifests.errors import InvalidDocumentError

MANIFEST_KEY = "manifest.json"
CHECKPOINTS_KEY = "checkpoints.json"
TOKENIZER_KEY = "tokenizer.json"

SHARD_TOKENS = 2_500_000
"""Token ids in a shard (spec G-11)."""
SEGMENT_SHARDS = 1_000
"""Shards whose facts share an index segment: shard i is number ``i % 1,000`` of segment ``i // 1,000``."""

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._\-]*(/[A-Za-z0-9_][A-Za-z0-9._\-]*)*")
_MAX_KEY_CHARS = 512


def shard_key(shard_id: int) -> str:
    """``shard_{id}.pt``, the token ids themselves."""
    return f"shard_{shard_id}.pt"


def packed_key(shard_id: int) -> str:
    """``packed/shard_{id}.zst``, the same ids in the transfer form."""
    return f"packed/shard_{shard_id}.zst"


def segment_key(number: int, sha256: str) -> str:
    """``index/segment_{n:05d}-{sha256[:16]}.json``; the digest in the name makes the object immutable."""
    return f"index/segment_{number:05d}-{sha256[:16]}.json"


def vocabulary_key(sha256: str) -> str:
    """``vocabulary/{sha256[:16]}.json``, one of the vocabularies that shards were written with."""
    return f"vocabulary/{sha256[:16]}.json"


def check_key(key: str) -> str:
    """Returns ``key`` if it stays inside a store.

    Raises:
        InvalidDocumentError: it is absolute, climbs with ``..``, is over 512 characters, or holds a character
            outside ``A-Z a-z 0-9 . _ - /``.
    """
    if len(key) > _MAX_KEY_CHARS or not _KEY.fullmatch(key):
        shown = key if len(key) <= 80 else key[:80] + "…"
        raise InvalidDocumentError(
            f"expected an object key such as 'index/segment_00000-0123456789abcdef.json', found {shown!r}"
        )
    return key
