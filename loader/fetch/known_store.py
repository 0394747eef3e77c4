"""What this machine remembers of a store, in a folder beside the cached shards: its trusted manifest and index.

Everything was checked before it was written, and is compared with its digest when it is read, so a damaged file counts
as missing. Nothing here is required: a folder that cannot be written only costs the next start some requests.

The models of `manifests` check a file when it comes; from then on it is read back into plain values without them, so a
start on known shards does not import pydantic, 0.1 s of 1.1.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from manifests import EOS_ID, MANIFEST_KEY, SHARD_TOKENS, sha256_hex

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
"""Version of the files and of the checks they passed; another version is another folder."""


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object that is vouched for."""

    key: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """A shard, as its index entry has it (`manifests.ShardEntry`)."""

    id: int
    sha256: str
    size_bytes: int
    tokens: int
    source: str
    next_merge_id: int
    packed: ObjectFacts | None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> ShardFacts:
        """Reads an entry that was checked before."""
        packed = entry.get("packed")
        return cls(
            id=entry["id"],
            sha256=entry["sha256"],
            size_bytes=entry["size_bytes"],
            tokens=entry["tokens"],
            source=entry["source"],
            next_merge_id=entry["next_merge_id"],
            packed=ObjectFacts(packed["key"], packed["sha256"], packed["size_bytes"]) if packed else None,
        )


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A segment of the index (`manifests.SegmentRef`)."""

    key: str
    sha256: str


@dataclass(frozen=True, slots=True)
class VocabularyFacts:
    """The newest vocabulary (`manifests.TokenizerRef`)."""

    key: str
    sha256: str
    next_merge_id: int
    eos_id: int | None = None
    """Of a vocabulary made elsewhere; None of our own."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """A store, as its manifest has it (`manifests.Manifest`)."""

    sequence: int
    previous: str | None
    is_signed: bool
    total_shards: int
    shard_tokens: int
    updated_at: str
    sources: Mapping[str, int]
    """Shards by source."""
    index: tuple[LinkFacts, ...]
    tokenizer: VocabularyFacts | None

    @property
    def is_frozen(self) -> bool:
        """Whether the vocabulary was made elsewhere, so that ids below 10 are tokens like others."""
        return self.tokenizer is not None and self.tokenizer.eos_id is not None

    @property
    def eos_id(self) -> int:
        """The id that ends every document."""
        own = self.tokenizer.eos_id if self.tokenizer else None
        return EOS_ID if own is None else own

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> StoreFacts:
        """Reads a manifest that was checked before; a field it may lack has the model's default."""
        vocabulary = manifest.get("tokenizer")
        return cls(
            sequence=manifest.get("sequence", 0),
            previous=manifest.get("previous"),
            is_signed=manifest.get("signature") is not None,
            total_shards=manifest["total_shards"],
            shard_tokens=manifest.get("shard_tokens", SHARD_TOKENS),
            updated_at=manifest["updated_at"],
            sources={name: totals["shards"] for name, totals in manifest["sources"].items()},
            index=tuple(LinkFacts(reference["key"], reference["sha256"]) for reference in manifest.get("index", ())),
            tokenizer=VocabularyFacts(
                vocabulary["key"], vocabulary["sha256"], vocabulary["next_merge_id"], vocabulary.get("eos_id")
            )
            if vocabulary
            else None,
        )


@dataclass(frozen=True, slots=True)
class KnownStore:
    """The folder that remembers one store."""

    folder: Path

    @classmethod
    def of(cls, cache_dir: Path, address: str) -> KnownStore:
        """The folder of the store at ``address``."""
        return cls(cache_dir / "stores" / f"{sha256_hex(address.encode())[:16]}-v{_FORMAT}")

    @classmethod
    def all(cls, cache_dir: Path) -> list[KnownStore]:
        """All stores that are remembered beside a cache."""
        with suppress(OSError):
            return [cls(folder) for folder in sorted((cache_dir / "stores").iterdir()) if folder.is_dir()]
        return []

    def index_bytes(self) -> int:
        """Size of the store's index, without the manifest, which guards against older ones."""
        with suppress(OSError):
            return sum(path.stat().st_size for path in self.folder.iterdir() if path.name != MANIFEST_KEY)
        return 0

    def read(self, name: str) -> bytes | None:
        """Reads a file; None if it is missing or unreadable."""
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, body: bytes) -> None:
        """Writes a file atomically, if it can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
        except OSError as error:
            logger.debug("%s: %s", self.folder, error)
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
            Path(temporary).replace(self.folder / name)
        except OSError as error:
            logger.debug("%s: %s", self.folder / name, error)
            with suppress(OSError):
                Path(temporary).unlink()

    def keep_only(self, names: frozenset[str]) -> None:
        """Removes all files of other names."""
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path.name not in names and not path.name.startswith("."):
                    path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class TrustedManifest:
    """A manifest whose form, signature and limits were checked."""

    body: bytes
    """The file, unchanged."""
    facts: StoreFacts

    @classmethod
    def of(cls, body: bytes) -> TrustedManifest:
        """Parses a file that was checked before."""
        return cls(body, StoreFacts.of(json.loads(body)))


@dataclass(frozen=True, slots=True)
class RememberedManifest:
    """A trusted manifest, and when and how it was verified."""

    manifest: TrustedManifest
    checked_at: float
    """Unix time at which a store last vouched for it."""
    etags: dict[str, str]
    """For each mirror the ETag under which it gave this body."""
    public_key: str | None
    """sha256 of the file of the key that verified the signature; None for no key."""


class ManifestMemory:
    """Remembers the manifest trusted last, so that a restart cannot be shown an older one.

    It is kept under every address of the store, and the newest is recalled, so the order and choice of mirrors do not
    matter. A newer one that another process has written is not overwritten. A manifest that would not be trusted now,
    such as one from before a key was pinned, counts as missing. If a folder cannot be written, the memory ends with
    the process.

    Args:
        folders: one for each of the store's addresses.
    """

    def __init__(self, folders: Sequence[KnownStore]) -> None:
        self._folders = tuple(folders)

    @property
    def folders(self) -> str:
        """The folders, for messages."""
        return ", ".join(str(each.folder) for each in self._folders)

    def recall(self, is_trusted: Callable[[RememberedManifest], bool]) -> RememberedManifest | None:
        """The newest manifest that was remembered and would be trusted now; None if there is none."""
        found = [seen for folder in self._folders if (seen := _read(folder)) is not None and is_trusted(seen)]
        return max(found, key=lambda seen: (seen.manifest.facts.sequence, seen.checked_at), default=None)

    def remember(self, seen: RememberedManifest, is_trusted: Callable[[RememberedManifest], bool]) -> None:
        """Remembers a manifest, and removes the index files that it does not name."""
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
            if present is None or present.manifest.facts.sequence <= facts.sequence or not is_trusted(present):
                folder.write(MANIFEST_KEY, json.dumps(notes).encode() + b"\n" + body)
                folder.keep_only(kept)


def known_name(key: str) -> str:
    """The file name of an object in a `KnownStore`."""
    return key.replace("/", "-")


def _read(folder: KnownStore) -> RememberedManifest | None:
    data = folder.read(MANIFEST_KEY)
    if data is None:
        return None
    head, _, body = data.partition(b"\n")
    try:
        notes: dict[str, Any] = json.loads(head)
        if notes["sha256"] != sha256_hex(body):
            raise ValueError("another digest")
        return RememberedManifest(
            TrustedManifest.of(body), float(notes["checked_at"]), dict(notes["etags"]), notes["public_key"]
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s is damaged (%s): forgetting which manifest was seen last", folder.folder, error)
        return None
