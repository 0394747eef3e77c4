"""The manifest that was believed last, kept on this machine so that a restart cannot be shown an older one.

It is kept under every address the store was given, and the newest of them is what is recalled: a mirror named first, or
left out, changes nothing. A newer one that another process has put there meanwhile is not overwritten. What would not
be believed now, such as one from before a key was pinned, counts as not there: it neither hides an older one that would
be, nor is it kept. In a folder that cannot be written the memory ends with the process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loader.fetch.facts import StoreFacts
from loader.fetch.known_store import KnownStore
from manifests import MANIFEST_KEY, sha256_hex

__all__ = ["BelievedManifest", "ManifestMemory", "SeenManifest", "known_name"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BelievedManifest:
    """A manifest that may be believed."""

    body: bytes
    """The file, as it came."""
    facts: StoreFacts

    @classmethod
    def of(cls, body: bytes) -> BelievedManifest:
        """Reads a file that was checked before."""
        return cls(body, StoreFacts.of(json.loads(body)))


@dataclass(frozen=True, slots=True)
class SeenManifest:
    """A manifest, and where and when it was seen."""

    manifest: BelievedManifest
    checked_at: float
    """Unix time at which a store last vouched for it."""
    etags: dict[str, str]
    """By mirror, the ETag under which it gave this very body."""
    public_key: str | None
    """sha256 of the file of the key that it was held against; None for no key."""


class ManifestMemory:
    """Remembers the manifest of one store.

    Args:
        folders: one for each of the store's addresses.
    """

    def __init__(self, folders: Sequence[KnownStore]) -> None:
        self._folders = tuple(folders)

    @property
    def folders(self) -> str:
        """Where it is remembered, for messages."""
        return ", ".join(str(each.folder) for each in self._folders)

    def recall(self, is_believable: Callable[[SeenManifest], bool]) -> SeenManifest | None:
        """The newest manifest that was remembered and would be believed now; None if there is none."""
        found = [seen for folder in self._folders if (seen := _read(folder)) is not None and is_believable(seen)]
        return max(found, key=lambda seen: (seen.manifest.facts.sequence, seen.checked_at), default=None)

    def remember(self, seen: SeenManifest, is_believable: Callable[[SeenManifest], bool]) -> None:
        """Keeps a manifest, and lets go of the index files that it does not name."""
        facts, body = seen.manifest.facts, seen.manifest.body
        notes = {
            "sha256": sha256_hex(body),
            "checked_at": seen.checked_at,
            "etags": seen.etags,
            "public_key": seen.public_key,
        }
        keys = [each.key for each in facts.index] + ([facts.tokenizer.key] if facts.tokenizer else [])
        kept = frozenset({MANIFEST_KEY, *map(known_name, keys)})
        for folder in self._folders:
            present = _read(folder)
            if present is None or present.manifest.facts.sequence <= facts.sequence or not is_believable(present):
                folder.write(MANIFEST_KEY, json.dumps(notes).encode() + b"\n" + body)
                folder.keep_only(kept)


def known_name(key: str) -> str:
    """What the object of a key is called among a `KnownStore`'s files."""
    return key.replace("/", "-")


def _read(folder: KnownStore) -> SeenManifest | None:
    data = folder.read(MANIFEST_KEY)
    if data is None:
        return None
    head, _, body = data.partition(b"\n")
    try:
        notes: dict[str, Any] = json.loads(head)
        if notes["sha256"] != sha256_hex(body):
            raise ValueError("another digest")
        return SeenManifest(
            BelievedManifest.of(body), float(notes["checked_at"]), dict(notes["etags"]), notes["public_key"]
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s is damaged (%s): forgetting which manifest was seen last", folder.folder, error)
        return None
