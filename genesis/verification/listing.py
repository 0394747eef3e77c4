"""What a store's own listing tells: objects that nothing names, and shards that are missing or of the wrong size.

Orphans are no fault: a populator that was killed leaves shards beyond the manifest and replaced segments behind, and
the next one reuses or deletes them. The sizes cost nothing and cover the shards that a sample leaves out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from genesis.errors import StoreError
from genesis.store import ReadableStore
from genesis.verification.report import Findings
from manifests import Manifest, ShardEntry, shard_key

__all__ = ["Listing", "read_listing"]

_SHARD = re.compile(r"shard_(0|[1-9][0-9]{0,15})\.pt")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Listing:
    """A store's objects, as far as they matter here."""

    shard_sizes: npt.NDArray[np.int64]
    """int64[total_shards], bytes of each shard; −1 where there is none."""
    shards_beyond: tuple[int, ...]
    """Ids of shards that the manifest does not name."""
    segments: tuple[str, ...]
    vocabularies: tuple[str, ...]

    def shard_problem(self, entry: ShardEntry) -> str | None:
        """What the listing says against a shard."""
        size_bytes = int(self.shard_sizes[entry.id])
        if size_bytes < 0:
            return "expected a shard, found no such object; restore it from a copy"
        if size_bytes != entry.size_bytes:
            return f"expected {entry.size_bytes} bytes, found {size_bytes}; restore it from a copy"
        return None

    def note_orphans(self, manifest: Manifest, findings: Findings) -> None:
        """Notes what nothing names."""
        named = {reference.key for reference in manifest.index}
        superseded = [key for key in self.segments if key not in named]
        beyond = [shard_key(number) for number in self.shards_beyond]
        for keys, what in (
            (beyond, "shards beyond the manifest (not committed yet, or left by a stopped populator)"),
            (superseded, "index segments that longer ones replaced (deleted an hour after)"),
        ):
            if keys:
                more = ", …" if len(keys) > _SHOWN else ""
                findings.note(f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{more}")


def read_listing(store: ReadableStore, manifest: Manifest, findings: Findings) -> Listing | None:
    """Lists the store; None, with a note, where that is not possible.

    A store of 600,000 shards takes 600 requests and 5 MB.
    """
    sizes = np.full(manifest.total_shards if manifest.index else 0, -1, dtype=np.int64)
    beyond: list[int] = []
    others: dict[str, list[str]] = {"index/": [], "vocabulary/": []}
    try:
        for info in store.list("shard_"):
            matched = _SHARD.fullmatch(info.key)
            number = int(matched[1]) if matched else None
            if number is not None and number < len(sizes):
                sizes[number] = info.size_bytes
            elif number is not None:
                beyond.append(number)
        for prefix, keys in others.items():
            keys.extend(info.key for info in store.list(prefix))
    except StoreError as error:
        findings.note(f"the store is not looked through for what nothing names ({error})")
        return None
    return Listing(sizes, tuple(sorted(beyond)), tuple(others["index/"]), tuple(others["vocabulary/"]))
