"""What a listing tells: objects that nothing names, and shards (in either form) missing or of the wrong size.

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
from manifests import Manifest, ShardEntry, packed_key, shard_key

_SHARD = re.compile(r"shard_(0|[1-9][0-9]{0,15})\.pt")
_PACKED = re.compile(r"packed/shard_(0|[1-9][0-9]{0,15})\.zst")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """The objects of one form that a shard may have."""

    size_bytes: npt.NDArray[np.int64]
    """int64[total_shards], of each shard; −1 where there is none."""
    beyond: tuple[int, ...]
    """Ids of shards that the manifest does not name."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A store's objects, as far as they matter here."""

    shards: Sizes
    packed: Sizes
    segments: tuple[str, ...]
    vocabularies: tuple[str, ...]

    def problems(self, entry: ShardEntry) -> list[tuple[str, str]]:
        """What the listing says against a shard, as (key, problem)."""
        expected = [(shard_key(entry.id), self.shards, entry.size_bytes)]
        if entry.packed is not None and entry.packed.key == packed_key(entry.id):
            expected.append((entry.packed.key, self.packed, entry.packed.size_bytes))
        problems = []
        for key, sizes, size_bytes in expected:
            found = int(sizes.size_bytes[entry.id])
            if found < 0:
                problems.append((key, "expected a shard, found no such object; restore it from a copy"))
            elif found != size_bytes:
                problems.append((key, f"expected {size_bytes} bytes, found {found}; restore it from a copy"))
        return problems

    def note_orphans(self, manifest: Manifest, findings: Findings) -> None:
        """Notes what nothing names."""
        named = {reference.key for reference in manifest.index}
        superseded = [key for key in self.segments if key not in named]
        beyond = [shard_key(number) for number in self.shards.beyond]
        packed_beyond = [packed_key(number) for number in self.packed.beyond]
        uncommitted = "beyond the manifest (not committed yet, or left by a stopped populator)"
        for keys, what in (
            (beyond, f"shards {uncommitted}"),
            (packed_beyond, f"packed shards {uncommitted}"),
            (superseded, "index segments that longer ones replaced (deleted an hour after)"),
        ):
            if keys:
                more = ", …" if len(keys) > _SHOWN else ""
                findings.note(f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{more}")


def read_listing(store: ReadableStore, manifest: Manifest, findings: Findings) -> Listing | None:
    """Lists the store; None, with a note, where that is not possible.

    A store of 600,000 shards takes 1,200 requests and 10 MB.
    """
    known = manifest.total_shards if manifest.index else 0
    try:
        return Listing(
            shards=_sizes(store, "shard_", _SHARD, known),
            packed=_sizes(store, "packed/shard_", _PACKED, known),
            segments=tuple(info.key for info in store.list("index/")),
            vocabularies=tuple(info.key for info in store.list("vocabulary/")),
        )
    except StoreError as error:
        findings.note(f"the store is not looked through for what nothing names ({error})")
        return None


def _sizes(store: ReadableStore, prefix: str, name: re.Pattern[str], known: int) -> Sizes:
    sizes = np.full(known, -1, dtype=np.int64)
    beyond: list[int] = []
    for info in store.list(prefix):
        matched = name.fullmatch(info.key)
        number = int(matched[1]) if matched else None
        if number is not None and number < known:
            sizes[number] = info.size_bytes
        elif number is not None:
            beyond.append(number)
    return Sizes(sizes, tuple(sorted(beyond)))
