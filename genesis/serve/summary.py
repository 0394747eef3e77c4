"""The figures of a store's manifest, as often as anyone asks, parsed once for each manifest.

A manifest of 600 segments takes 4 ms to parse and a look at the file 30 µs; each commit of a store is a new file.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from genesis.serve.files import open_object
from manifests import MANIFEST_KEY, ContractError, Manifest

logger = logging.getLogger(__name__)

_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """What a manifest says of its store."""

    total_shards: int
    total_tokens: int
    total_size_bytes: int
    sequence: int


class ManifestReader:
    """Reads a folder's manifest; safe from many threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._etag: str | None = None
        self._summary: StoreSummary | None = None

    def read(self) -> StoreSummary | None:
        """The published figures; None if there is no manifest, or none that can be read (which is logged once)."""
        with self._lock:
            try:
                found = open_object(self._root, MANIFEST_KEY)
            except OSError as error:
                return self._remember("unreadable", None, f"cannot be read: {error.strerror}")
            if found is None:
                return self._remember(None, None)
            try:
                if found.etag == self._etag:
                    return self._summary
                if found.size_bytes > _MAX_MANIFEST_BYTES:
                    return self._remember(found.etag, None, f"has {found.size_bytes:,} bytes; that is no manifest")
                return self._remember(found.etag, _summary_of(found.read(0, found.size_bytes)))
            except (OSError, ContractError) as error:
                return self._remember(found.etag, None, str(error))
            finally:
                found.close()

    def _remember(self, etag: str | None, summary: StoreSummary | None, trouble: str = "") -> StoreSummary | None:
        if trouble and etag != self._etag:
            logger.warning("%s/%s %s; it is served as it is", self._root, MANIFEST_KEY, trouble)
        self._etag, self._summary = etag, summary
        return summary


def _summary_of(body: bytes) -> StoreSummary:
    manifest = Manifest.from_json(body)
    return StoreSummary(
        total_shards=manifest.total_shards,
        total_tokens=manifest.total_tokens,
        total_size_bytes=manifest.total_size_bytes,
        sequence=manifest.sequence,
    )
