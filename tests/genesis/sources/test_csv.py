"""Comma-separated values: what the standard library reads of them, from any record on, and clear errors."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.errors import CorruptInputError, MissingFieldError
from genesis.sources import csv_records, opening
from tests.genesis.sources.test_lines import COMPRESS, plan_of, write
from tests.support.documents import read_on, read_until_error

PACK = {"csv": bytes} | {f"csv.{name.rpartition('.')[2]}": pack for name, pack in COMPRESS.items() if name.count(".")}
FIELDS = st.text(st.sampled_from('ab",\n\r \té三\u2028\x0b'), max_size=8)


def as_csv(rows: list[list[str]], **form: object) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, **form).writerows(rows)
    return text.getvalue().encode()


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS).map(list), max_size=30),
    suffix=st.sampled_from(sorted(PACK)),
    form=st.sampled_from(  # The writer of CPython 3.11 quotes no carriage return where lines end without one.
        [
            {"lineterminator": "\r\n"},
            *({"lineterminator": end, "quoting": csv.QUOTE_ALL} for end in ("\n", "\r\n", "\r")),
        ]
    ),
    block_bytes=st.integers(1, 300),
    piece_bytes=st.integers(1, 300),
    data=st.data(),
)
def test_records_are_those_of_a_plain_reading_and_any_cursor_resumes(
    tmp_path_factory, rows, suffix, form, block_bytes, piece_bytes, data
):
    folder = tmp_path_factory.mktemp("csv")
    write(folder / f"1.{suffix}", PACK[suffix](as_csv([["id", "text"], *rows], **form)))
    write(folder / f"2.{suffix}", PACK[suffix](as_csv([["text"], ["last"]], **form).rstrip(b"\r\n")))
    plan = plan_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_records, "BATCH_BYTES", block_bytes)
        patch.setattr(opening, "_CHUNK_BYTES", piece_bytes)
        whole = read_on(plan)
        assert whole.documents == [text.encode() for _, text in rows if text] + [b"last"]
        assert whole.rows == len(rows) + 1
        count, cursor = data.draw(st.sampled_from([*enumerate(whole.cursors, start=1), *whole.batch_ends]))
        rest = read_on(plan, cursor)
        assert rest.documents == whole.documents[count:]
        assert rest.cursors == whole.cursors[count:]


def test_what_spreadsheets_write_is_read(tmp_path):
    records = [b'"text",n', b'5" disk,1', b'"a ""quoted"" word\r\nand a line",2', b",3", b"", b"short", b"\xff bad,4"]
    data = b"\xef\xbb\xbf" + b"\r\n".join([*records, b'"end",5'])
    path = write(tmp_path / "a.csv", data)
    reading = read_on(plan_of(path))
    assert reading.documents == [b'5" disk', b'a "quoted" word\r\nand a line', b"short", b"end"]
    assert [cursor.row for cursor in reading.cursors] == [1, 2, 5, 7]
    assert reading.rows == 7
    assert read_on(plan_of(path, text_field="n")).documents == [b"1", b"2", b"3", b"4", b"5"]


def test_a_field_longer_than_the_libraries_limit_is_read(tmp_path):
    path = write(tmp_path / "a.csv", as_csv([["text"], ["x" * 300_000], ["y"]]))
    assert [len(text) for text in read_on(plan_of(path)).documents] == [300_000, 1]


@pytest.mark.parametrize(("header", "fields"), [("a,b\n", ("a", "b")), ("a;text\n", ("a;text",)), ("\n", ())])
def test_a_header_without_the_field_is_named_with_what_it_has(tmp_path, header, fields):
    path = write(tmp_path / "a.csv", f"{header}1,2\n".encode())
    with pytest.raises(MissingFieldError, match=r"a\.csv: no field 'text' in its header") as failure:
        read_on(plan_of(path))
    assert failure.value.fields == fields


def test_files_without_records_give_nothing(tmp_path):
    write(tmp_path / "1.csv", b"")
    write(tmp_path / "2.csv", b"text")
    write(tmp_path / "3.csv", b"text\n")
    reading = read_on(plan_of(tmp_path))
    assert (reading.documents, reading.rows) == ([], 0)


BROKEN = {
    b'text\na\nb\n"c\nd': "record 3, in line 5: unexpected end of data",
    b'text\na\nb\n"c"d\n': "record 3, in line 4:",
}


@pytest.mark.parametrize("data", BROKEN)
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_a_broken_record_stops_with_its_number(tmp_path, data, suffix):
    path = write(tmp_path / f"a.{suffix}", PACK[suffix](data))
    reading = read_until_error(plan_of(path), CorruptInputError)
    assert reading.documents == [b"a", b"b"]
    assert f"a.{suffix}: {BROKEN[data]}" in str(reading.error)


def test_a_quote_that_nothing_closes_does_not_take_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_records, "MAX_RECORD_BYTES", 1 << 20)
    for rest in (b"x" * (3 << 20), b"x,\n" * (1 << 20)):
        path = write(tmp_path / "a.csv", b'text\na\n"' + rest)
        reading = read_until_error(plan_of(path), CorruptInputError)
        assert reading.documents == [b"a"]
        assert "record 2" in str(reading.error)
        assert "over 1 MiB" in str(reading.error)


@pytest.mark.parametrize("suffix", ["csv.gz", "csv.xz"])
def test_a_truncated_file_gives_every_record_before_the_cut(tmp_path, suffix):
    rows = [["text"], *([json.dumps(list(range(n, n + 40)))] for n in range(3000))]
    whole = PACK[suffix](as_csv(rows))
    path = write(tmp_path / f"a.{suffix}", whole[: len(whole) * 2 // 3])
    reading = read_until_error(plan_of(path), CorruptInputError)
    count = len(reading.documents)
    assert count > 500
    assert reading.documents == [row[0].encode() for row in rows[1 : count + 1]]
    assert f"record {count + 1}," in str(reading.error)


def test_a_header_with_the_field_twice_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", b"text,text\r\na,b\r\n")
    with pytest.raises(CorruptInputError, match="the header has 2 fields 'text'"):
        read_on(plan_of(path))
