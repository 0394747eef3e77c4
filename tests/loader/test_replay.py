"""The same node gives the same batches anywhere, a peer can make any of them again, also of a store that grew."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from loader import (
    GenesisDataset,
    LoaderUsageError,
    ManifestRollbackError,
    PlateauRule,
    StateMismatchError,
    get_assigned_shards,
)
from loader.stream.windows import window_order
from tests.support.token_store import TokenStore, digest, fixed_ids, take

Make = Callable[..., GenesisDataset]
QUICK = PlateauRule("absolute", history=4, window=3, min_steps=2)

# Of the batches 0, 1, 50 and 300 of "gpu-7" and "gpu-8": whatever changes them breaks every run that is under way.
GOLDEN = {
    "gpu-7": [
        "cf0973e19b3c71f5aff2811f",
        "505959b642714c654f7d3d9e",
        "c20bfa4ddde512a4c4fd5606",
        "8401f9796275cc8b0a226aa2",
    ],
    "gpu-8": [
        "f23f67739d766c09e46e2971",
        "3747683806a60bbbc05ce1b4",
        "a93f4ab26d4e5050ba3e92d7",
        "0c770a8bcfc32cec00ffec3f",
    ],
}


def test_golden_digests_differ_by_node_epoch_and_seed(six_shards: TokenStore, make_dataset: Make) -> None:
    for node_id, expected in GOLDEN.items():
        found = take(make_dataset(six_shards, node_id), 301)
        assert [found[step] for step in (0, 1, 50, 300)] == expected
    mixed = make_dataset(
        six_shards, "gpu-7", seed=9, batch_size=3, seq_len=100, assignment="rendezvous", count=4, holdout=1
    )
    assert take(mixed, 90)[-1] == "2932dbacf3a0edc2a6f2d0bd"
    first = take(make_dataset(six_shards), 94)
    assert len(set(first)) == 94  # Two epochs of 46.5 batches, no two alike.
    assert not set(first) & set(take(make_dataset(six_shards, "node-b"), 94))
    assert not set(first) & set(take(make_dataset(six_shards, seed=1), 94))


def test_batches_from_their_definition(six_shards: TokenStore, make_dataset: Make) -> None:
    """Written from the specification and the format page, not from the loader."""
    dataset = make_dataset(six_shards, "gpu-7", extras=("positions", "document_ids", "cu_seqlens"))
    rows = [
        fixed_ids(shard)[64 * window : 64 * window + 65]
        for epoch in range(2)
        for shard in dataset.shards
        for window in window_order(31, 0, "gpu-7", epoch, shard)
    ]
    for step, batch in enumerate(itertools.islice(dataset, len(rows) // 4)):
        expected = np.stack(rows[4 * step : 4 * step + 4])
        assert np.array_equal(batch["input_ids"], expected[:, :-1])
        assert np.array_equal(batch["labels"], expected[:, 1:])
        assert batch["positions"].shape == batch["document_ids"].shape == (4, 64)
        assert int(batch["cu_seqlens"][-1]) == 256


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 9),
    st.sampled_from([50, 333, 999]),
    st.sampled_from([None, {"alpha": 3.0, "beta": 1.0}]),
    st.sampled_from([None, 1, 2]),
    st.sets(st.integers(0, 29), max_size=4),
    st.integers(0, 29),
)
def test_a_peer_finds_the_batch(two_sources, make_dataset, batch_size, seq_len, sources, epochs, rotations, step):
    options = {"batch_size": batch_size, "seq_len": seq_len, "sources": sources, "epochs": epochs, "count": 2}
    node = make_dataset(two_sources, "node-a", **options)
    node.load_state_dict({**node.state_dict(), "rotations": sorted(rotations)})
    found: list[str] = []
    while len(found) < 30:
        found += take(node, 30 - len(found))
    peer = make_dataset(two_sources, "node-b", **options)
    assert digest(peer.replay("node-a", step, rotations=sorted(rotations, reverse=True))) == found[step]


@pytest.mark.parametrize("sources", [None, {"alpha": 3.0, "beta": 1.0}])
def test_a_batch_many_steps_or_passes_away(two_sources, make_dataset, sources, monkeypatch):
    dataset = make_dataset(two_sources, sources=sources)
    far = 2**40 - 1
    dataset.load_state_dict(dataset.state_dict(step=far - 3))
    assert digest(dataset.replay("node-a", far)) == take(dataset, 4)[3]
    for step, rotations in ((far + 1, []), (3, [far + 1]), (3, [-1])):
        with pytest.raises(LoaderUsageError, match=r"expected steps of 0 to 2\*\*40 - 1"):
            dataset.replay("node-a", step, rotations=rotations)
    monkeypatch.setattr("loader.stream.schedule._MAX_PASSES", 400)
    dataset = make_dataset(two_sources, sources=sources, epochs=1, seq_len=999, count=2)
    found: list[str] = []
    while len(found) < 200:
        found += take(dataset)
    assert [digest(dataset.replay("node-a", step)) for step in (100, 199)] == [found[100], found[199]]
    for ask in (dataset.replay, lambda _, step: dataset.state_dict(step=step)):
        with pytest.raises(LoaderUsageError, match="expected a step within 400 passes, found 2000000"):
            ask("node-a", 2_000_000)


EPOCH = 20
"""Batches of four windows in an epoch of four shards of twenty."""


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore.of(tmp_path / "store", 4)


@pytest.fixture
def make(store: TokenStore, make_dataset: Make, tmp_path: Path) -> Make:
    """Datasets of `store`, with twenty windows a shard."""
    given = {"cache_dir": tmp_path / "cache", "seq_len": 99, "batch_size": 4}
    return lambda node_id="node-a", **options: make_dataset(store, node_id, **{**given, **options})


def test_a_run_stays_pinned(store: TokenStore, make: Make) -> None:
    expected = take(make(), 3 * EPOCH)
    dataset = make()
    found = take(dataset, 10)
    store.grow(9)
    assert found + take(dataset, 3 * EPOCH - 10) == expected
    assert list(dataset.shards) == get_assigned_shards("node-a", 4)


def test_refresh_takes_effect_with_the_next_epoch(store: TokenStore, make: Make, tmp_path: Path) -> None:
    pinned = take(make(), 2 * EPOCH)
    dataset = make()
    found = take(dataset, 7)
    store.grow(9)
    assert dataset.refresh() == 13
    assert list(dataset.shards) == get_assigned_shards("node-a", 4)
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state["lanes"][0]["next_total_shards"] == 13
    found += take(dataset, EPOCH - 7)
    assert found == pinned[:EPOCH]
    assert list(dataset.shards) == get_assigned_shards("node-a", 13)
    # The batches of a node that stands in epoch 1 of the grown store.
    later = take(dataset, EPOCH)
    assert later != pinned[EPOCH:]
    new = make(cache_dir=tmp_path / "new")
    begun = new.state_dict()
    begun["lanes"][0].update(epoch=1)
    new.load_state_dict(begun)
    assert take(new, EPOCH) == later
    # A state with what is queued resumes, in a process that knows the grown store.
    resumed = make(state=state)
    assert take(resumed, 2 * EPOCH - 7) == found[7:] + later


def test_a_state_of_a_grown_run_with_an_older_manifest_in_hand(store: TokenStore, make: Make) -> None:
    dataset = make()
    early = make()
    iterator = iter(early)
    next(iterator)
    store.grow(9)
    dataset.refresh()
    take(dataset, EPOCH + 3)
    state = dataset.state_dict()
    # Its manifest is the one of four shards; the state speaks of thirteen, so the store is asked again.
    early.load_state_dict(state)
    expected = take(dataset, 30)
    assert take(iterator, 30) == expected


@pytest.mark.slow
def test_refresh_between_the_passes_of_workers(store: TokenStore, make: Make) -> None:
    direct = make(epochs=1)
    expected = [take(direct)]
    dataset = make(epochs=1)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, timeout=60)
    assert [take(loader)] == expected
    store.grow(9)
    direct.refresh()
    assert dataset.refresh() == 13
    expected += [take(direct), take(direct)]
    assert expected[1] != expected[0]
    assert [take(loader), take(loader)] == expected[1:]
    endless = make()
    take(DataLoader(endless, batch_size=None, num_workers=2, timeout=60), 5)
    with pytest.raises(LoaderUsageError, match="between two passes"):
        endless.refresh()
    endless.load_state_dict(endless.state_dict(step=5))
    assert endless.refresh() == 13


@pytest.mark.slow
def test_a_run_that_grew_twice_can_be_replayed(store: TokenStore, make: Make) -> None:
    dataset = make()
    assert dataset.pins == (((0, 4),),)
    found = take(dataset, EPOCH + 7)
    store.grow(2)
    dataset.refresh()
    assert dataset.refresh() == 6  # Nothing has come since.
    assert dataset.pins == (((0, 4), (2, 6)),)
    found += take(dataset, EPOCH)
    store.grow(5)
    dataset.refresh()
    found += take(dataset, 3 * EPOCH)
    assert dataset.pins == (((0, 4), (2, 6), (3, 11)),)
    assert [digest(dataset.replay("node-a", step)) for step in range(len(found))] == found
    peer = make("node-b")
    pins = json.loads(json.dumps(dataset.pins))
    assert [digest(peer.replay("node-a", step, pins=pins)) for step in range(0, len(found), 9)] == found[::9]
    assert digest(peer.replay("node-a", 30, total_shards=4)) == found[30]
    assert digest(peer.replay("node-a", 70, total_shards=4)) != found[70]
    # A state has them too, and has nothing else to know of what is over.
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state["lanes"][0]["pins"] == [[0, 4], [2, 6], [3, 11]]
    resumed = make(state=state)
    assert resumed.pins == dataset.pins
    assert take(resumed, 30) == take(dataset, 30)
    assert digest(resumed.replay("node-a", 60)) == found[60]


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.sampled_from([None, {"alpha": 2.0, "beta": 1.0}]),
    st.sampled_from([None, 1, 2]),
    st.sets(st.integers(0, 90), max_size=3),
    st.data(),
)
def test_any_run_that_grew_can_be_replayed(tmp_path_factory, make_dataset, stops, sources, epochs, rotations, data):
    folder = tmp_path_factory.mktemp("grown")
    store = TokenStore.of(folder / "store", 4, sources=("alpha", "beta"))
    mixed = {"sources": sources, "epochs": epochs, "cache_dir": folder / "cache", "seq_len": 333, "batch_size": 5}
    mixed |= {"count": 4, "holdout": 1}
    dataset = make_dataset(store, **mixed)
    dataset.load_state_dict({**dataset.state_dict(), "rotations": sorted(rotations)})
    found: list[str] = []
    for steps in (*stops, 10):
        end = len(found) + steps
        while len(found) < end:
            found += take(dataset, end - len(found))
        store.grow(2, sources=("alpha", "beta"))
        dataset.refresh()
        if data.draw(st.booleans()):
            state = json.loads(json.dumps(dataset.state_dict()))
            dataset = make_dataset(store, **mixed, state=state)
    assert not {0, 1} & set(dataset.shards)  # Held out, whatever has been added.
    steps = data.draw(st.sets(st.integers(0, len(found) - 1), min_size=1, max_size=8))
    replayed = {step: digest(dataset.replay("node-a", step, rotations=dataset.rotations)) for step in steps}
    assert replayed == {step: found[step] for step in steps}


def test_a_peer_that_knows_an_older_manifest_asks_for_the_new_one(store: TokenStore, make: Make) -> None:
    peer = make("node-b")
    store.grow(9)
    dataset = make()
    assert digest(peer.replay("node-a", 3, pins=dataset.pins)) == take(dataset, 4)[3]
    assert peer.manifest.total_shards == 4


def test_pins_that_no_run_of_these_options_can_have(make: Make) -> None:
    dataset = make()
    wrong: list[Any] = [[], [[]], [[(1, 4)]], [[(0, 4), (0, 4)]], [[(0, 4), (3, 4)]], [[(0, 4)], [(0, 4)]], [[(0, 0)]]]
    for pins in (*wrong, [[(0, 5)]], [[4]]):
        with pytest.raises(LoaderUsageError):
            dataset.replay("node-a", 3, pins=pins)
    with pytest.raises(LoaderUsageError, match="found both"):
        dataset.replay("node-a", 3, pins=dataset.pins, total_shards=4)


def test_another_store_is_not_growth(store: TokenStore, make: Make) -> None:
    dataset = make()
    expected = take(make(), 10)
    found = take(dataset, 3)
    other = TokenStore(store.folder)
    for shard_id in range(6):
        other.add(store.ids(shard_id + 50))
    # The sequence goes on, two at once, so only the shards tell.
    other.publish(sequence=9)
    with pytest.raises((StateMismatchError, ManifestRollbackError)):
        dataset.refresh()
    assert dataset.state_dict()["step"] == 3
    assert found == expected[:3]
