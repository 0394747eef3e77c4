"""Which paths name an object of a store that the world may read (format page, "Layout"), and opening its file.

A list of what is let through, not of what is kept out: ``checkpoints.json`` (it holds the writer's lease token), lock
and temporary files, half-copied files and anything else that lies in the folder match none of the names below. A path
is unescaped once and then has to match whole, so there is no way out of the store that would have to be recognised.

A file is opened once: everything an answer says and sends comes from that one descriptor. No symbolic link below the
store's root is followed, at any depth, also if one is put there in that moment (each folder is opened relative to the
last); an object that is replaced goes on being sent as it was, since a rename leaves the old file to the processes that
have it open; one that is changed in place is noticed by `OpenObject.unchanged`. Opening costs about 30 µs. The
trade-off: the ETag is inode, time and size, as in `FolderStore`, so it costs no read of a 20 MB file, and two copies of
a store have other ETags.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
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


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
"""Not there, or a link, folder or socket where a file or folder should be."""


@dataclass(frozen=True, slots=True)
class OpenObject:
    """A regular file that is open for reading."""

    descriptor: int
    size_bytes: int
    modified_ns: int
    etag: str
    """Strong, with its quotes."""

    @property
    def modified_s(self) -> int:
        """Seconds since the epoch, cut to what ``Last-Modified`` can say."""
        return self.modified_ns // 1_000_000_000

    def read(self, offset: int, size_bytes: int) -> bytes:
        """``size_bytes`` from ``offset``; fewer only if the file has become shorter. Blocks on the disk."""
        parts: list[bytes] = []
        while size_bytes > 0 and (part := os.pread(self.descriptor, size_bytes, offset)):
            parts.append(part)
            offset += len(part)
            size_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def unchanged(self) -> bool:
        """Whether the file is unchanged since it was opened."""
        status = os.fstat(self.descriptor)
        return (status.st_size, status.st_mtime_ns) == (self.size_bytes, self.modified_ns)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self.descriptor)


def open_object(root: Path, key: str) -> OpenObject | None:
    """Opens the object of that key, which the caller closes; None if there is none.

    Args:
        root: the store's folder, which may itself be reached through links.
        key: a key that `manifests.check_key` has passed.

    Raises:
        OSError: the store or the object cannot be read (permissions, disk, no descriptors left).
    """
    *folders, name = key.split("/")
    try:
        with open_folder(root, folders) as folder:
            descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return None
    etag = f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'
    return OpenObject(descriptor, status.st_size, status.st_mtime_ns, etag)


@contextmanager
def open_folder(root: Path, folders: list[str]) -> Iterator[int]:
    """The descriptor of a folder below ``root``, no link followed below it.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    descriptor = os.open(root, _FOLDER_FLAGS)
    try:
        for name in folders:
            below = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)
