"""Which paths name an object of a store that the world may read (format page, "Layout").

A list of what is let through, not of what is kept out: ``checkpoints.json`` (it holds the writer's lease token), lock
and temporary files, half-copied files and anything else that lies in the folder match none of the names below. A path
is unescaped once and then has to match whole, so there is no way out of the store that would have to be recognised.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote_to_bytes

from genesis.store.base import CachePolicy
from manifests import MANIFEST_KEY, TOKENIZER_KEY, InvalidDocumentError, check_key

_MAX_PATH_BYTES = 2_048
"""A key of 512 characters, every one of them escaped, and some."""


class ObjectKind(StrEnum):
    """What an object is; the label it is counted under."""

    MANIFEST = "manifest"
    TOKENIZER = "tokenizer"
    SHARD = "shard"
    PACKED = "packed"
    SEGMENT = "segment"
    VOCABULARY = "vocabulary"
    EXPORT = "export"


_NUMBER = r"(?:0|[1-9][0-9]{0,14})"
_NAMES = {
    ObjectKind.MANIFEST: re.escape(MANIFEST_KEY),
    ObjectKind.TOKENIZER: re.escape(TOKENIZER_KEY),
    ObjectKind.SHARD: rf"shard_{_NUMBER}\.pt",
    ObjectKind.PACKED: rf"packed/shard_{_NUMBER}\.zst",
    ObjectKind.SEGMENT: r"index/segment_[0-9]{5,12}-[0-9a-f]{16}\.json",
    ObjectKind.VOCABULARY: r"vocabulary/[0-9a-f]{16}\.json",
    ObjectKind.EXPORT: r"(?:hf|tiktoken)/[A-Za-z0-9_][A-Za-z0-9_\-]*\.(?:json|tiktoken)",
}
_PUBLIC = re.compile("|".join(f"(?P<{kind}>{name})" for kind, name in _NAMES.items()))
_OVERWRITTEN = frozenset({ObjectKind.MANIFEST, ObjectKind.TOKENIZER, ObjectKind.EXPORT})
_ABSOLUTE_FORM = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PublicObject:
    """An object that may be served, whether or not it is there."""

    key: str
    kind: ObjectKind

    @property
    def cache(self) -> CachePolicy:
        """How long caches may keep it."""
        return CachePolicy.SHORT if self.kind in _OVERWRITTEN else CachePolicy.IMMUTABLE

    @property
    def media_type(self) -> str:
        """Its ``Content-Type``."""
        return "application/json" if self.key.endswith(".json") else "application/octet-stream"


def public_object(raw_path: bytes) -> PublicObject | None:
    """The object that a request's path names; None if that is none of a store's.

    Args:
        raw_path: the path as it came, still escaped, without the query; an absolute URL (which RFC 9112 has servers
            accept) counts by its path.
    """
    absolute = _ABSOLUTE_FORM.match(raw_path)
    path = raw_path[absolute.end() :] if absolute else raw_path
    if len(path) > _MAX_PATH_BYTES or not path.startswith(b"/"):
        return None
    try:
        key = check_key(unquote_to_bytes(path[1:]).decode("ascii"))
    except (UnicodeDecodeError, InvalidDocumentError):
        return None
    found = _PUBLIC.fullmatch(key)
    return PublicObject(key, ObjectKind(str(found.lastgroup))) if found else None
