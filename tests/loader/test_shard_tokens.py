"""`ShardTokens`: every window of some shards by its index, in DataLoader with samplers and workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, default_collate

from loader import LoaderUsageError, ShardTokens, StateMismatchError
from tests.support.token_store import TokenStore, fixed_ids

Make = Callable[..., ShardTokens]


@pytest.fixture
def make_tokens(shared_cache: Path) -> Make:
    def make(store: TokenStore, shards: list[int] | None = None, **options: Any) -> ShardTokens:
        return ShardTokens(
            store.url, shards, **{"seq_len": 100, "cache_dir": shared_cache, "timeout_s": 20.0, **options}
        )

    return make


def test_every_window_by_its_index(six_shards: TokenStore, make_tokens: Make) -> None:
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


def test_many_at_once_are_the_single_ones(six_shards: TokenStore, make_tokens: Make) -> None:
    dataset = make_tokens(six_shards)
    indices = [113, 0, 57, 57, -1, 20]
    for index, window in zip(indices, dataset.__getitems__(indices), strict=True):
        assert torch.equal(window["input_ids"], dataset[index]["input_ids"])
        assert torch.equal(window["labels"], dataset[index]["labels"])


def test_more_shards_than_are_held_open(tmp_path: Path, make_tokens: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 12, shard_tokens=300)
    dataset = make_tokens(store, seq_len=299, cache_dir=tmp_path / "cache")
    for _ in range(2):
        for shard in range(12):
            assert np.array_equal(dataset[shard]["input_ids"], fixed_ids(shard, 300)[:-1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_over_any_number_of_workers(six_shards: TokenStore, make_tokens: Make, workers: int) -> None:
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


def test_batches_do_not_share_memory_with_the_shard(six_shards: TokenStore, make_tokens: Make) -> None:
    dataset = make_tokens(six_shards)
    dataset[3]["input_ids"].zero_()
    assert np.array_equal(dataset[3]["input_ids"], fixed_ids(0)[300:400])


def test_a_state_says_what_indices_mean(six_shards: TokenStore, make_tokens: Make, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("shards", "options"),
    [([6], {}), ([-1], {}), ([0], {"seq_len": 0}), ([0], {"seq_len": 2_000}), ([0], {"seq_len": -5})],
)
def test_what_makes_no_sense(
    six_shards: TokenStore, make_tokens: Make, shards: list[int], options: dict[str, Any]
) -> None:
    with pytest.raises(LoaderUsageError):
        make_tokens(six_shards, shards, **options)
