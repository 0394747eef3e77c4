"""JSON arrays of any size and form: the documents of a plain reading, from any row on, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.errors import CorruptInputError, GenesisError, MissingFieldError
from genesis.sources import lines as lines_module
from genesis.sources import opening
from genesis.sources.arrays import BrokenArrayError, array_lines, holds_array
from tests.genesis.sources.test_lines import COMPRESS, plan_of, write
from tests.support.documents import read_on, read_until_error

JSON = sorted(suffix for suffix in COMPRESS if suffix.startswith("json.") or suffix == "json")
TEXTS = st.text(st.sampled_from('ab"\\\\\n\r\t ,:[]{}é三'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.fixed_dictionaries({"text": TEXTS}, optional={"meta": VALUES})
FORMS = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"indent": 2, "ensure_ascii": False}])


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@given(objects=st.lists(OBJECTS, max_size=6), form=FORMS, size=st.integers(1, 40), around=st.sampled_from(["", " \n"]))
def test_every_element_is_a_line_however_the_array_is_written_and_cut(objects, form, size, around):
    data = f"{around}{json.dumps(objects, **form)}{around}".encode()
    is_array, chunks = holds_array(iter(pieces(data, size)))
    assert is_array
    lines = b"".join(array_lines(chunks))
    assert [json.loads(line) for line in lines.split(b"\n")[:-1]] == objects
    assert lines.count(b"\n") == len(objects)


@given(st.binary(max_size=60), st.integers(1, 20))
def test_bytes_that_are_no_array_end_in_its_own_error_or_in_lines(data, size):
    try:
        lines = b"".join(array_lines(iter(pieces(b"[" + data, size))))
    except BrokenArrayError:
        return
    assert not lines or lines.endswith(b"\n")


@settings(deadline=None, max_examples=25)
@given(
    objects=st.lists(OBJECTS, max_size=30),
    form=FORMS,
    suffix=st.sampled_from(JSON),
    block_bytes=st.integers(1, 500),
    piece_bytes=st.integers(1, 500),
    data=st.data(),
)
def test_reading_on_from_any_cursor_is_skipping(
    tmp_path_factory, objects, form, suffix, block_bytes, piece_bytes, data
):
    folder = tmp_path_factory.mktemp("array")
    write(folder / f"1.{suffix}", COMPRESS[suffix](json.dumps(objects, **form).encode()))
    write(folder / f"2.{suffix}", COMPRESS[suffix](json.dumps([{"text": "last"}]).encode()))
    plan = plan_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BATCH_BYTES", block_bytes)
        patch.setattr(opening, "_CHUNK_BYTES", piece_bytes)
        whole = read_on(plan)
        assert whole.documents == [each["text"].encode() for each in objects if each["text"]] + [b"last"]
        assert whole.rows == len(objects) + 1
        count, cursor = data.draw(st.sampled_from([*enumerate(whole.cursors, start=1), *whole.batch_ends]))
        rest = read_on(plan, cursor)
        assert rest.documents == whole.documents[count:]
        assert rest.cursors == whole.cursors[count:]


BROKEN = {
    b'[{"text": "a"}, {"text": "b"}': "element 2 of the array: truncated",
    b'[{"text": "a"}, {"text": "b"}, {"te': "element 3 of the array: truncated",
    b'[{"text": "a"}, {"text": "b"},]': "element 3 of the array: expected an object",
    b'[{"text": "a"}, {"text": "b"},, {}]': "element 3 of the array: expected an object",
    b'[{"text": "a"}, {"text": "b"}] []': "more text behind the end",
    b'[{"text": "a"}, {"text": "b"}, "c"]': "element 3 is not a JSON object",
    b'[{"text": "a"}, {"text": "b"} {}]': "element 2 is not a JSON object",
    b'[{"text": "a"}, {"text": "b\n"}]': "element 2 is not a JSON object",
    b'[{"text": "a"}, {"text": "b"}, {"text": tru}]': "element 3 is not a JSON object",
}


@pytest.mark.parametrize("data", BROKEN)
@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_an_array_that_is_broken_stops_with_the_elements_number(tmp_path: Path, data, suffix):
    path = write(tmp_path / f"a.{suffix}", COMPRESS[suffix](data))
    reading = read_until_error(plan_of(path), CorruptInputError)
    assert reading.documents == ([b"a"] if "element 2" in BROKEN[data] else [b"a", b"b"])
    assert BROKEN[data] in str(reading.error)
    assert f"a.{suffix}" in str(reading.error)


def test_a_field_that_no_element_has_is_named_with_those_there_are(tmp_path):
    path = write(tmp_path / "a.json", json.dumps([{"body": "x", "id": n} for n in range(5)]).encode())
    with pytest.raises(MissingFieldError, match="none of the first 5 elements has the field 'text'") as failure:
        read_on(plan_of(path))
    assert failure.value.fields == ("body", "id")
    assert len(read_on(plan_of(path, text_field="body")).documents) == 5


def test_memory_is_bounded_by_pieces_and_the_longest_element(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1 << 20)
    path = write(tmp_path / "a.json", b'[{"text": "a"}, {"text": "' + b"x" * (3 << 20) + b'"}]')
    reading = read_until_error(plan_of(path), CorruptInputError)
    assert reading.documents == [b"a"]
    assert "element 2 is over 1 MiB" in str(reading.error)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(
        ["a.json", "a.jsonl", "a.csv", "a.json.xz", "a.csv.bz2", "a.jsonl.gz", "a.json.zst", "a.parquet"]
    ),
    data=st.binary(max_size=80) | st.text('[{"text:}],\n\\ a', max_size=60).map(str.encode),
    compressed=st.booleans(),
)
def test_garbage_is_an_error_of_our_own_or_documents(tmp_path_factory, name, data, compressed):
    suffix = name.rpartition(".")[2]
    pack = next((pack for known, pack in COMPRESS.items() if known.endswith(f".{suffix}")), bytes)
    path = write(tmp_path_factory.mktemp("garbage") / name, pack(data) if compressed else data)
    try:
        read_on(plan_of(path))
    except GenesisError as error:
        assert name in str(error)
        assert "\n" not in str(error)
