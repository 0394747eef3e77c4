"""The index in arrays: cells add up, growth keeps what is known, checks stay with the shard that was checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.errors import ObjectNotFoundError
from genesis.store import StoredObject
from genesis.store_page.shard_table import DAMAGED, OTHER_SOURCES, VERIFIED_BEFORE, ShardTable
from manifests import (
    SEGMENT_SHARDS,
    Manifest,
    PackedEntry,
    Segment,
    SegmentRef,
    ShardEntry,
    SourceTotals,
    packed_key,
    segment_key,
    sha256_hex,
)

TIME = "2026-11-20T17:32:03Z"


@dataclass
class Index:
    """A store of which only the index is there."""

    manifest: Manifest
    objects: dict[str, bytes]

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        if key not in self.objects:
            raise ObjectNotFoundError(f"{key}: no such object")
        return StoredObject(self.objects[key], key)


def entries_of(sources: list[str], salt: str = "") -> list[ShardEntry]:
    """Ten documents a shard, the last of which goes on in the source's next shard."""
    seen: dict[str, int] = {}
    found = []
    for number, source in enumerate(sources):
        order = seen.get(source, 0)
        seen[source] = order + 1
        digest = sha256_hex(f"{number} {source} {salt}".encode())
        found.append(
            ShardEntry(
                id=number,
                sha256=digest,
                size_bytes=1_000,
                tokens=8,
                source=source,
                first_document=order * 9,
                last_document=order * 9 + 9,
                next_merge_id=300 + 100 * (number // 4),
                packed=PackedEntry(key=packed_key(number), sha256=digest, size_bytes=9) if number % 3 else None,
            )
        )
    return found


def index_of(entries: list[ShardEntry], *, created_at: str = TIME) -> Index:
    objects, references = {}, []
    for first in range(0, len(entries), SEGMENT_SHARDS):
        part = entries[first : first + SEGMENT_SHARDS]
        body = Segment(shards=tuple(part)).to_json()
        key = segment_key(first // SEGMENT_SHARDS, sha256_hex(body))
        objects[key] = body
        references.append(SegmentRef(key=key, sha256=sha256_hex(body), first_shard=first, shards=len(part)))
    names = dict.fromkeys(entry.source for entry in entries)
    counts = {name: [entry for entry in entries if entry.source == name] for name in names}
    manifest = Manifest(
        total_shards=len(entries),
        total_tokens=8 * len(entries),
        total_size_bytes=1_000 * len(entries),
        shard_tokens=8,
        sources={
            name: SourceTotals(
                shards=len(own),
                tokens=8 * len(own),
                documents_processed=own[-1].last_document,
                last_shard_id=own[-1].id,
            )
            for name, own in counts.items()
        },
        index=tuple(references),
        created_at=created_at,
        updated_at=created_at,
    )
    return Index(manifest, objects)


def read(index: Index, table: ShardTable | None = None) -> ShardTable:
    table = table or ShardTable()
    table.follow(index.manifest)
    while table.read_next(index):  # type: ignore[arg-type]
        """The next segment."""
    return table


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=60),
    st.integers(0, 70),
    st.integers(0, 70),
    st.integers(1, 20),
)
def test_cells_of_a_grid_add_up(sources: list[str], first: int, count: int, max_cells: int) -> None:
    entries = entries_of(sources)
    table = read(index_of(entries))
    table.note_check(entries[0], True)
    table.note_check(entries[-1], False)
    grid = table.grid(first, count, max_cells)
    shown = entries[grid.first_shard : grid.first_shard + grid.num_shards]
    assert len(grid.cells) <= max_cells
    assert [shard for cell in grid.cells for shard in range(cell.first_shard, cell.first_shard + cell.num_shards)] == [
        entry.id for entry in shown
    ]
    for place, name in enumerate(grid.sources):
        assert sum(cell.by_source[place] for cell in grid.cells) == sum(entry.source == name for entry in shown)
    assert sum(cell.packed for cell in grid.cells) == sum(entry.packed is not None for entry in shown)
    assert sum(cell.damaged for cell in grid.cells) == sum(entry.id == entries[-1].id for entry in shown)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=40), st.integers(0, 400))
def test_a_document_is_found_in_the_shard_it_begins_in(sources: list[str], ordinal: int) -> None:
    entries = entries_of(sources)
    table = read(index_of(entries))
    own = [entry for entry in entries if entry.source == "a"]
    expected = next((entry.id for entry in own if entry.first_document <= ordinal <= entry.last_document), None)
    assert table.shard_of("a", ordinal) == expected
    for before, entry in zip([None, *own], own, strict=False):
        assert table.neighbours(entry.id)[0] == (before.id if before else None)
        assert table.begins_before(entry.id) is (before is not None)


def test_a_growing_store_reads_its_last_segment_alone_and_keeps_what_was_checked() -> None:
    entries = entries_of(["a"] * (SEGMENT_SHARDS + 3))
    first = index_of(entries[: SEGMENT_SHARDS + 1])
    table = read(first)
    table.note_check(entries[0], True)
    table.note_check(entries[SEGMENT_SHARDS], True)
    grown = index_of(entries)
    sealed = grown.manifest.index[0].key
    del grown.objects[sealed]  # It is not asked for again.
    read(grown, table)
    state = table.state()
    assert (state.indexed_shards, state.verified_shards, state.problem) == (SEGMENT_SHARDS + 3, 2, None)


def test_a_shard_that_was_replaced_is_unchecked_and_another_store_begins_anew() -> None:
    entries = entries_of(["a"] * 5)
    table = read(index_of(entries))
    for entry in entries:
        table.note_check(entry, True)
    other = entries_of(["a"] * 5, salt="rewritten")
    read(index_of([*entries[:2], *other[2:]]), table)
    assert table.state().verified_shards == 2
    table.note_check(entries[4], True)
    assert table.state().verified_shards == 2, "an entry that is no longer in the index marks nothing"
    read(index_of(entries, created_at="2026-11-21T17:32:03Z"), table)
    assert table.state().verified_shards == 0


def test_what_verify_found_also_counts_for_segments_that_are_read_later() -> None:
    index = index_of(entries_of(["a"] * (SEGMENT_SHARDS + 2)))
    table = ShardTable()
    table.follow(index.manifest)
    checks = np.full(SEGMENT_SHARDS + 1, VERIFIED_BEFORE, np.uint8)
    checks[7] = DAMAGED
    table.report(checks)
    assert table.state().verified_shards == 0, "nothing is claimed of shards that are not indexed"
    read(index, table)
    state = table.state()
    assert (state.verified_shards, state.verified_here, state.damaged_shards) == (SEGMENT_SHARDS, 0, 1)


def test_an_index_that_cannot_be_read_is_said() -> None:
    index = index_of(entries_of(["a"] * 3))
    index.objects.clear()
    table = read(index)
    assert "cannot be read on" in (table.state().problem or "")
    grid = table.grid(0, 3, 10)
    assert (grid.indexed_shards, grid.total_shards, grid.sources) == (0, 3, ())


def test_many_sources_become_eight() -> None:
    table = read(index_of(entries_of([f"source-{number % 20}" for number in range(200)])))
    grid = table.grid(0, 200, 50)
    assert len(grid.sources) == 8 and grid.sources[-1] == OTHER_SOURCES
    assert all(sum(cell.by_source) == cell.num_shards for cell in grid.cells)


def test_growth_of_the_vocabulary_is_told_by_first_shards() -> None:
    steps = read(index_of(entries_of(["a"] * 4 + ["b"] * 4))).vocabulary_steps()
    assert [(step.ids, step.first_shard, step.source) for step in steps] == [(300, 0, "a"), (400, 4, "b")]


@pytest.mark.parametrize("range_of", [(2**53 - 1, 2**53 - 1), (-5, -5), (0, 0)])
def test_ranges_beyond_the_store_are_cut(range_of: tuple[int, int]) -> None:
    grid = read(index_of(entries_of(["a"] * 3))).grid(*range_of, 10)
    assert grid.first_shard + grid.num_shards <= 3
