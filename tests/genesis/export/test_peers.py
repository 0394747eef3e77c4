"""The real megatron-core, mosaicml-streaming and datatrove read what is exported, and what they write is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from genesis.export import ExportFormat, ExportOptions, export_shards
from genesis.populate.options import PopulateOptions, TokenOptions
from genesis.populate.pipeline import populate
from genesis.store import FolderStore
from genesis.token_formats import TokenFormat
from manifests import SourceSpec, decode_shard, shard_key
from tests.support.export_peers import MDS_LIMIT_BYTES, REQUIREMENTS
from tests.support.exporting import document_store, random_documents, read_export, same, split, whole_documents
from tests.support.populating import ROOT, entries
from tests.support.token_store import vocabulary_of

pytestmark = pytest.mark.slow

KINDS = list(REQUIREMENTS)
DOCUMENTS = {"alpha": random_documents(61, 200), "beta": random_documents(62, 100)}


@pytest.fixture(scope="session")
def peer_path(tmp_path_factory):
    """Each as released, in a folder of its own: their requirements would bring other versions of torch and numpy."""
    folders: dict[str, Path] = {}

    def of(kind: str) -> Path:
        given = os.environ.get("GENESIS_TEST_PEERS")  # A folder that has them already.
        if given:
            return Path(given)
        if kind not in folders:
            folder = tmp_path_factory.mktemp(kind)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*command, *REQUIREMENTS[kind]], check=True, timeout=500)
            folders[kind] = folder
        return folders[kind]

    return of


@pytest.fixture
def peer(peer_path):
    def run(what: str, kind: str, source: Path, target: Path) -> None:
        command = [sys.executable, "-m", "tests.support.export_peers", what, kind, str(source), str(target)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{peer_path(kind)}"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=500
        )
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return document_store(tmp_path_factory.mktemp("stored"), DOCUMENTS)


def export(store, folder, target, **options):
    return export_shards(FolderStore(store.folder), folder, ExportOptions(target=ExportFormat(target), **options))


def loaded(path):
    with np.load(path) as found:
        return split(found["ids"], found["ends"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ids", [1_000, 65_700])
@pytest.mark.parametrize("kind", ["megatron", "mds"])
def test_they_read_the_same_documents(kind, ids, peer, tmp_path):
    documents = {"alpha": random_documents(63, 120, ids=ids)}
    store = document_store(tmp_path / "store", documents, next_merge_id=ids)
    export(store, tmp_path / "out", kind)
    peer("read", kind, tmp_path / "out", tmp_path / "found.npz")
    assert same(loaded(tmp_path / "found.npz"), whole_documents(store, documents))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ids", [1_000, 65_700])
def test_datatrove_reads_the_same_ids_and_documents(ids, peer, tmp_path):
    documents = {"alpha": random_documents(64, 120, ids=ids)}
    store = document_store(tmp_path / "store", documents, next_merge_id=ids)
    export(store, tmp_path / "out", "datatrove")
    peer("read", "datatrove", tmp_path / "out", tmp_path / "found.npz")
    whole = whole_documents(store, documents)
    row = np.concatenate(whole)
    row = row[: len(row) // 16 * 16]
    ends = np.cumsum([len(document) for document in whole])
    # Their positions begin anew at every window as well as at every document.
    borders = np.union1d(ends[ends < len(row)], np.arange(16, len(row), 16))
    assert same(loaded(tmp_path / "found.npz"), np.split(row, borders))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options", [{"compression": "zstd", "hashes": ("sha256",)}, {"seq_len": 32}, {"size_limit_bytes": 2_000}]
)
def test_streaming_reads_compressed_files_and_windows(options, peer, stored, tmp_path):
    export(stored, tmp_path / "out", "mds", **options)
    expected = [each.copy() for each in read_export("mds", tmp_path / "out")]
    peer("read", "mds", tmp_path / "out", tmp_path / "found.npz")
    assert same(loaded(tmp_path / "found.npz"), expected)


def given(documents, path):
    np.savez(path, ids=np.concatenate(documents), ends=np.cumsum([len(each) for each in documents]))
    return path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_their_writers_make_the_same_files(kind, peer, stored, tmp_path):
    """Byte for byte, datatrove's metadata aside, which name the tokenizer."""
    options = {"size_limit_bytes": MDS_LIMIT_BYTES, "hashes": ("sha256",)} if kind == "mds" else {}
    export(stored, tmp_path / "ours", kind, **options)
    (tmp_path / "theirs").mkdir()
    peer("write", kind, given(whole_documents(stored, DOCUMENTS), tmp_path / "in.npz"), tmp_path / "theirs")
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "ours").iterdir() if path.name != "genesis-export.json")
    for name in names:
        ours, theirs = (tmp_path / "ours" / name).read_bytes(), (tmp_path / "theirs" / name).read_bytes()
        if name.endswith(".metadata"):
            ours, theirs = ours.partition(b"|")[2], theirs.partition(b"|")[2]
        assert ours == theirs, name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["megatron", "datatrove"])
def test_what_they_write_is_imported(kind, peer, tmp_path):
    documents = random_documents(65, 200)
    (tmp_path / "theirs").mkdir()
    peer("write", kind, given(documents, tmp_path / "in.npz"), tmp_path / "theirs")
    store = FolderStore(tmp_path / "store")
    options = PopulateOptions(
        spec=SourceSpec(name="theirs"), store_url=store.url, inputs=(str(tmp_path / "theirs"),), num_workers=1,
        shard_tokens=500, tokens=TokenOptions(token_format=TokenFormat(kind), vocabulary=vocabulary_of()),
    )  # fmt: skip
    result = populate(options, store)
    assert result.total_shards * 500 + result.unsharded_tokens == sum(map(len, documents))
    row = np.concatenate([decode_shard(store.get(shard_key(entry.id)).body) for entry in entries(store)])
    assert np.array_equal(row, np.concatenate(documents)[: len(row)])
