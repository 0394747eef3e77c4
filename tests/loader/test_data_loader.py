"""`GenesisDataLoader`: the methods of the specification, batches that can be made again, vocabularies that grow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, default_collate

from genesis.tokenizer import NeuroTokenizer
from loader import (
    GenesisDataLoader,
    HostileStoreError,
    LoaderUsageError,
    ManifestRollbackError,
    PlateauRule,
    ShardTokens,
    StateMismatchError,
    TokenizerSyncError,
    get_assigned_shards,
)
from manifests import MANIFEST_KEY, TokenizerRef, sha256_hex, vocabulary_key
from tests.support.token_store import TokenStore, fixed_ids, vocabulary_of

Make = Callable[..., GenesisDataLoader]


@pytest.fixture
def make_loader(shared_cache: Path) -> Make:
    def make(store: TokenStore, node_id: str = "node-a", **options: Any) -> GenesisDataLoader:
        return GenesisDataLoader(node_id, store.url, **{"cache_dir": shared_cache, "timeout_s": 20.0, **options})

    return make


def test_the_specifications_methods(six_shards: TokenStore, make_loader: Make) -> None:
    loader = make_loader(six_shards, count=4)
    assert list(loader.assigned_shards) == get_assigned_shards("node-a", 6, 4)
    assert loader.current_shard_id == loader.assigned_shards[0]
    shard = loader.download_shard(3)
    assert shard.dtype == torch.int64
    assert torch.equal(shard, torch.from_numpy(fixed_ids(3)))
    inputs, labels = loader.get_batch(shard, 5, 100)
    assert inputs.shape == labels.shape == (5, 100)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert loader.get_batch(shard)[0].shape == (4, 512)
    loader = make_loader(six_shards)
    shard = loader.download_shard(0)
    inputs, labels = loader.get_batch(shard, 30, 1_999)
    assert torch.equal(inputs, shard[:-1].expand(30, -1))
    assert torch.equal(labels, shard[1:].expand(30, -1))
    firsts = {int(row[0] == shard[1]) for row in loader.get_batch(shard, 200, 1_998)[0]}
    assert firsts == {0, 1}
    for batch_size, seq_len in ((0, 10), (4, 0), (4, 2_000), (-1, 10)):
        with pytest.raises(LoaderUsageError):
            loader.get_batch(shard, batch_size, seq_len)


def test_a_batch_can_be_made_again(six_shards: TokenStore, make_loader: Make) -> None:
    loader = make_loader(six_shards)
    shard = loader.download_shard(2)
    batches = [loader.get_batch(shard, 3, 50) for _ in range(6)]
    other = make_loader(six_shards)
    again = other.download_shard(2)
    assert torch.equal(other.get_batch(again, 3, 50, step=4)[1], batches[4][1])
    assert torch.equal(other.get_batch(again, 3, 50)[0], batches[0][0])
    assert not torch.equal(batches[0][0], batches[1][0])
    stranger = make_loader(six_shards, "node-b")
    assert not torch.equal(stranger.get_batch(stranger.download_shard(2), 3, 50)[0], batches[0][0])
    assert not torch.equal(other.get_batch(other.download_shard(1), 3, 50, step=0)[0], batches[0][0])


def test_whose_tensor_it_is_decides_the_windows_and_nothing_else(six_shards: TokenStore, make_loader: Make) -> None:
    loader = make_loader(six_shards)
    shards = [loader.download_shard(shard_id) for shard_id in (*range(6), *range(6))]
    expected = [loader.get_batch(shard, 3, 50, step=4)[0] for shard in shards]
    for shard_id in range(6):
        alone = make_loader(six_shards)
        shard = alone.download_shard(shard_id)
        for batch in (
            expected[6 + shard_id],
            alone.get_batch(shard, 3, 50, step=4)[0],
            alone.get_batch(shard.clone(), 3, 50, step=4, shard_id=shard_id)[0],
        ):
            assert torch.equal(batch, expected[shard_id])


@pytest.mark.parametrize("change", [torch.clone, lambda shard: shard[:1_000], lambda shard: torch.zeros(2_000).long()])
def test_a_tensor_that_is_no_shard_s(six_shards, make_loader, change):
    loader = make_loader(six_shards)
    other = change(loader.download_shard(2))
    with pytest.raises(LoaderUsageError, match="shard_id="):
        loader.get_batch(other, 3, 50)
    assert loader.state_dict()["step"] == 0
    assert loader.get_batch(other, 3, 50, shard_id=2)[0].shape == (3, 50)
    assert loader.state_dict()["step"] == 1


def test_rotation_on_exhaustion_and_on_plateau(six_shards: TokenStore, make_loader: Make) -> None:
    loader = make_loader(six_shards, count=3)
    visited = []
    for _ in range(7):
        visited.append(loader.current_shard_id)
        shard = loader.download_shard(loader.current_shard_id)
        batches = 0
        while not loader.should_rotate():
            loader.get_batch(shard, 2, 100)
            batches += 1
        assert batches == 10  # 2,000 ids of 200 a batch.
        loader.rotate()
    assert visited == [*(loader.assigned_shards * 3)][:7]
    loader = make_loader(six_shards, plateau=PlateauRule("absolute", min_steps=6, history=5, window=3))
    shard = loader.download_shard(loader.current_shard_id)
    steps = []
    for _ in range(3):
        for step in range(1, 20):
            loader.get_batch(shard, 1, 10)
            loader.report_loss(0.01)
            if loader.should_rotate():
                steps.append(step)
                loader.rotate()
                break
    assert steps == [6, 6, 6]


def test_a_state_resumes(six_shards: TokenStore, make_loader: Make) -> None:
    def run(loader: GenesisDataLoader, steps: int) -> list[str]:
        found = []
        for _ in range(steps):
            shard = loader.download_shard(loader.current_shard_id)
            inputs, _ = loader.get_batch(shard, 2, 60)
            found.append(f"{loader.current_shard_id}:{sha256_hex(inputs.numpy().tobytes())}")
            loader.report_loss(2.0)
            if loader.should_rotate():
                loader.rotate()
        return found

    expected = run(make_loader(six_shards), 60)
    for k in (0, 16, 17, 18, 43):
        first = make_loader(six_shards)
        found = run(first, k)
        second = make_loader(six_shards)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert found + run(second, 60 - k) == expected


def test_states_of_others_are_refused(six_shards: TokenStore, make_loader: Make, tmp_path: Path) -> None:
    loader = make_loader(six_shards)
    state = loader.state_dict()
    for change in ({"node_id": "node-b"}, {"seed": 4}, {"version": 2}, {"shards": [0, 6]}, {"step": -1}, {"more": 1}):
        with pytest.raises(StateMismatchError):
            loader.load_state_dict({**state, **change})
    with pytest.raises(StateMismatchError):
        loader.load_state_dict({})


def test_a_run_stays_pinned_while_its_store_grows(tmp_path: Path, make_loader: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 5)
    loader = make_loader(store, cache_dir=tmp_path / "cache")
    state, shards = loader.state_dict(), loader.assigned_shards
    store.grow(8)
    (tmp_path / "cache" / "stores").rename(tmp_path / "forgotten")
    grown = make_loader(store, cache_dir=tmp_path / "cache")
    assert grown.assigned_shards != shards
    grown.load_state_dict(state)
    assert grown.assigned_shards == shards


def test_vocabularies_that_extend_the_one_in_use_or_are_smaller(tmp_path: Path, make_loader: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 2, next_merge_id=900)
    loader = make_loader(store, cache_dir=tmp_path / "cache")
    assert loader.tokenizer.current_vocab_size == 900
    assert not loader.sync_tokenizer()
    store.next_merge_id = 1_000
    store.publish()
    assert loader.sync_tokenizer()
    assert loader.tokenizer.current_vocab_size == 1_000
    assert loader.tokenizer.decode(loader.tokenizer.encode("Grüße")) == "Grüße"
    store = TokenStore.of(tmp_path / "smaller", 2, next_merge_id=900)
    mine = NeuroTokenizer.from_file(vocabulary_of(1_000))
    loader = make_loader(store, cache_dir=tmp_path / "other", tokenizer=mine)
    assert not loader.sync_tokenizer()
    assert loader.tokenizer.current_vocab_size == 1_000


def publish_vocabulary(store: TokenStore, value: dict[str, Any]) -> None:
    """Whatever it is, the manifest vouches for it."""
    body = json.dumps(value).encode()
    digest = store.put("vocabulary/new.json", body)
    store.put(vocabulary_key(digest), body)
    store.publish(
        tokenizer=TokenizerRef(key=vocabulary_key(digest), sha256=digest, next_merge_id=value["next_merge_id"])
    )


def test_vocabularies_that_would_change_an_id_are_refused(tmp_path: Path, make_loader: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 2, next_merge_id=900)
    loader = make_loader(store, cache_dir=tmp_path / "cache")
    in_use = loader.tokenizer
    other = vocabulary_of(1_000).to_object()
    other["merges"] = {"200_200" if n == 5 else pair: 266 + n for n, pair in enumerate(other["merges"])}
    publish_vocabulary(store, other)
    with pytest.raises(TokenizerSyncError, match="does not extend"):
        loader.sync_tokenizer()
    assert loader.tokenizer is in_use
    assert in_use.current_vocab_size == 900


def test_vocabularies_that_keep_the_contract_and_are_none(tmp_path: Path, make_loader: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 2)
    loader = make_loader(store, cache_dir=tmp_path / "cache")
    assert loader.sync_tokenizer()
    value = vocabulary_of(1_001).to_object()
    # Its last merge is of an id that does not come before it.
    value["merges"] = {pair: number for pair, number in value["merges"].items() if number < 1_000}
    value["merges"]["900000_10"] = 1_000
    publish_vocabulary(store, value)
    with pytest.raises(HostileStoreError, match="a vocabulary that is none"):
        loader.sync_tokenizer()
    assert loader.tokenizer.current_vocab_size == 1_000
    with pytest.raises(HostileStoreError, match="a vocabulary that is none"):
        _ = make_loader(store, cache_dir=tmp_path / "other").tokenizer


def test_an_old_manifest_leaves_the_vocabulary_in_use(tmp_path: Path, make_loader: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 2)
    old = (store.folder / MANIFEST_KEY).read_bytes()
    store.grow(1)
    loader = make_loader(store, cache_dir=tmp_path / "cache", timeout_s=1.0)
    assert loader.sync_tokenizer()
    store.put(MANIFEST_KEY, old)
    with pytest.raises(ManifestRollbackError):
        loader.sync_tokenizer()
    assert loader.tokenizer.current_vocab_size == 1_000


MakeTokens = Callable[..., ShardTokens]


@pytest.fixture
def make_tokens(shared_cache: Path) -> MakeTokens:
    def make(store: TokenStore, shards: list[int] | None = None, **options: Any) -> ShardTokens:
        return ShardTokens(
            store.url, shards, **{"seq_len": 100, "cache_dir": shared_cache, "timeout_s": 20.0, **options}
        )

    return make


def test_every_window_by_its_index_of_more_shards_than_are_held_open(six_shards, make_tokens, tmp_path):
    dataset = make_tokens(six_shards, [4, 1])
    assert len(dataset) == 2 * 19
    for index in range(len(dataset)):
        ids, start = fixed_ids([4, 1][index // 19]), index % 19 * 100
        window = dataset[index]
        assert np.array_equal(window["input_ids"], ids[start : start + 100])
        assert np.array_equal(window["labels"], ids[start + 1 : start + 101])
    assert torch.equal(dataset[-1]["labels"], dataset[37]["labels"])
    assert torch.equal(dataset[-38]["labels"], dataset[0]["labels"])
    for index in (38, -39):
        with pytest.raises(IndexError):
            dataset[index]
    indices = [33, 0, 27, 27, -1, 20]
    for index, window in zip(indices, dataset.__getitems__(indices), strict=True):
        assert torch.equal(window["input_ids"], dataset[index]["input_ids"])
        assert torch.equal(window["labels"], dataset[index]["labels"])
    for shards, seq_len in (([6], 100), ([-1], 100), ([0], 0), ([0], 2_000), ([0], -5)):
        with pytest.raises(LoaderUsageError):
            make_tokens(six_shards, shards, seq_len=seq_len)
    dataset[22]["input_ids"].zero_()
    assert np.array_equal(dataset[22]["input_ids"], fixed_ids(1)[300:400]), "a batch is a copy"
    store = TokenStore.of(tmp_path / "store", 12, shard_tokens=300)
    dataset = make_tokens(store, seq_len=299, cache_dir=tmp_path / "cache")
    for _ in range(2):
        for shard in range(12):
            assert np.array_equal(dataset[shard]["input_ids"], fixed_ids(shard, 300)[:-1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_over_any_number_of_workers(six_shards: TokenStore, make_tokens: MakeTokens, workers: int) -> None:
    dataset = make_tokens(six_shards)
    order = list(RandomSampler(dataset, generator=torch.Generator().manual_seed(5)))
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=workers)
    batches = list(loader)
    for number, batch in enumerate(batches):
        expected = default_collate([dataset[index] for index in order[8 * number : 8 * number + 8]])
        assert torch.equal(batch["input_ids"], expected["input_ids"])
        assert torch.equal(batch["labels"], expected["labels"])
    assert sum(len(batch["labels"]) for batch in batches) == len(dataset) == 6 * 19


def test_a_state_says_what_indices_mean(six_shards: TokenStore, make_tokens: MakeTokens, tmp_path: Path) -> None:
    state = json.loads(json.dumps(make_tokens(six_shards, [4, 1]).state_dict()))
    make_tokens(six_shards, [4, 1]).load_state_dict(state)
    other = TokenStore(tmp_path / "store")
    for shard in range(6):
        other.add(fixed_ids(shard + 1))
    other.publish()
    for stranger in (
        make_tokens(six_shards, [1, 4]),
        make_tokens(six_shards, [4, 1], seq_len=99),
        make_tokens(other, [4, 1], cache_dir=tmp_path / "cache"),
    ):
        with pytest.raises(StateMismatchError):
            stranger.load_state_dict(state)
    with pytest.raises(StateMismatchError):
        make_tokens(six_shards, [4, 1]).load_state_dict({})
