from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.errors import CorruptInputError, SourceError
from genesis.sources import BATCH_BYTES, InputPlan, read_batches, resolve, tasks
from manifests import SourceSpec
from tests.support.documents import read_on, read_until_error

SPEC = SourceSpec(name="mine")
ROWS = ["first", None, "", "zweite Zeile äöü", "三", "x" * 1000, None, "last\0row"]
KEPT = [row.encode() for row in ROWS if row]


def plan_of(*paths: Path) -> InputPlan:
    return resolve(SPEC, [str(path) for path in paths])


def write(path: Path, column: pa.Array | pa.ChunkedArray, **options: object) -> Path:
    other = pa.array(np.arange(len(column)))
    pq.write_table(pa.table({"id": other, "text": column, "url": other.cast(pa.string())}), path, **options)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_every_kind_of_text_column_is_read_alike(tmp_path, kind):
    column = pa.array(ROWS, pa.string()).cast(kind) if not pa.types.is_dictionary(kind) else _dictionary(kind)
    reading = read_on(plan_of(write(tmp_path / "a.parquet", column, row_group_size=3)))
    assert reading.documents == KEPT
    assert reading.rows == len(ROWS)
    assert [(cursor.row_group, cursor.row) for cursor in reading.cursors] == [
        (0, 1), (1, 1), (1, 2), (1, 3), (2, 2)
    ]  # fmt: skip


def _dictionary(kind: pa.DataType) -> pa.Array:
    encoded = pa.array(ROWS, kind.value_type).dictionary_encode()
    return pa.DictionaryArray.from_arrays(encoded.indices.cast(kind.index_type), encoded.dictionary)


def test_rows_that_are_no_text_are_skipped_and_files_without_rows_give_nothing(tmp_path):
    invalid = pa.array([b"good", b"\xff\xfe", b"\xed\xa0\x80", b"also good"])
    for kind in (pa.binary(), pa.string()):
        column = invalid if kind == pa.binary() else pa.Array.from_buffers(kind, 4, invalid.buffers())
        reading = read_on(plan_of(write(tmp_path / "a.parquet", column)))
        assert (reading.documents, reading.rows) == ([b"good", b"also good"], 4)
    write(tmp_path / "a.parquet", pa.nulls(5))
    write(tmp_path / "b.parquet", pa.array([], pa.string()))
    write(tmp_path / "c.parquet", pa.array(["c"]))
    reading = read_on(plan_of(tmp_path))
    assert (reading.documents, reading.rows) == ([b"c"], 6)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    files=st.lists(
        st.lists(st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=20)), max_size=30),
        min_size=1,
        max_size=3,
    ),
    row_group_size=st.integers(1, 12),
    data=st.data(),
)
def test_reading_on_from_any_cursor_is_skipping(tmp_path_factory, files, row_group_size, data):
    folder = tmp_path_factory.mktemp("parquet")
    for number, rows in enumerate(files):
        write(folder / f"{number}.parquet", pa.array(rows, pa.string()), row_group_size=row_group_size)
    plan = plan_of(folder)
    whole = read_on(plan)
    assert whole.documents == [row.encode() for rows in files for row in rows if row]
    assert whole.rows == sum(map(len, files))
    places = [*enumerate(whole.cursors, start=1), *whole.batch_ends]
    if places:
        count, cursor = data.draw(st.sampled_from(places))
        rest = read_on(plan, cursor)
        assert rest.documents == whole.documents[count:]
        assert rest.cursors == whole.cursors[count:]


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    write(tmp_path / "a.parquet", pa.array(ROWS))
    plan = resolve(SourceSpec(name="mine", text_field="content"), [str(tmp_path)])
    with pytest.raises(SourceError, match=r"a\.parquet: no column 'content'; it has id, text, url"):
        list(tasks(plan))
    plan = resolve(SourceSpec(name="mine", text_field="id"), [str(tmp_path)])
    with pytest.raises(SourceError, match="int64"):
        list(tasks(plan))


def test_a_truncated_file_stops_after_the_files_before_it(tmp_path):
    write(tmp_path / "1.parquet", pa.array(ROWS))
    second = write(tmp_path / "2.parquet", pa.array(ROWS))
    write(tmp_path / "3.parquet", pa.array(ROWS))
    second.write_bytes(second.read_bytes()[:-30])
    reading = read_until_error(plan_of(tmp_path), CorruptInputError)
    assert reading.documents == KEPT
    assert "2.parquet" in str(reading.error)
    assert "footer" in str(reading.error)
    second.write_bytes(b"")
    assert "2.parquet" in str(read_until_error(plan_of(tmp_path), CorruptInputError).error)


def test_a_damaged_page_stops_at_its_row_group(tmp_path):
    generator = np.random.default_rng(5)
    rows = [generator.bytes(200).hex() for _ in range(300)]
    path = write(tmp_path / "a.parquet", pa.array(rows), row_group_size=100, write_page_checksum=True)
    metadata = pq.read_metadata(path).row_group(1)
    chunk = metadata.column(1)
    data = bytearray(path.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    middle = start + chunk.total_compressed_size // 2
    data[middle] ^= 0x40
    path.write_bytes(data)
    reading = read_until_error(plan_of(path), CorruptInputError)
    assert reading.documents == [row.encode() for row in rows[:100]]
    assert "row group 1" in str(reading.error)


@pytest.mark.slow
def test_batches_stay_near_four_megabytes(tmp_path):
    rows = ["a" * 10_000 + str(number) for number in range(3000)]
    for name, options in (("plain", {"use_dictionary": False}), ("dictionary", {"use_dictionary": True})):
        path = write(tmp_path / f"{name}.parquet", pa.array(rows), row_group_size=3000, compression="zstd", **options)
        (task,) = tasks(plan_of(path))
        sizes = [sum(map(len, batch.texts)) for batch in read_batches(task)]
        assert max(sizes) <= 2 * BATCH_BYTES
        assert len(sizes) <= 12
    repeated = pa.array(["b" * 20_000] * 4000)
    (task,) = tasks(plan_of(write(tmp_path / "repeated.parquet", repeated)))
    assert max(sum(map(len, batch.texts)) for batch in read_batches(task)) <= 2 * BATCH_BYTES


def test_no_footer_of_a_replaced_file_is_kept(tmp_path):
    path = write(tmp_path / "a.parquet", pa.array(["old"]))
    assert read_on(plan_of(path)).documents == [b"old"]
    write(path, pa.array(["new", "longer"]))
    assert read_on(plan_of(path)).documents == [b"new", b"longer"]
