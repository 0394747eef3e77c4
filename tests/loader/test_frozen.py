"""Loading from a store whose vocabulary was made elsewhere: its EOS, its tokenizer, and what does not fit it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from genesis.populate.options import PopulateOptions
from genesis.populate.pipeline import populate
from genesis.store import FolderStore
from genesis.tokenizer import FrozenTokenizer, NeuroTokenizer, import_vocabulary
from loader import GenesisDataLoader, GenesisDataset
from loader.errors import HostileStoreError, TokenizerSyncError
from loader.replay import batch_sha256
from manifests import SourceSpec, sha256_hex, vocabulary_key
from tests.support.documents import documents, write_parquet
from tests.support.foreign_tokenizers import reference, write_foreign
from tests.support.token_store import TokenStore

TEXTS = documents(seed=31, count=150)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of OLMo's form, whose EOS is 0 and in which 2 is a character."""
    folder = tmp_path_factory.mktemp("frozen")
    text = write_parquet(folder / "a.parquet", list(TEXTS), 30)
    options = PopulateOptions(
        spec=SourceSpec(name="alpha"),
        store_url=str(folder / "store"),
        inputs=(str(text),),
        num_workers=1,
        shard_tokens=2000,
        tokenizer=import_vocabulary(str(write_foreign(folder, "olmo"))),
    )
    populate(options, FolderStore(folder / "store"))
    return folder / "store"


def dataset_of(store: Path, cache: Path, **options: object) -> GenesisDataset:
    given = {"seq_len": 64, "batch_size": 4, "cache_dir": cache, "timeout_s": 20.0}
    return GenesisDataset(store, "node-a", **{**given, **options})  # type: ignore[arg-type]


def test_documents_are_told_apart_by_the_stores_own_eos(store, tmp_path):
    dataset = dataset_of(store, tmp_path, extras=("document_ids", "positions", "cu_seqlens"))
    assert dataset.eos_id == 0
    batch = next(iter(dataset))
    ids = batch["input_ids"].numpy()
    after_eos = np.zeros(ids.shape, dtype=bool)
    after_eos[:, 1:] = ids[:, :-1] == 0
    assert after_eos.any()
    assert not np.array_equal(ids == 2, ids == 0)
    np.testing.assert_array_equal(batch["document_ids"].numpy(), np.cumsum(after_eos, axis=1))
    assert (batch["positions"].numpy()[after_eos] == 0).all()
    begins = after_eos.copy()
    begins[:, 0] = True
    assert batch["cu_seqlens"].tolist() == [*np.flatnonzero(begins).tolist(), ids.size]


def test_batches_decode_to_the_text_and_are_replayed(store, tmp_path):
    dataset = dataset_of(store, tmp_path, epochs=1)
    node = GenesisDataLoader("node-a", store, cache_dir=tmp_path, timeout_s=20.0)
    assert isinstance(node.tokenizer, FrozenTokenizer)
    assert node.eos_id == node.tokenizer.eos_id == 0
    assert node.tokenizer.encode(TEXTS[0]).tolist() == reference("olmo")(TEXTS[0])
    whole = "\x00".join(TEXTS)
    batch = next(iter(dataset))
    for row in batch["input_ids"]:
        pieces = [piece for piece in _documents(row, 0) if len(piece) > 10]
        assert pieces
        for piece in pieces:
            text = node.tokenizer.decode(piece.numpy()).replace("\ufffd", "")
            assert text in whole
    assert batch_sha256(dataset.replay("node-a", 0)) == batch_sha256(batch)


def _documents(row: torch.Tensor, eos_id: int) -> list[torch.Tensor]:
    ends = torch.nonzero(row == eos_id).flatten().tolist()
    return [row[start:end] for start, end in zip([0, *(end + 1 for end in ends)], [*ends, len(row)], strict=True)]


def test_the_vocabulary_stays_the_same_and_another_kind_is_refused(store, tmp_path):
    node = GenesisDataLoader("node-a", store, cache_dir=tmp_path, timeout_s=20.0)
    assert node.sync_tokenizer() is True
    assert node.sync_tokenizer() is False
    other = GenesisDataLoader("node-a", store, cache_dir=tmp_path, timeout_s=20.0, tokenizer=NeuroTokenizer.empty())
    with pytest.raises(TokenizerSyncError, match="made elsewhere"):
        other.sync_tokenizer()


def test_a_vocabulary_with_another_eos_than_the_manifest_names_is_refused(store, tmp_path):
    """By its manifest the store is of our own form; the chain of digests holds."""
    lying = TokenStore.of(tmp_path / "store", 3)
    body = (store / "tokenizer.json").read_bytes()
    key = vocabulary_key(sha256_hex(body))
    lying.put(key, body)
    reference_ = lying.tokenizer.model_copy(update={"key": key, "sha256": sha256_hex(body), "next_merge_id": 200_000})
    lying.put_manifest(lying.manifest.model_copy(update={"tokenizer": reference_}))
    node = GenesisDataLoader("node-a", lying.folder, cache_dir=tmp_path / "cache", timeout_s=5.0)
    with pytest.raises(
        HostileStoreError, match="expected the vocabulary with EOS 2 that the manifest names, found one"
    ):
        node.sync_tokenizer()
