"""Exports hold every whole document of the chosen shards, once and in order, whatever lies across their borders."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.errors import StoreError, UsageError
from genesis.export import ExportFormat, ExportOptions, export_shards
from genesis.export.options import id_dtype, parse_shard_range
from genesis.export.writing import metric_count, npy_header
from genesis.store import FolderStore
from manifests import (
    ContractError,
    ShardFormatError,
    SignatureError,
    encode_shard,
    generate_private_key,
    packed_key,
    sha256_hex,
    shard_key,
)
from tests.support.exporting import (
    document_store,
    random_documents,
    read_export,
    read_mds,
    same,
    whole_documents,
)

TARGETS = [each.value for each in ExportFormat]
LONG = np.append(np.full(2_345, 77), 2)
"""A document over several shards."""
DOCUMENTS = {
    "alpha": [*random_documents(1, 40), LONG, *random_documents(2, 30)],
    "beta": [*random_documents(3, 25), LONG],
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Two sources whose shards take turns; beta's last document ends in no shard."""
    return document_store(tmp_path_factory.mktemp("stored"), DOCUMENTS)


def export(store, folder, target, **options):
    return export_shards(FolderStore(store.folder), folder, ExportOptions(target=ExportFormat(target), **options))


@pytest.mark.parametrize("target", TARGETS)
def test_every_whole_document_is_there_once_and_in_order(stored, target, tmp_path):
    expected = whole_documents(stored, DOCUMENTS)
    result = export(stored, tmp_path / "out", target)
    assert same(read_export(target, tmp_path / "out"), expected)
    assert (result.documents, result.tokens) == (len(expected), sum(map(len, expected)))
    assert result.complete
    assert result.tokens + result.cut_tokens == sum(entry.tokens for entry in stored.entries)
    assert not list((tmp_path / "out").glob("*.part"))
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("target", TARGETS)
def test_one_source_alone(stored, target, tmp_path):
    export(stored, tmp_path, target, source="beta")
    documents = {"beta": DOCUMENTS["beta"]}
    held = document_store(tmp_path / "beta-alone", documents)
    assert same(read_export(target, tmp_path), whole_documents(held, documents))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("packed", [True, False])
def test_ids_above_sixteen_bits(target, packed, tmp_path):
    documents = {"wide": random_documents(5, 60, ids=65_700)}
    store = document_store(tmp_path / "store", documents, next_merge_id=65_700, packed=packed)
    result = export(store, tmp_path / "out", target)
    assert result.dtype == ("<i4" if target == "megatron" else "<u4")
    assert same(read_export(target, tmp_path / "out"), whole_documents(store, documents))


def test_the_width_of_an_id_follows_the_vocabulary():
    assert {id_dtype(target, 65_536).str for target in ExportFormat} == {"<u2"}
    assert [id_dtype(target, 65_537).str for target in ExportFormat] == ["<i4", "<u4", "<u4", "<u4"]


@settings(max_examples=25)
@given(data=st.data())
def test_ranges_hold_each_document_once(data):
    """Whatever the documents and the borders: exports of neighbouring ranges are the export of all, in pieces."""
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=3, max_size=30))
    documents = {"alpha": [np.append(np.arange(10, 10 + length), 2) for length in lengths]}
    documents["beta"] = list(reversed(documents["alpha"]))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # Some thousand of them, and no power is cut here.
        folder = Path(name)
        store = document_store(folder / "store", documents, shard_tokens=data.draw(st.integers(1, 40)), turns=1)
        if not store.entries:
            return
        borders = data.draw(st.sets(st.integers(0, len(store.entries)), max_size=3)) | {0, len(store.entries)}
        found = []
        for source in sorted({entry.source for entry in store.entries}):
            for first, end in pairwise(sorted(borders)):
                try:
                    export(store, folder / f"{source}-{first}", "npy", source=source, first_shard=first, end_shard=end)
                except UsageError as error:
                    assert "none; nothing is exported" in str(error)
                    continue
                found += [each.copy() for each in read_export("npy", folder / f"{source}-{first}")]
        assert same(found, whole_documents(store, documents))


def test_windows_fill_with_a_source_s_ids_and_cross_documents(stored, tmp_path):
    result = export(stored, tmp_path, "mds", seq_len=64, size_limit_bytes=4096)
    windows = read_mds(tmp_path)
    rows = {name: np.concatenate(each) for name, each in DOCUMENTS.items()}
    held = {name: sum(entry.tokens for entry in stored.entries if entry.source == name) for name in rows}
    expected = [rows[name][at : at + 64] for name in sorted(rows) for at in range(0, held[name] - 63, 64)]
    assert same(windows, expected)
    assert result.cut_tokens == sum(held.values()) - 64 * len(expected)


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"compression": "zstd:7", "hashes": ("sha256",)}])
def test_mds_files_keep_to_their_size(stored, options, tmp_path):
    export(stored, tmp_path, "mds", size_limit_bytes=3000, **options)
    assert same(read_mds(tmp_path), whole_documents(stored, DOCUMENTS))
    shards = json.loads((tmp_path / "index.json").read_text())["shards"]
    assert len(shards) > 5
    for shard in shards:
        assert shard["raw_data"]["bytes"] <= 3000 or shard["samples"] == 1
        assert shard["size_limit"] == 3000


@pytest.mark.parametrize("target", TARGETS)
def test_the_number_of_threads_changes_nothing(stored, target, tmp_path):
    export(stored, tmp_path / "one", target, threads=1)
    export(stored, tmp_path / "many", target, threads=9)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes()


def test_a_damaged_transfer_form_is_passed_over_for_the_shard_itself(tmp_path):
    store = document_store(tmp_path / "store", DOCUMENTS)
    (store.folder / packed_key(1)).unlink()
    (store.folder / packed_key(2)).write_bytes(b"nothing of the kind")
    export(store, tmp_path / "out", "npy")
    assert same(read_export("npy", tmp_path / "out"), whole_documents(store, DOCUMENTS))


@pytest.mark.parametrize("packed", [True, False])
def test_a_changed_shard_is_refused_and_the_same_command_goes_on_once_it_is_mended(packed, tmp_path):
    store = document_store(tmp_path / "store", DOCUMENTS, packed=packed)
    key = store.folder / shard_key(4)
    sound = key.read_bytes()
    changed = bytearray(sound)
    changed[1000] ^= 1
    key.write_bytes(bytes(changed))
    if packed:
        (store.folder / packed_key(4)).write_bytes(b"")
    with pytest.raises(ShardFormatError, match=r"shard_4\.pt: expected sha256"):
        export(store, tmp_path / "out", "megatron")
    assert not list((tmp_path / "out").glob("*.bin"))
    key.write_bytes(sound)
    export(store, tmp_path / "out", "megatron")
    assert same(read_export("megatron", tmp_path / "out"), whole_documents(store, DOCUMENTS))


def _lie(store, shard_id, ids):
    """Another shard that the index vouches for."""
    image = bytes(encode_shard(ids))
    store.change(shard_id, sha256=store.put(shard_key(shard_id), image), packed=None)
    store.publish()


def test_documents_that_contradict_the_index_are_refused(tmp_path):
    store = document_store(tmp_path / "store", DOCUMENTS)
    _lie(store, 1, np.full(store.shard_tokens, 2))
    with pytest.raises(ContractError, match=r"shard 1: expected .* documents to end in it, found 500"):
        export(store, tmp_path / "out", "npy")


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    store = document_store(tmp_path / "store", DOCUMENTS)
    _lie(store, 1, np.full(store.shard_tokens, 70_000))
    with pytest.raises(ShardFormatError, match="expected ids of 0 to 999, found 70000"):
        export(store, tmp_path / "out", "npy")


def test_an_index_that_joins_documents_wrongly_is_refused(tmp_path):
    store = document_store(tmp_path / "store", {"alpha": DOCUMENTS["alpha"]})
    store.change(3, first_document=store.entries[2].last_document + 5, last_document=99)
    store.publish()
    with pytest.raises(ContractError, match="shard 3: expected document"):
        export(store, tmp_path / "out", "npy")


def test_the_signature_is_asked_for(tmp_path):
    key, other = generate_private_key(), generate_private_key()
    store = document_store(tmp_path / "store", DOCUMENTS, private_key=key)
    options = ExportOptions(target=ExportFormat.NPY)
    readable = FolderStore(store.folder)
    with pytest.raises(SignatureError):
        export_shards(readable, tmp_path / "out", options, public_key=other.public_key())
    assert not (tmp_path / "out").exists()
    assert export_shards(readable, tmp_path / "out", options, public_key=key.public_key()).complete


def test_files_of_others_are_neither_overwritten_nor_removed(stored, tmp_path):
    (tmp_path / "tokens.idx").write_text("precious")
    (tmp_path / "beside").write_text("precious")
    with pytest.raises(UsageError, match=r"tokens\.idx is there already"):
        export(stored, tmp_path, "megatron")
    assert (tmp_path / "tokens.idx").read_text() == "precious"
    export(stored, tmp_path, "megatron", name="other")
    assert (tmp_path / "beside").read_text() == "precious"


def test_a_store_is_not_exported_into_itself(stored):
    with pytest.raises(UsageError, match="is the store itself"):
        export(stored, stored.folder, "npy")


def test_nothing_that_ends_is_an_error_and_leaves_no_file(tmp_path):
    store = document_store(tmp_path / "store", {"alpha": [LONG]})
    with pytest.raises(UsageError, match="nothing is exported"):
        export(store, tmp_path / "out", "mds")
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_document_of_more_ids_than_the_form_counts_is_refused(stored, tmp_path, monkeypatch):
    monkeypatch.setattr("genesis.export.writing._MEGATRON_LONGEST", 2_000)
    with pytest.raises(UsageError, match=r"has 2345 ids or more|at most 2000"):
        export(stored, tmp_path / "megatron", "megatron")
    monkeypatch.setattr("genesis.export.mds._LIMIT_BYTES", 4_000)
    with pytest.raises(UsageError, match="MDS has room for 3999"):
        export(stored, tmp_path / "mds", "mds", size_limit_bytes=2_000)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seq_len": 8}, "--seq-len goes with --to mds"),
        ({"target": ExportFormat.MDS, "seq_len": 0}, "--seq-len"),
        ({"target": ExportFormat.MDS, "compression": "gz"}, "--compression"),
        ({"target": ExportFormat.MDS, "hashes": ("nonsense",)}, "--hash"),
        ({"target": ExportFormat.MDS, "size_limit_bytes": 2**32}, "--size-limit"),
        ({"name": "../escape"}, "--name"),
        ({"name": ""}, "--name"),
        ({"first_shard": 4, "end_shard": 4}, "--shards"),
        ({"threads": 0}, "--threads"),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(UsageError, match=said):
        ExportOptions(**{"target": ExportFormat.NPY, **options})


@pytest.mark.parametrize(("options", "said"), [({"source": "gamma"}, "alpha, beta"), ({"first_shard": 99}, "99 on")])
def test_what_the_store_does_not_have(stored, options, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        export(stored, tmp_path, "npy", **options)


@pytest.mark.parametrize(("text", "expected"), [("0:10", (0, 10)), ("7:", (7, None)), (":3", (0, 3))])
def test_ranges_are_parsed(text, expected):
    assert parse_shard_range(text) == expected


@pytest.mark.parametrize("text", [":", "", "3", "a:b", "-1:3", "1:2:3"])
def test_what_is_no_range(text):
    with pytest.raises(UsageError, match="--shards"):
        parse_shard_range(text)


@given(count=st.integers(0, 2**50), dtype=st.sampled_from(["<u2", "<u4", "<i8"]))
def test_an_npy_header_is_numpy_s(count, dtype):
    header = npy_header(np.dtype(dtype), count)
    assert len(header) == 128
    with tempfile.TemporaryFile() as file:
        file.write(header)
        file.seek(0)
        assert np.lib.format.read_magic(file) == (1, 0)
        assert np.lib.format.read_array_header_1_0(file) == ((count,), False, np.dtype(dtype))


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7.00 T"), (999, "999 T"), (1234, "1.23 kT"), (56_789_012, "56.8 MT"), (10**12, "1.00 TT")]
)
def test_counts_as_datatrove_writes_them(count, text):
    assert metric_count(count) == text


def test_an_output_that_cannot_be_written_is_one_line(stored, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match="there is a file where a folder is needed"):
        export(stored, tmp_path / "file", "npy")


def test_the_record_tells_the_origin(stored, tmp_path):
    export(stored, tmp_path, "npy", source="alpha")
    record = json.loads((tmp_path / "genesis-export.json").read_text())
    assert record["complete"]
    assert record["vocabulary_sha256"] == sha256_hex((stored.folder / "tokenizer.json").read_bytes())
    assert record["documents"] == len(read_export("npy", tmp_path))
    assert record["total_shards"] == len(stored.entries)
