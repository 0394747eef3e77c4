"""A store that grows while a node trains: the run stays pinned, and takes what is new when it is asked to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from loader import GenesisDataset, LoaderUsageError, ManifestRollbackError, StateMismatchError, get_assigned_shards
from tests.support.batches import digest, take
from tests.support.token_store import TokenStore

Make = Callable[..., GenesisDataset]
EPOCH = 20
"""Batches of four windows in an epoch of four shards of twenty."""


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore.of(tmp_path / "store", 4)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"cache_dir": tmp_path / "cache", "seq_len": 99, "batch_size": 4}


def test_a_run_stays_pinned(store: TokenStore, make_dataset: Make, options: dict[str, Any]) -> None:
    expected = take(make_dataset(store, **options), 3 * EPOCH)
    dataset = make_dataset(store, **options)
    found = take(dataset, 10)
    store.grow(9)
    assert found + take(dataset, 3 * EPOCH - 10) == expected
    assert list(dataset.shards) == get_assigned_shards("node-a", 4)


def test_refresh_takes_effect_with_the_next_epoch(
    store: TokenStore, make_dataset: Make, options: dict[str, Any]
) -> None:
    pinned = take(make_dataset(store, **options), 2 * EPOCH)
    dataset = make_dataset(store, **options)
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
    new = make_dataset(store, **{**options, "cache_dir": options["cache_dir"] / "new"})
    begun = new.state_dict()
    begun["lanes"][0].update(epoch=1)
    new.load_state_dict(begun)
    assert take(new, EPOCH) == later
    # A state with what is queued resumes, in a process that knows the grown store.
    resumed = make_dataset(store, **options)
    resumed.load_state_dict(state)
    assert take(resumed, 2 * EPOCH - 7) == found[7:] + later


def test_refresh_in_the_middle_of_a_batch_that_crosses_the_epoch(
    store: TokenStore, make_dataset: Make, options: dict[str, Any]
) -> None:
    odd = {**options, "batch_size": 7}
    dataset = make_dataset(store, **odd)
    found = take(dataset, 11)  # 77 of 80 windows.
    store.grow(9)
    dataset.refresh()
    state = dataset.state_dict()
    crossing = next(iter(dataset))
    resumed = make_dataset(store, **odd)
    resumed.load_state_dict(state)
    assert [crossing["input_ids"].tolist()] == [next(iter(resumed))["input_ids"].tolist()]
    old = make_dataset(store, **{**odd, "cache_dir": options["cache_dir"] / "b"})
    old.load_state_dict({**state, "lanes": [{**state["lanes"][0], "next_total_shards": 4 + 9}]})
    rows = next(iter(old))["input_ids"]
    assert (rows == crossing["input_ids"]).all()
    assert len(found) == 11
    for step in range(3):
        assert take(dataset, 1) == take(resumed, 1), step


def test_a_state_of_a_grown_run_with_an_older_manifest_in_hand(
    store: TokenStore, make_dataset: Make, options: dict[str, Any]
) -> None:
    dataset = make_dataset(store, **options)
    early = make_dataset(store, **options)
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
def test_refresh_between_the_passes_of_workers(store: TokenStore, make_dataset: Make, options: dict[str, Any]) -> None:
    direct = make_dataset(store, **options, epochs=1)
    expected = [take(direct)]
    dataset = make_dataset(store, **options, epochs=1)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, timeout=60)
    assert [take(loader)] == expected
    store.grow(9)
    direct.refresh()
    assert dataset.refresh() == 13
    expected += [take(direct), take(direct)]
    assert expected[1] != expected[0]
    assert [take(loader), take(loader)] == expected[1:]
    endless = make_dataset(store, **options)
    take(DataLoader(endless, batch_size=None, num_workers=2, timeout=60), 5)
    with pytest.raises(LoaderUsageError, match="between two passes"):
        endless.refresh()
    endless.load_state_dict(endless.state_dict(step=5))
    assert endless.refresh() == 13


def test_refresh_of_several_sources(tmp_path: Path, make_dataset: Make, options: dict[str, Any]) -> None:
    store = TokenStore.of(tmp_path / "two", 6, sources=("alpha", "beta"))
    mixed = {**options, "sources": {"alpha": 2.0, "beta": 1.0}, "holdout": 1}
    dataset = make_dataset(store, **mixed)
    take(dataset, 4)
    store.grow(6, sources=("alpha", "beta"))
    assert dataset.refresh() == 12
    state = json.loads(json.dumps(dataset.state_dict()))
    expected = take(dataset, 60)
    for step in (0, 3, 19, 40):
        resumed = make_dataset(store, **mixed)
        resumed.load_state_dict(state)
        assert take(resumed, step) == expected[:step]
        again = make_dataset(store, **mixed)
        again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
        assert take(again, 60 - step) == expected[step:]
    assert not {0, 1} & set(dataset.shards)  # Held out, whatever has been added.


@pytest.mark.slow
def test_a_run_that_grew_twice_can_be_replayed(store: TokenStore, make_dataset: Make, options: dict[str, Any]) -> None:
    dataset = make_dataset(store, **options)
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
    peer = make_dataset(store, "node-b", **options)
    pins = json.loads(json.dumps(dataset.pins))
    assert [digest(peer.replay("node-a", step, pins=pins)) for step in range(0, len(found), 9)] == found[::9]
    assert digest(peer.replay("node-a", 30, total_shards=4)) == found[30]
    assert digest(peer.replay("node-a", 70, total_shards=4)) != found[70]
    # A state has them too, and has nothing else to know of what is over.
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state["lanes"][0]["pins"] == [[0, 4], [2, 6], [3, 11]]
    resumed = make_dataset(store, **options)
    resumed.load_state_dict(state)
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
def test_any_run_that_grew_can_be_replayed(
    tmp_path_factory: pytest.TempPathFactory,
    make_dataset: Make,
    stops: list[int],
    sources: dict[str, float] | None,
    epochs: int | None,
    rotations: set[int],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("grown")
    store = TokenStore.of(folder / "store", 4, sources=("alpha", "beta"))
    mixed = {"sources": sources, "epochs": epochs, "cache_dir": folder / "cache", "seq_len": 333, "batch_size": 5}
    dataset = make_dataset(store, **mixed, count=4)
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
            dataset = make_dataset(store, **mixed, count=4)
            dataset.load_state_dict(state)
    steps = data.draw(st.sets(st.integers(0, len(found) - 1), min_size=1, max_size=8))
    replayed = {step: digest(dataset.replay("node-a", step, rotations=dataset.rotations)) for step in steps}
    assert replayed == {step: found[step] for step in steps}


def test_a_peer_that_knows_an_older_manifest_asks_for_the_new_one(
    store: TokenStore, make_dataset: Make, options: dict[str, Any]
) -> None:
    peer = make_dataset(store, "node-b", **options)
    store.grow(9)
    dataset = make_dataset(store, **options)
    assert digest(peer.replay("node-a", 3, pins=dataset.pins)) == take(dataset, 4)[3]
    assert peer.manifest.total_shards == 4


@pytest.mark.parametrize(
    "pins",
    [[], [[]], [[(1, 4)]], [[(0, 4), (0, 4)]], [[(0, 4), (3, 4)]], [[(0, 4)], [(0, 4)]], [[(0, 0)]], [[(0, 5)]], [[4]]],
)
def test_pins_that_no_run_of_these_options_can_have(
    store: TokenStore, make_dataset: Make, options: dict[str, Any], pins: Any
) -> None:
    dataset = make_dataset(store, **options)
    with pytest.raises(LoaderUsageError):
        dataset.replay("node-a", 3, pins=pins)
    with pytest.raises(LoaderUsageError, match="found both"):
        dataset.replay("node-a", 3, pins=dataset.pins, total_shards=4)


def test_another_store_is_not_growth(store: TokenStore, make_dataset: Make, options: dict[str, Any]) -> None:
    dataset = make_dataset(store, **options)
    expected = take(make_dataset(store, **options), 10)
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
