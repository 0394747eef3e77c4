"""Files of ids: every document comes back from every starting point, and no number in a file is believed."""

from __future__ import annotations

import json
import struct
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import CorruptInputError, InputNotFoundError, SourceError
from genesis.sources import token_files
from genesis.sources.base import TokenRules
from genesis.sources.token_files import recorded_vocabularies, token_batches, token_plan, token_tasks
from genesis.token_formats import TokenFormat
from tests.support.exporting import same, split, write_datatrove, write_megatron

RULES = TokenRules(num_ids=1_000, eos_id=2, num_special=10)
DOCUMENTS = [np.array([10, 11, 2]), np.array([2]), np.array([999, 2]), np.arange(20, 60).repeat(3)]
DOCUMENTS[3] = np.append(DOCUMENTS[3], 2)


def plan_of(path):
    kind = TokenFormat.DATATROVE if str(path).endswith(".ds") else TokenFormat.MEGATRON
    return token_plan("s", kind, [str(path)])


def documents_of(path, first_row=0, rules=RULES):
    """The documents of a file from a row on, and their rows."""
    found, rows = [], []
    (file,) = plan_of(path).files
    end_row = first_row
    for task in token_tasks(file, rules, first_row):
        assert task.first_row == end_row
        (batch,) = token_batches(task)
        found += split(batch.ids, batch.ends)
        rows += batch.rows.tolist()
        end_row = batch.end_row
        assert batch.stored_bytes.tolist() == sorted(batch.stored_bytes.tolist())
    return found, rows


def write(kind, folder, documents, **options):
    if kind == "megatron":
        return write_megatron(folder / "x", documents, **options)
    return write_datatrove(folder / "x.ds", documents, **options)


KINDS = ["megatron", "datatrove"]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    kind=st.sampled_from(KINDS),
    piece=st.integers(1, 9),
    task_ids=st.integers(1, 60),
    pieces=st.integers(1, 3),
)
def test_every_document_from_every_row(lengths, kind, piece, task_ids, pieces):
    documents = [np.append(np.arange(10, 10 + length), 2) for length in lengths]
    options = {"pieces": pieces} if kind == "megatron" else {}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "_PIECE", piece)
        patch.setattr(token_files, "TASK_IDS", task_ids)
        path = write(kind, Path(name), documents, **options)
        for row in range(len(documents) + 1):
            found, rows = documents_of(path, row)
            assert same(found, documents[row:])
            assert rows == list(range(row, len(documents)))


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<u4"])
@pytest.mark.parametrize("kind", KINDS)
def test_widths(kind, dtype, tmp_path):
    if (kind, dtype) in {("megatron", "<u4"), ("datatrove", "<i4")}:
        pytest.skip("the form has no such ids")
    path = write(kind, tmp_path, DOCUMENTS, dtype=dtype)
    found, _ = documents_of(path)
    assert same(found, DOCUMENTS)
    assert {each.dtype for each in found} == {np.dtype(np.uint32)}


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_no_id_are_left_out_and_counted(kind, tmp_path):
    empty = np.empty(0, np.int64)
    found, rows = documents_of(write(kind, tmp_path, [empty, DOCUMENTS[0], empty, empty, DOCUMENTS[2], empty]))
    assert same(found, [DOCUMENTS[0], DOCUMENTS[2]])
    assert rows == [1, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_eos_is_asked_for_or_appended(kind, tmp_path):
    bare = [document[:-1] if number % 2 else document for number, document in enumerate(DOCUMENTS)]
    path = write(kind, tmp_path, bare)
    with pytest.raises(CorruptInputError, match=r"document 3 does not end with EOS.*--append-eos"):
        documents_of(path)
    found, rows = documents_of(path, rules=TokenRules(1_000, 2, 10, append_eos=True))
    assert same(found, [DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[3]])
    assert rows == [0, 2, 3]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([10, 1_000, 2], "document 1, id 1: expected ids of 0 to 999, the store's vocabulary, found 1000"),
        ([10, 11, 1, 2], "document 1, id 2: expected no special id but EOS"),
        ([10, 2, 11, 2], "document 1, id 1: expected EOS .* at the ends of documents only"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_do_not_fit_name_their_place(kind, document, said, tmp_path):
    path = write(kind, tmp_path, [DOCUMENTS[0], np.array(document), DOCUMENTS[2]])
    with pytest.raises(CorruptInputError, match=said):
        documents_of(path)


def test_negative_ids_do_not_fit(tmp_path):
    path = write_megatron(tmp_path / "x", [np.array([10, -1, 2])], dtype="<i4")
    with pytest.raises(CorruptInputError, match="found -1"):
        documents_of(path)


HUGE = 2**60
LENGTHS = np.array([len(each) for each in DOCUMENTS])
STARTS = (np.cumsum(LENGTHS) - LENGTHS) * 2


@pytest.mark.parametrize(
    ("lies", "said"),
    [
        ({"magic": b"NOTANIDX\0"}, "expected Megatron's index"),
        ({"version": 2}, "expected version 1, found 2"),
        ({"code": 6}, "found the code 6"),
        ({"code": 200}, "found the code 200"),
        ({"code": 4}, "cut off or of another set"),
        ({"count": HUGE}, f"{HUGE} sequences and 5 borders"),
        ({"num_borders": HUGE}, f"4 sequences and {HUGE} borders"),
        ({"count": 2**64 - 1, "num_borders": 2**64 - 1}, "it is damaged or cut off"),
        ({"count": 0, "num_borders": 0, "lengths": LENGTHS[:0], "starts": LENGTHS[:0], "borders": LENGTHS[:0]}, "none"),
        ({"lengths": -LENGTHS}, "cut off or of another set"),
        ({"lengths": np.array([-1, 7, 2, 122]) + 0}, "cut off or|negative lengths"),
        ({"lengths": np.array([2**31 - 1, 1, 2, 121])}, "do not lie end to end"),
        ({"starts": STARTS + np.array([0, 2, 0, 0])}, "do not lie end to end"),
        ({"starts": STARTS - np.array([HUGE, 0, 0, 0])}, "do not lie end to end"),
        ({"starts": STARTS + HUGE}, "cut off or of another set"),
        ({"borders": np.array([0, 1, 2, 3, 9])}, "end with sequence 4, it ends with 9"),
        ({"borders": np.array([1, 1, 2, 3, 4])}, "go backwards or too far"),
        ({"borders": np.array([0, 3, 1, 3, 4])}, "go backwards or too far"),
        ({"borders": np.array([0, 2**62, -(2**62), 3, 4])}, "go backwards or too far"),
        ({"borders": np.array([0, -5, 2, 3, 4])}, "go backwards or too far"),
    ],
)
def test_a_lying_idx_is_refused_and_costs_no_memory(lies, said, tmp_path):
    path = write_megatron(tmp_path / "x", DOCUMENTS, **lies)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptInputError, match=said):
            documents_of(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("row", range(1, 5))
def test_a_lying_idx_is_refused_in_the_middle_too(row, tmp_path):
    path = write_megatron(tmp_path / "x", DOCUMENTS, borders=np.array([0, -5, -4, -(2**63), 4]))
    if row == 4:
        assert documents_of(path, row) == ([], [])
        return
    with pytest.raises(CorruptInputError, match="go backwards or too far"):
        documents_of(path, row)


@pytest.mark.parametrize("cut", [0, 1, 9, 33, 34, 60, -1])
def test_a_cut_idx(cut, tmp_path):
    path = write_megatron(tmp_path / "x", DOCUMENTS)
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:cut])
    with pytest.raises(CorruptInputError, match=r"x\.idx: "):
        documents_of(path)


@pytest.mark.parametrize("change", [-2, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_ids_of_another_length(kind, change, tmp_path):
    path = write(kind, tmp_path, DOCUMENTS)
    ids = path if kind == "datatrove" else path.with_suffix(".bin")
    ids.write_bytes(ids.read_bytes()[:change] if change < 0 else ids.read_bytes() + b"\0\0")
    with pytest.raises(CorruptInputError, match="one of the two is cut off or of another set"):
        documents_of(path)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([], "found 0"),
        ([3, 2, 6, 127], "go backwards or too far"),
        ([3, 2**63, 6, 127], "go backwards or too far"),
        ([3, 500, 6, 127], "go backwards or too far"),
        ([3, 4, 6, HUGE], "neither 2 nor 4"),
        ([3, 4, 6, 2**64 - 1], "neither 2 nor 4"),
    ],
)
def test_a_lying_datatrove_index_is_refused(ends, said, tmp_path):
    path = write_datatrove(tmp_path / "x.ds", DOCUMENTS)
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    with pytest.raises(CorruptInputError, match=said):
        documents_of(path)


@given(body=st.binary(max_size=300), ids=st.binary(max_size=40), kind=st.sampled_from(KINDS))
def test_garbage_is_refused_in_one_way(body, ids, kind):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / ("x.ds" if kind == "datatrove" else "x.bin")
        path.write_bytes(ids)
        (folder / ("x.ds.index" if kind == "datatrove" else "x.idx")).write_bytes(body)
        with suppress(CorruptInputError):
            documents_of(path)


@given(position=st.integers(0, 1_000), byte=st.integers(0, 255))
def test_a_changed_byte_of_an_idx_is_refused_or_harmless(position, byte):
    with tempfile.TemporaryDirectory() as name:
        path = write_megatron(Path(name) / "x", DOCUMENTS)
        index = path.with_suffix(".idx")
        body = bytearray(index.read_bytes())
        body[position % len(body)] = byte
        index.write_bytes(bytes(body))
        with suppress(CorruptInputError):
            found, _ = documents_of(path)
            assert np.array_equal(np.concatenate(found), np.concatenate(DOCUMENTS))


def test_what_is_not_there(tmp_path):
    with pytest.raises(InputNotFoundError, match=r"expected a file of ids x\.bin, found none"):
        plan_of(tmp_path / "x")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(InputNotFoundError, match=r"x\.idx: expected the index"):
        plan_of(tmp_path / "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputNotFoundError, match="found none"):
        plan_of(tmp_path / "empty")


def test_a_document_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "MAX_DOCUMENT_IDS", 100)
    monkeypatch.setattr(token_files, "TASK_IDS", 50)
    with pytest.raises(SourceError, match="document 3 has 121 ids, expected at most 100"):
        documents_of(write_megatron(tmp_path / "x", DOCUMENTS))


@pytest.mark.parametrize("given_as", ["x", "x.bin", "x.idx", ""])
def test_a_file_may_be_named_by_prefix_ids_index_or_folder(given_as, tmp_path):
    write_megatron(tmp_path / "x", DOCUMENTS)
    assert [file.name for file in plan_of(tmp_path / given_as).files] == ["x.bin"]


def test_files_of_a_folder_come_in_natural_order(tmp_path):
    for name in ("x10", "x9", "x1"):
        write_megatron(tmp_path / name, DOCUMENTS)
    assert [file.name for file in plan_of(tmp_path).files] == ["x1.bin", "x9.bin", "x10.bin"]


def test_the_digest_covers_the_index(tmp_path):
    path = write_megatron(tmp_path / "x", DOCUMENTS)
    (before,) = plan_of(path).files
    write_megatron(path, [np.concatenate(DOCUMENTS[:2]), *DOCUMENTS[2:]])
    (after,) = plan_of(path).files
    assert before.digest != after.digest


def test_the_vocabulary_that_files_say_they_were_made_with(tmp_path):
    digest = "ab" * 32
    write_megatron(tmp_path / "x", DOCUMENTS)
    write_datatrove(tmp_path / "y.ds", DOCUMENTS)
    assert recorded_vocabularies(plan_of(tmp_path / "x")) == {}
    (tmp_path / "y.ds.metadata").write_text(f"genesis/{digest}|2\n127\n127 T")
    assert recorded_vocabularies(plan_of(tmp_path / "y.ds")) == {"y.ds": digest}
    (tmp_path / "y.ds.metadata").write_text("gpt2|2\n127\n127 T")
    assert recorded_vocabularies(plan_of(tmp_path / "y.ds")) == {}
    record = {"format": 1, "request": {"name": "x"}, "vocabulary_sha256": digest}
    (tmp_path / "genesis-export.json").write_text(json.dumps(record))
    assert recorded_vocabularies(plan_of(tmp_path / "x")) == {"x.bin": digest}
    assert recorded_vocabularies(plan_of(tmp_path / "y.ds")) == {}
