"""States that are damaged or another's are refused, and an error leaves the stream at the batch that failed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader import DataUnavailableError, GenesisDataset, LoaderError, StateMismatchError
from tests.support.batches import digest, take
from tests.support.token_store import TokenStore

Make = Callable[..., GenesisDataset]


@pytest.fixture
def state(six_shards: TokenStore, make_dataset: Make) -> dict[str, Any]:
    dataset = make_dataset(six_shards)
    for _ in zip(range(9), dataset, strict=False):
        dataset.report_loss(1.5)
    return dataset.state_dict()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("node_id", "node-b"),
        ("seq_len", 32),
        ("batch_size", 5),
        ("seed", 1),
        ("count", 3),
        ("assignment", "rendezvous"),
        ("sources", {"alpha": 1.0}),
        ("holdout", 1),
        ("split", "holdout"),
    ],
)
def test_a_state_made_with_other_options(
    six_shards: TokenStore, make_dataset: Make, state: dict[str, Any], option: str, value: object
) -> None:
    dataset = make_dataset(six_shards, **({"holdout": 1} if option == "split" else {}), **{option: value})
    with pytest.raises(StateMismatchError, match="expected a state made with"):
        dataset.load_state_dict(state)


@pytest.mark.parametrize(
    "foreign",
    [
        {},
        {"version": 2},
        {"version": "1"},
        {"epoch": 3, "model": {}},
        {"_snapshot": {}, "_steps_since_snapshot": 0},
        None,
        [],
        "state",
        7,
    ],
)
def test_what_is_no_state(six_shards: TokenStore, make_dataset: Make, foreign: Any) -> None:
    dataset = make_dataset(six_shards)
    with pytest.raises(StateMismatchError):
        dataset.load_state_dict(foreign)
    assert dataset.state_dict()["step"] == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["step"], -1),
        (["step"], 2.5),
        (["step"], "9"),
        (["step"], 2**63),
        (["lanes"], []),
        (["lanes", 0, "epoch"], -1),
        (["lanes", 0, "window"], 6 * 31),
        (["lanes", 0, "window"], -1),
        (["lanes", 0, "total_shards"], 0),
        (["lanes", 0, "total_shards"], 7),
        (["lanes", 0, "total_shards"], 5),
        (["lanes", 0, "next_total_shards"], 5),
        (["lanes", 0, "next_total_shards"], 900),
        (["lanes", 0, "next_total_shards"], 0),
        (["lanes", 0, "shards_sha256"], "0" * 64),
        (["lanes", 0, "pins"], []),
        (["lanes", 0, "pins"], [[0, 5]]),
        (["lanes", 0, "pins"], [[0, 2], [1, 6]]),
        (["lanes", 0, "pins"], [[0, 6], [0, 6]]),
        (["lanes", 0, "pins"], [[0, 6, 1]]),
        (["lanes", 0, "pins"], [[-1, 6]]),
        (["rotations"], [-3]),
        (["rotations"], "all"),
        (["losses"], [None]),
        (["losses"], {"a": 1}),
        (["identity", "seq_len"], None),
        (["worker"], {"id": 0}),
        (["surplus"], 1),
    ],
)
def test_a_damaged_state(
    six_shards: TokenStore, make_dataset: Make, state: dict[str, Any], path: list[Any], value: object
) -> None:
    damaged = copy.deepcopy(state)
    at: Any = damaged
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    dataset = make_dataset(six_shards)
    take(dataset, 2)
    with pytest.raises(StateMismatchError):
        dataset.load_state_dict(damaged)
    assert dataset.state_dict()["step"] == 2


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_refused_or_harmless(
    six_shards: TokenStore, make_dataset: Make, state: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(state)
    position = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:position] + data.draw(st.sampled_from('0123456789abz"-.,[]{}')) + text[position + 1 :]
    try:
        loaded = json.loads(damaged)
    except ValueError:
        return
    dataset = make_dataset(six_shards)
    try:
        dataset.load_state_dict(loaded)
    except StateMismatchError:
        return
    assert len(take(dataset, 3)) == 3


def test_a_state_of_another_store(tmp_path: Path, make_dataset: Make, state: dict[str, Any]) -> None:
    other = TokenStore(tmp_path / "store")
    for shard_id in range(6):
        other.add(other.ids(shard_id + 1))
    other.publish()
    with pytest.raises(StateMismatchError, match="another store"):
        make_dataset(other).load_state_dict(state)


def test_a_state_of_a_store_that_has_shrunk(tmp_path: Path, make_dataset: Make, state: dict[str, Any]) -> None:
    with pytest.raises(StateMismatchError, match="at least 6 shards"):
        make_dataset(TokenStore.of(tmp_path / "store", 5)).load_state_dict(state)


def test_an_error_leaves_the_stream_at_the_batch_that_failed(tmp_path: Path, make_dataset: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 6)
    options = {"cache_dir": tmp_path / "cache", "timeout_s": 1.0, "batch_size": 5}
    expected = take(make_dataset(store, cache_dir=tmp_path / "other"), 0)
    expected = take(make_dataset(store, **{**options, "cache_dir": tmp_path / "other"}), 40)
    dataset = make_dataset(store, **options)
    found = take(dataset, 1)
    (tmp_path / "store").rename(tmp_path / "gone")
    with pytest.raises(LoaderError):
        for batch in dataset:
            found.append(digest(batch))
    # One shard was open, one more may have been fetched ahead; a batch that lies in two shards is not half made.
    assert 6 <= len(found) <= 13
    assert found == expected[: len(found)]
    state = dataset.state_dict()
    assert state["step"] == len(found)
    with pytest.raises(DataUnavailableError):
        next(iter(dataset))
    assert dataset.state_dict() == state
    (tmp_path / "gone").rename(tmp_path / "store")
    rest = take(dataset, 40 - len(found))
    assert [*found, *rest] == expected
    resumed = make_dataset(store, **options)
    resumed.load_state_dict(state)
    assert take(resumed, len(rest)) == rest


def test_an_interrupt_leaves_the_stream_at_the_batch_that_was_awaited(
    six_shards: TokenStore, make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loader.feed import Feed

    expected = take(make_dataset(six_shards), 10)
    dataset = make_dataset(six_shards)
    take(dataset, 4)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Feed, "batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(dataset))
    assert dataset.state_dict()["step"] == 4
    assert take(dataset, 6) == expected[4:]


def test_a_removed_cache_is_no_loss(tmp_path: Path, make_dataset: Make, six_shards: TokenStore) -> None:
    expected = take(make_dataset(six_shards), 60)
    dataset = make_dataset(six_shards, cache_dir=tmp_path / "cache")
    found = take(dataset, 20)
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    assert [*found, *take(dataset, 40)] == expected
