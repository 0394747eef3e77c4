"""Looking inside a store: documents are cut at EOS, and where they begin and end is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genesis.errors import UsageError
from genesis.inspection import inspect_shard, inspect_vocabulary
from genesis.snapshot import StoreEmptyError, find_shard, previous_of_source, read_vocabulary
from genesis.store import FolderStore
from manifests import FIRST_MERGE_ID, ContractError, decode_shard, shard_key
from tests.support.small_store import copy_small_store, manifest_of, segment_of, write_input


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected") / "store"
    copy_small_store(folder)
    return folder


def documents_of(folder: Path, name: str) -> list[str]:
    lines = write_input(folder.parent, name).read_text(encoding="utf-8").splitlines()
    return [text for line in lines if (text := json.loads(line)["text"]) is not None]


@pytest.mark.slow
def test_all_documents_put_together_are_the_text(folder):
    store, manifest = FolderStore(folder), manifest_of(folder)
    found: dict[str, list[str]] = {"alpha": [], "beta": []}
    for number in range(manifest.total_shards):
        shard = inspect_shard(store, manifest, number, num_documents=10_000)
        assert shard.sha256_matches
        documents = found[shard.entry.source]
        for document in shard.documents:
            if document.begins_before:
                assert document.ordinal == len(documents) - 1
                documents[-1] += document.text
            else:
                assert document.ordinal == len(documents)
                documents.append(document.text)
        assert sum(document.num_tokens for document in shard.documents) == shard.entry.tokens
        assert sum(not document.continues_after for document in shard.documents) == shard.num_eos
        assert shard.documents[-1].ordinal == shard.entry.last_document
    for name, documents in found.items():
        whole = documents_of(folder, name)
        assert documents[:-1] == whole[: len(documents) - 1]
        assert whole[len(documents) - 1].startswith(documents[-1])


@pytest.mark.slow
def test_the_shard_before_is_the_one_of_the_same_source(folder):
    store, manifest, shards = FolderStore(folder), manifest_of(folder), segment_of(folder).shards
    before = {shard.id: previous_of_source(store, manifest, shard) for shard in shards}
    assert [number for number, found in before.items() if found is None] == [0, 9]
    assert all(found.id == number - 1 for number, found in before.items() if found is not None)
    for number in (0, 9):
        first = inspect_shard(store, manifest, number).documents[0]
        assert (first.ordinal, first.begins_before) == (0, False)


def test_a_document_can_be_cut_and_listed(folder):
    store, manifest = FolderStore(folder), manifest_of(folder)
    whole = inspect_shard(store, manifest, 2, num_documents=3)
    cut = inspect_shard(store, manifest, 2, num_documents=3, max_tokens=5, with_tokens=True)
    for long, short in zip(whole.documents, cut.documents, strict=True):
        assert short.num_tokens == long.num_tokens
        assert long.text.startswith(short.text.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert short.is_cut == (long.num_tokens > 5)
        assert short.tokens is not None
        ids = decode_shard((folder / shard_key(2)).read_bytes())
        assert {token.id for token in short.tokens} <= set(ids.tolist())
    assert not any(document.is_cut for document in whole.documents)
    assert inspect_shard(store, manifest, 0, num_documents=0).documents == ()


def test_what_is_not_the_manifests(tmp_path):
    folder = tmp_path / "store"
    store, manifest = copy_small_store(folder), manifest_of(folder)
    (folder / shard_key(1)).write_bytes((folder / shard_key(2)).read_bytes())
    assert not inspect_shard(store, manifest, 1).sha256_matches
    assert manifest.tokenizer is not None
    path = folder / manifest.tokenizer.key
    path.write_bytes(path.read_bytes().replace(b'"beta":40', b'"beta":41'))
    with pytest.raises(ContractError, match="expected sha256"):
        read_vocabulary(store, manifest)
    path = folder / manifest.index[0].key
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ContractError, match="expected sha256"):
        inspect_shard(store, manifest, 0)


def test_vocabulary_in_numbers_and_what_is_not_there(folder, tmp_path):
    found = inspect_vocabulary(FolderStore(folder), manifest_of(folder))
    assert found.ids == FIRST_MERGE_ID + found.merges == 606
    lengths = [len(token.text) for token in found.longest]
    assert lengths == sorted(lengths, reverse=True)
    assert found.mean_token_bytes > 2
    assert found.key is not None
    assert found.sha256.startswith(Path(found.key).stem)
    with pytest.raises(StoreEmptyError, match="genesis learn"):
        read_vocabulary(FolderStore(tmp_path), None)
    for number in (-1, 23, 10**12):
        with pytest.raises(UsageError, match="shards 0 to 22"):
            find_shard(FolderStore(folder), manifest_of(folder), number)
