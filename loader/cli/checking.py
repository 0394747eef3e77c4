"""Cached shards held against the manifest without touching them: nothing is fetched, removed or marked as used.

A file is read whole into memory (20 MB), not mapped: it needs no lock then, so nothing waits for a check, and a file
that is evicted meanwhile is still read to its end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from loader.errors import CorruptObjectError, HostileStoreError
from loader.fetch.catalog import Catalog
from loader.fetch.shards import cache_name, check_digest, checked_ids
from loader.session import Session

__all__ = ["Condition", "Finding", "check_shard", "shards_of_store"]

_NAME: Final = re.compile(r"shard_([0-9]{1,18})-[0-9a-f]{16}\.pt")


class Condition(StrEnum):
    """How a shard was found."""

    SOUND = "sound"
    DAMAGED = "damaged"
    """It is not what the manifest vouches for."""
    REFUSED = "refused"
    """It is, and that is no shard: the store's fault."""
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a shard."""

    shard_id: int
    condition: Condition
    size_bytes: int = 0
    """Read."""
    problem: str | None = None


def check_shard(session: Session, shard_id: int) -> Finding:
    """Holds a cached shard against the manifest: size, sha256, shape, and every id against the vocabulary.

    Raises:
        LoaderError: the index cannot be had.
    """
    entry = session.catalog.entry(shard_id)
    name = cache_name(entry)
    if not session.cache.contains(name):
        return Finding(shard_id, Condition.ABSENT)
    try:
        data = check_digest(_read(session.cache.folder / name, entry.size_bytes), entry.sha256, name)
        checked_ids(memoryview(data), entry)
    except FileNotFoundError:
        return Finding(shard_id, Condition.ABSENT)
    except CorruptObjectError as error:
        return Finding(shard_id, Condition.DAMAGED, entry.size_bytes, str(error))
    except HostileStoreError as error:
        return Finding(shard_id, Condition.REFUSED, entry.size_bytes, str(error))
    except OSError as error:
        return Finding(shard_id, Condition.DAMAGED, 0, f"{name}: cannot be read: {error.strerror}")
    return Finding(shard_id, Condition.SOUND, entry.size_bytes)


def _read(path: Path, size_bytes: int) -> bytearray:
    with path.open("rb") as file:
        found_bytes = os.fstat(file.fileno()).st_size
        if found_bytes != size_bytes:
            raise CorruptObjectError(f"{path.name}: expected {size_bytes} bytes, found {found_bytes}")
        data = bytearray(size_bytes)
        file.readinto(data)
        return data


def shards_of_store(catalog: Catalog, names: Iterable[str]) -> list[int]:
    """The shards of a store among the files of a cache, ascending; other stores' files are left out.

    Raises:
        LoaderError: the index cannot be had.
    """
    found: list[int] = []
    for name in names:
        match = _NAME.fullmatch(name)
        shard_id = int(match[1]) if match else catalog.manifest.total_shards
        if shard_id < catalog.manifest.total_shards and cache_name(catalog.entry(shard_id)) == name:
            found.append(shard_id)
    return sorted(found)
