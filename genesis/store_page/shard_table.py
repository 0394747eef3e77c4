"""The index of a store in arrays, 33 bytes a shard: which source, which documents, packed, checked or not.

Segments are read one by one, each held against its digest, and never twice: a segment's name is its digest, so only
the last one of a growing store is read again. Whoever shows the table shows what is read so far. 600,000 shards are 600
segments, 15 ms each to read and validate, and 20 MB here; as models they would be 1.2 GB.

A shard's check is kept for as long as the index says the same sha256 of it.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from genesis.errors import StoreError
from genesis.snapshot import read_segment
from genesis.store import ReadableStore
from genesis.store_page.models import GridCell, IndexState, ShardGrid, VocabularyStep
from manifests import SEGMENT_SHARDS, ContractError, Manifest, Segment, SegmentRef, ShardEntry

UNCHECKED, VERIFIED_BEFORE, VERIFIED_HERE, DAMAGED = 0, 1, 2, 3
"""What is known of a shard's bytes; the second: by a report of ``genesis verify``."""
OTHER_SOURCES = "other sources"
_UNKNOWN = np.uint16(0xFFFF)
_MAX_STEPS = 100

_Row = np.dtype(
    [
        ("source", np.uint16),
        ("packed", np.bool_),
        ("check", np.uint8),
        ("sha256_head", np.uint64),
        ("first_document", np.int64),
        ("last_document", np.int64),
        ("vocabulary_ids", np.uint32),
    ]
)


@dataclass(slots=True)
class ShardTable:
    """What is read of an index so far. Safe from many threads.

    Attributes:
        sources: names; a row's ``source`` is a place in this list.
    """

    sources: list[str] = field(default_factory=list)
    _rows: npt.NDArray[np.void] = field(default_factory=lambda: _empty_rows(0))
    _segments: list[str] = field(default_factory=list)
    """sha256 of each segment in the table; empty: not read yet."""
    _manifest: Manifest | None = None
    _problem: str | None = None
    _reported: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    _steps: tuple[VocabularyStep, ...] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def total_shards(self) -> int:
        """Of the manifest that is followed."""
        return len(self._rows)

    def follow(self, manifest: Manifest) -> None:
        """Takes a manifest over: what it still says is kept, the rest is to be read by `read_next`."""
        with self._lock:
            if manifest is self._manifest:
                return
            other = self._manifest is not None and manifest.created_at != self._manifest.created_at
            if other:
                self.sources.clear()
                self._segments.clear()
                self._reported = self._reported[:0]
            total = manifest.total_shards if manifest.index else 0
            rows = _empty_rows(total)
            kept = 0 if other else min(total, len(self._rows))
            rows[:kept] = self._rows[:kept]
            # Array by array, a reader of the old rows goes on with them.
            self._rows, self._manifest, self._problem, self._steps = rows, manifest, None, None
            known = self._segments[: len(manifest.index)]
            self._segments = known + [""] * (len(manifest.index) - len(known))
            for number, reference in enumerate(manifest.index):
                if self._segments[number] != reference.sha256:
                    self._segments[number] = ""

    def read_next(self, store: ReadableStore) -> bool:
        """Reads the first segment that is not in the table; False: there is none, or it cannot be read.

        One that has the last place is read first: a populator deletes it an hour after a longer one took its place.
        """
        with self._lock:
            manifest = self._manifest
            missing = [number for number, sha256 in enumerate(self._segments) if not sha256]
            if manifest is None or not missing:
                return False
            last = len(self._segments) - 1
            number = last if missing[-1] == last else missing[0]
            reference = manifest.index[number]
        return self._read(store, manifest, number, reference)

    def read_of(self, store: ReadableStore, shard_id: int) -> None:
        """Reads the segment of a shard, unless the table has it."""
        with self._lock:
            number = shard_id // SEGMENT_SHARDS
            manifest = self._manifest
            if manifest is None or not 0 <= number < len(self._segments) or self._segments[number]:
                return
            reference = manifest.index[number]
        self._read(store, manifest, number, reference)

    def _read(self, store: ReadableStore, manifest: Manifest, number: int, reference: SegmentRef) -> bool:
        try:
            segment = read_segment(store, reference)
            if (segment.shards[0].id, len(segment.shards)) != (reference.first_shard, reference.shards):
                raise ContractError(f"{reference.key}: expected the shards that the manifest names, found others")
        except (StoreError, ContractError) as error:
            with self._lock:
                self._problem = f"the index cannot be read on: {error}"
            return False
        with self._lock:
            if manifest is self._manifest:
                self._fill(number, reference, segment)
        return True

    def _fill(self, number: int, reference: SegmentRef, segment: Segment) -> None:
        places = {name: place for place, name in enumerate(self.sources)}
        for name in dict.fromkeys(entry.source for entry in segment.shards):
            if name not in places:
                places[name] = len(self.sources)
                self.sources.append(name)
        read = np.array(
            [
                (
                    min(places[entry.source], int(_UNKNOWN) - 1),
                    entry.packed is not None,
                    UNCHECKED,
                    _head_of(entry),
                    entry.first_document,
                    entry.last_document,
                    entry.next_merge_id,
                )
                for entry in segment.shards
            ],
            dtype=_Row,
        )
        place = slice(reference.first_shard, reference.first_shard + reference.shards)
        old = self._rows[place]
        same = (old["source"] != _UNKNOWN) & (old["sha256_head"] == read["sha256_head"])
        reported = np.zeros(len(read), np.uint8)
        given = self._reported[place]
        reported[: len(given)] = given
        read["check"] = np.where(same, old["check"], reported)
        self._rows[place] = read
        self._segments[number] = reference.sha256
        self._steps = None

    def report(self, checks: npt.NDArray[np.uint8]) -> None:
        """Takes over what ``genesis verify`` found: uint8[shards at that time], one of the four values each."""
        with self._lock:
            self._reported = checks
            num = min(len(checks), len(self._rows))
            column = self._rows["check"][:num]
            indexed = self._rows["source"][:num] != _UNKNOWN
            column[indexed & (column == UNCHECKED)] = checks[:num][indexed & (column == UNCHECKED)]

    def note_check(self, entry: ShardEntry, is_sound: bool) -> None:
        """Notes that a shard was held against its entry in the index, and what came of it."""
        with self._lock:
            if 0 <= entry.id < len(self._rows):
                row = self._rows[entry.id]
                if row["source"] != _UNKNOWN and int(row["sha256_head"]) == _head_of(entry):
                    self._rows["check"][entry.id] = VERIFIED_HERE if is_sound else DAMAGED

    def check_of(self, shard_id: int) -> int:
        """One of the four values."""
        return int(self._rows["check"][shard_id]) if 0 <= shard_id < len(self._rows) else UNCHECKED

    def state(self) -> IndexState:
        """How much was read and checked."""
        with self._lock:
            rows = self._rows
            indexed = rows["source"] != _UNKNOWN
            counts = np.bincount(rows["check"][indexed], minlength=4)
            return IndexState(
                indexed_shards=int(np.count_nonzero(indexed)),
                packed_shards=int(np.count_nonzero(rows["packed"])),
                verified_shards=int(counts[VERIFIED_BEFORE] + counts[VERIFIED_HERE]),
                verified_here=int(counts[VERIFIED_HERE]),
                damaged_shards=int(counts[DAMAGED]),
                problem=self._problem,
            )

    def neighbours(self, shard_id: int) -> tuple[int | None, int | None]:
        """The shards of the same source before and after one; None beyond what is read."""
        with self._lock:
            source = self._rows["source"]
            if not 0 <= shard_id < len(source) or source[shard_id] == _UNKNOWN:
                return None, None
            return self._step(shard_id, -1), self._step(shard_id, 1)

    def _step(self, shard_id: int, direction: int) -> int | None:
        """Looks a segment's length away at most at once, usually at the next shard."""
        source, own = self._rows["source"], self._rows["source"][shard_id]
        at = shard_id + direction
        while 0 <= at < len(source):
            end = at + direction * SEGMENT_SHARDS
            low, high = (at, min(end, len(source))) if direction > 0 else (max(end + 1, 0), at + 1)
            part = source[low:high]
            found = np.flatnonzero((part == own) | (part == _UNKNOWN))
            if len(found):
                place = low + int(found[0] if direction > 0 else found[-1])
                return place if source[place] == own else None
            at = high if direction > 0 else low - 1
        return None

    def begins_before(self, shard_id: int) -> bool | None:
        """Whether the shard's first document began in an earlier shard; None: not known yet."""
        with self._lock:
            rows = self._rows
            if not 0 <= shard_id < len(rows) or rows["source"][shard_id] == _UNKNOWN:
                return None
            before = self._step(shard_id, -1)
            if before is not None:
                return bool(rows["last_document"][before] == rows["first_document"][shard_id])
            # None before it: it begins with the source's first document, unless the index is not read so far.
            return False if int(rows["first_document"][shard_id]) == 0 else None

    def shard_of(self, source: str, ordinal: int) -> int | None:
        """The shard in which a document of a source begins; None if no shard that is read has it."""
        with self._lock:
            if source not in self.sources:
                return None
            own = np.flatnonzero(self._rows["source"] == self.sources.index(source))
            place = int(np.searchsorted(self._rows["last_document"][own], ordinal))
            if place == len(own) or int(self._rows["first_document"][own[place]]) > ordinal:
                return None
            return int(own[place])

    def draw_shard(self, source: str, rng: random.Random) -> int | None:
        """A shard of a source at random; None if none is read."""
        with self._lock:
            if source not in self.sources:
                return None
            own = np.flatnonzero(self._rows["source"] == self.sources.index(source))
            return int(own[rng.randrange(len(own))]) if len(own) else None

    def vocabulary_steps(self) -> tuple[VocabularyStep, ...]:
        """The sizes that the vocabulary had when shards were written, by what is read so far."""
        with self._lock:
            if self._steps is None:
                rows = self._rows
                indexed = np.flatnonzero(rows["source"] != _UNKNOWN)
                sizes, first = np.unique(rows["vocabulary_ids"][indexed], return_index=True)
                self._steps = tuple(
                    VocabularyStep(ids=int(size), first_shard=int(indexed[at]), source=self._name(int(indexed[at])))
                    for size, at in zip(sizes[:_MAX_STEPS], first[:_MAX_STEPS], strict=True)
                )
            return self._steps

    def _name(self, shard_id: int) -> str:
        return self.sources[int(self._rows["source"][shard_id])]

    def grid(self, first_shard: int, num_shards: int, max_cells: int, max_sources: int = 8) -> ShardGrid:
        """A range of shards, as many of them to a cell as ``max_cells`` asks for.

        Args:
            first_shard: of the range.
            num_shards: of the range; it is cut to what there is.
            max_cells: at least 1.
            max_sources: further ones count as `OTHER_SOURCES`.
        """
        with self._lock:
            total = len(self._rows)
            first_shard = min(max(0, first_shard), max(0, total - 1))
            num_shards = min(max(0, num_shards), total - first_shard)
            cell_shards = _cell_shards(num_shards, max_cells)
            names, columns = self._columns(max_sources)
            rows = self._rows[first_shard : first_shard + num_shards]
            starts = np.arange(0, num_shards, cell_shards)
            column = np.full(int(_UNKNOWN) + 1, len(names), np.uint16)
            column[: len(columns)] = columns
            placed = column[rows["source"]]
            by_source = _counts(placed, starts, len(names))
            indexed = rows["source"] != _UNKNOWN
            check = np.where(indexed, rows["check"], UNCHECKED)
            sums = [
                _sums(values, starts)
                for values in (rows["packed"], (check == VERIFIED_BEFORE) | (check == VERIFIED_HERE), check == DAMAGED)
            ]
        cells = tuple(
            GridCell(
                first_shard=first_shard + int(start),
                num_shards=min(cell_shards, num_shards - int(start)),
                by_source=tuple(by_source[place].tolist()),
                packed=int(sums[0][place]),
                verified=int(sums[1][place]),
                damaged=int(sums[2][place]),
            )
            for place, start in enumerate(starts)
        )
        return ShardGrid(
            total_shards=total,
            first_shard=first_shard,
            num_shards=num_shards,
            cell_shards=cell_shards,
            sources=tuple(names),
            indexed_shards=int(np.count_nonzero(indexed)),
            cells=cells,
        )

    def _columns(self, max_sources: int) -> tuple[list[str], npt.NDArray[np.uint16]]:
        """Names of the grid's sources, and for each of the table's its place among them."""
        shards = self._manifest.sources if self._manifest else {}
        ranked = sorted(
            range(len(self.sources)),
            key=lambda place: (-(shards[self.sources[place]].shards if self.sources[place] in shards else 0), place),
        )
        shown = ranked if len(ranked) <= max_sources else ranked[: max_sources - 1]
        names = [self.sources[place] for place in shown]
        columns = np.full(len(self.sources), len(names), np.uint16)
        for column, place in enumerate(shown):
            columns[place] = column
        if len(shown) < len(ranked):
            names.append(OTHER_SOURCES)
        return names, columns


def _head_of(entry: ShardEntry) -> int:
    return int(entry.sha256[:16], 16)


def _empty_rows(num_shards: int) -> npt.NDArray[np.void]:
    rows = np.zeros(num_shards, dtype=_Row)
    rows["source"] = _UNKNOWN
    return rows


_NICE = (1, 2, 5)


def _cell_shards(num_shards: int, max_cells: int) -> int:
    """The least of 1, 2, 5, 10, 20, … shards to a cell that needs no more than ``max_cells`` cells."""
    size = 1
    while True:
        for factor in _NICE:
            if size * factor * max_cells >= num_shards:
                return size * factor
        size *= 10


def _sums(values: npt.NDArray[np.bool_], starts: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    if len(starts) == 0:
        return np.zeros(0, np.int64)
    return np.add.reduceat(values.astype(np.int64), starts)


def _counts(placed: npt.NDArray[np.uint16], starts: npt.NDArray[np.intp], num_sources: int) -> npt.NDArray[np.int64]:
    """int64[cells, num_sources]: shards of each source in each cell."""
    columns = [_sums(placed == source, starts) for source in range(num_sources)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(starts), 0), np.int64)
