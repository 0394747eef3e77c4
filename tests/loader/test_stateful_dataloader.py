"""torchdata's StatefulDataLoader: its state after k batches, in JSON's terms, goes on with exactly the next batch."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from loader import GenesisDataset, PlateauRule
from tests.support.batches import digest, take
from tests.support.token_store import TokenStore

# Four workers on two cores are what is tested; the other is between torchdata 0.11 and torch 2.13.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning", "ignore:'set_vital' is deprecated:UserWarning"
)

Make = Callable[..., GenesisDataset]
FINITE: dict[str, Any] = {"epochs": 1, "batch_size": 7, "seq_len": 333, "count": 2}
"""Ten windows a pass."""
QUICK = PlateauRule("absolute", history=4, window=3, min_steps=2)


def stateful(dataset: GenesisDataset, workers: int, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, timeout=60 if workers else 0, **options)


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("k", [0, 3, 18])
def test_going_on_behind_k_batches(six_shards: TokenStore, make_dataset: Make, workers: int, k: int) -> None:
    expected = take(make_dataset(six_shards), k + 12)
    loader = stateful(make_dataset(six_shards), workers)
    assert take(loader, k) == expected[:k]
    state = copy.deepcopy(loader.state_dict())
    resumed = stateful(make_dataset(six_shards), workers)
    resumed.load_state_dict(state)
    assert take(resumed, 6) == expected[k : k + 6]
    again = stateful(make_dataset(six_shards), workers)
    again.load_state_dict(resumed.state_dict())
    assert take(again, 6) == expected[k + 6 :]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "batch_size"), [(0, 4), (2, 4), (4, 1)])
def test_finite_passes(six_shards: TokenStore, make_dataset: Make, workers: int, batch_size: int) -> None:
    options = {**FINITE, "batch_size": batch_size}
    direct = make_dataset(six_shards, **options)
    expected = [take(direct) for _ in range(3)]
    length = len(expected[0])
    loader = stateful(make_dataset(six_shards, **options), workers)
    assert take(loader) == expected[0]
    for k in {length // 2, length - 1, length}:
        begun = stateful(make_dataset(six_shards, **options), workers)
        iterator = iter(begun)
        assert take(iterator, k) == expected[0][:k]
        state = copy.deepcopy(begun.state_dict())
        resumed = stateful(make_dataset(six_shards, **options), workers)
        resumed.load_state_dict(state)
        torch.manual_seed(3)
        assert take(resumed) == expected[0][k:]
        assert take(resumed) == expected[1]
    finished = copy.deepcopy(loader.state_dict())
    resumed = stateful(make_dataset(six_shards, **options), workers)
    resumed.load_state_dict(finished)
    assert take(resumed) == expected[1]
    assert take(resumed) == expected[2]
    assert [take(loader), take(loader)] == expected[1:]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_rotations_survive(six_shards: TokenStore, make_dataset: Make, workers: int) -> None:
    options = {"plateau": QUICK, "seq_len": 32}

    def train(dataset: GenesisDataset, loader: StatefulDataLoader[Any], first: int, last: int) -> list[str]:
        found = []
        for step, batch in zip(range(first, last), loader, strict=False):
            found.append(digest(batch))
            dataset.report_loss(0.01 if step % 20 > 9 else 2.0)
        return found

    dataset = make_dataset(six_shards, **options)
    loader = stateful(dataset, workers)
    found = train(dataset, loader, 0, 44)
    # A rotation is under way here: some workers have heard of it, others not yet.
    state, before = copy.deepcopy(loader.state_dict()), dataset.rotations
    assert before
    resumed = make_dataset(six_shards, **options)
    loader = stateful(resumed, workers)
    loader.load_state_dict(state)
    found += train(resumed, loader, 44, 100)
    rotations = resumed.rotations
    assert len(rotations) > len(before) - 1
    assert {step for step in rotations if step < 44} == {step for step in before if step < 44}
    reference = make_dataset(six_shards, **options)
    expected = [digest(reference.replay("node-a", step, rotations=rotations)) for step in range(100)]
    assert found == expected


@pytest.mark.slow
def test_another_process(six_shards: TokenStore, make_dataset: Make, shared_cache: Path, tmp_path: Path) -> None:
    expected = take(make_dataset(six_shards), 20)
    loader = stateful(make_dataset(six_shards), 2)
    take(loader, 9)
    (tmp_path / "state").write_bytes(pickle.dumps(loader.state_dict()))
    program = f"""
import pickle, pathlib
from torchdata.stateful_dataloader import StatefulDataLoader
from loader import GenesisDataset
from tests.support.batches import take
dataset = GenesisDataset({six_shards.url!r}, "node-a", seq_len=64, batch_size=4, cache_dir={str(shared_cache)!r})
loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2)
loader.load_state_dict(pickle.loads(pathlib.Path({str(tmp_path / "state")!r}).read_bytes()))
print(*take(loader, 11))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == expected[9:]
