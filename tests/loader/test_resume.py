"""A stream that is resumed, wherever it was stopped, gives the batches it would have given."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader import DataUnavailableError, GenesisDataset, LoaderError, PlateauRule, StateMismatchError
from manifests import sha256_hex
from tests.support.token_store import TokenStore, digest, take

Make = Callable[..., GenesisDataset]
QUICK = PlateauRule("absolute", history=6, window=3, min_steps=2)


@dataclass(frozen=True)
class Run:
    """A training script: takes a batch, reports its loss every ``every`` batches."""

    options: dict[str, Any]
    seed: int
    every: int

    def loss(self, step: int) -> float:
        """Below the plateau's mean for some steps on end, now and then."""
        return 0.01 if random.Random(f"{self.seed}/{step // 5}").random() < 0.4 else 2.0

    def report(self, dataset: GenesisDataset, step: int) -> None:
        if step % self.every == 0:
            dataset.report_loss(self.loss(step))

    def batches(self, dataset: GenesisDataset, first: int, last: int) -> Iterator[str]:
        for step, batch in zip(range(first, last), dataset, strict=False):
            yield digest(batch)
            self.report(dataset, step)


RUNS = st.builds(
    Run,
    options=st.fixed_dictionaries(
        {
            "batch_size": st.integers(1, 9),
            "seq_len": st.sampled_from([16, 64, 333, 999, 1_999]),
            "count": st.integers(1, 5),
            "seed": st.integers(0, 3),
            "assignment": st.sampled_from(["modulo", "rendezvous"]),
            "sources": st.sampled_from([None, {"alpha": 1.0}, {"alpha": 3, "beta": 1}]),
            "holdout": st.integers(0, 2),
            "extras": st.sampled_from([(), ("cu_seqlens",)]),
            "plateau": st.just(QUICK),
        }
    ),
    seed=st.integers(0, 50),
    every=st.integers(1, 3),
)
STEPS = 24


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RUNS, st.integers(0, STEPS), st.integers(0, STEPS), st.booleans())
def test_resuming_twice_anywhere_is_never_having_stopped(two_sources, make_dataset, run, first, second, before_report):
    undisturbed = make_dataset(two_sources, **run.options)
    expected = list(run.batches(undisturbed, 0, STEPS))
    found: list[str] = []
    state: dict[str, Any] | None = None
    stops = sorted([first, second])
    for begin, end in zip([0, *stops], [*stops, STEPS], strict=True):
        dataset = make_dataset(two_sources, **run.options)
        if state is not None:
            dataset.load_state_dict(json.loads(state))
            if before_report and begin:
                run.report(dataset, begin - 1)
        for step, batch in zip(range(begin, end), dataset, strict=False):
            found.append(digest(batch))
            if step == end - 1 and before_report:
                break
            run.report(dataset, step)
        state = json.dumps(dataset.state_dict())
        if before_report and begin == end and begin:
            # Nothing was taken, so the loss of the batch before was reported already.
            before_report = False
    assert found == expected
    if not before_report:
        assert dataset.rotations == undisturbed.rotations


def test_rotations_happen_in_these_runs(two_sources: TokenStore, make_dataset: Make) -> None:
    """Or the test above would say nothing of them."""
    rotated = 0
    for seed in range(10):
        dataset = make_dataset(two_sources, plateau=QUICK)
        list(Run({}, seed, 1).batches(dataset, 0, STEPS))
        rotated += len(dataset.rotations)
    assert rotated >= 10


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 7), st.sampled_from([333, 999]), st.integers(1, 3), st.integers(1, 2), st.data())
def test_resuming_within_finite_passes(two_sources, make_dataset, batch_size, seq_len, count, epochs, data):
    options = {"batch_size": batch_size, "seq_len": seq_len, "count": count, "epochs": epochs}
    undisturbed = make_dataset(two_sources, **options)
    passes = [take(undisturbed) for _ in range(3)]
    windows = count * ((2_000 - 1) // seq_len) * epochs
    assert [len(each) for each in passes] == [-(-windows // batch_size)] * 3
    stop_in = data.draw(st.integers(0, 2))
    stop_at = data.draw(st.integers(1, len(passes[0])))
    dataset = make_dataset(two_sources, **options)
    for _ in range(stop_in):
        take(dataset)
    assert take(dataset, stop_at) == passes[stop_in][:stop_at]
    resumed = make_dataset(two_sources, **options, state=json.loads(json.dumps(dataset.state_dict())))
    # Also behind the last batch: the pass that was broken off ends, and the next one is the next one.
    assert take(resumed) == passes[stop_in][stop_at:]
    for later in range(stop_in + 1, 3):
        assert take(resumed) == passes[later]


def test_going_on_after_a_break_or_a_peek_goes_on(six_shards: TokenStore, make_dataset: Make) -> None:
    expected = take(make_dataset(six_shards), 30)
    dataset = make_dataset(six_shards)
    assert [*take(dataset, 7), *take(dataset, 0), *take(dataset, 1), *take(dataset, 22)] == expected
    # islice(dataset, n) never sees the end of a pass of n batches: taken twice it is two passes all the same.
    finite = make_dataset(six_shards, epochs=1)
    passes = [take(finite), take(finite)]
    again = make_dataset(six_shards, epochs=1)
    assert [take(again, len(passes[0])), take(again, len(passes[0]))] == passes
    # next(iter(dataset)) to see the shapes does not spoil a state that is loaded afterwards.
    dataset = make_dataset(six_shards)
    expected = take(dataset, 30)
    state = make_dataset(six_shards).state_dict(step=12)
    other = make_dataset(six_shards)
    next(iter(other))
    other.load_state_dict(state)
    assert take(other, 18) == expected[12:]


@pytest.mark.parametrize("k", [0, 1, 5, 31, 32, 33, 100])
def test_a_state_of_a_step_is_the_state_at_that_step(six_shards: TokenStore, make_dataset: Make, k: int) -> None:
    dataset = make_dataset(six_shards)
    take(dataset, k)
    ahead = make_dataset(six_shards)
    take(ahead, 110)
    assert ahead.state_dict(step=k) == dataset.state_dict()
    assert take(ahead, 3) == take(make_dataset(six_shards), 113)[110:]


def test_a_state_of_a_step_in_a_later_pass(six_shards: TokenStore, make_dataset: Make) -> None:
    options = {"epochs": 1, "batch_size": 7, "seq_len": 333, "count": 2}
    dataset = make_dataset(six_shards, **options)
    passes = [take(dataset) for _ in range(3)]
    length = len(passes[0])
    resumed = make_dataset(six_shards, **options, state=dataset.state_dict(step=length + 1))
    assert take(resumed) == passes[1][1:]


def test_loading_a_state_while_iterating(six_shards: TokenStore, make_dataset: Make) -> None:
    dataset = make_dataset(six_shards)
    expected = take(dataset, 40)
    dataset = make_dataset(six_shards)
    iterator = iter(dataset)
    states = []
    for _ in range(20):
        states.append(dataset.state_dict())
        next(iterator)
    dataset.load_state_dict(states[5])
    assert take(iterator, 10) == expected[5:15]
    dataset.load_state_dict(states[19])
    assert take(iterator, 10) == expected[19:29]
    finite = make_dataset(six_shards, epochs=1)
    expected = take(finite)
    finite = make_dataset(six_shards, epochs=1)
    iterator = iter(finite)
    next(iterator)
    state = finite.state_dict()
    take(iterator, 5)
    finite.load_state_dict(state)
    assert take(iterator, len(expected) + 5) == expected[1:]


def test_losses_are_of_the_shard_and_of_the_state_that_was_loaded(six_shards: TokenStore, make_dataset: Make) -> None:
    dataset = make_dataset(six_shards, seq_len=32, batch_size=31)  # 62 windows: two batches a shard.
    states = []
    for step, _ in enumerate(islice(dataset, 4)):
        dataset.report_loss(float(step))
        states.append(dataset.state_dict()["losses"])
    assert states == [[0.0], [], [2.0], []]
    dataset = make_dataset(six_shards, plateau=QUICK)
    iterator = iter(dataset)
    state = dataset.state_dict()
    take(iterator, 4)
    dataset.load_state_dict(state)
    for _ in range(4):
        next(iterator)
        dataset.report_loss(0.01)
    assert dataset.rotations in {(3,), (4,)}


@pytest.mark.parametrize("batch_size", [31, 33])
def test_losses_of_one_shard_do_not_end_the_next(six_shards: TokenStore, make_dataset: Make, batch_size: int) -> None:
    """The last batch of a shard, which may have rows of the next, has a low loss; the rule wants two of one shard."""
    rule = PlateauRule("absolute", history=4, window=2, min_steps=0)
    dataset = make_dataset(six_shards, seq_len=16, batch_size=batch_size, plateau=rule)  # 124 windows a shard.
    rotated_at = None
    for step, _ in enumerate(islice(dataset, 6)):
        dataset.report_loss(0.01 if step >= 3 else 2.0)
        if dataset.rotations:
            rotated_at = dataset.rotations[0]
            break
    assert rotated_at == 6


@pytest.mark.slow
def test_the_state_stays_small(tmp_path: Path) -> None:
    store = TokenStore.of(tmp_path / "store", 12)
    options: dict[str, Any] = {"seq_len": 4, "batch_size": 2, "cache_dir": tmp_path / "cache"}
    dataset = GenesisDataset(store.url, "a-node-with-a-name-of-forty-characters-00", **options)
    rng = random.Random(1)
    sizes = []
    for step, _ in enumerate(islice(dataset, 10_000)):
        dataset.report_loss(3.0 + rng.random())
        if step in (200, 9_999):
            sizes.append(len(json.dumps(dataset.state_dict())))
    assert dataset.state_dict()["step"] == 10_000
    assert sizes[1] < 2_000
    assert sizes[1] - sizes[0] < 30


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
def test_a_state_made_with_other_options(six_shards, make_dataset, state, option, value):
    dataset = make_dataset(six_shards, **({"holdout": 1} if option == "split" else {}), **{option: value})
    with pytest.raises(StateMismatchError, match="expected a state made with"):
        dataset.load_state_dict(state)


def test_what_is_no_state(six_shards: TokenStore, make_dataset: Make) -> None:
    dataset = make_dataset(six_shards)
    others: list[Any] = [{"epoch": 3, "model": {}}, {"_snapshot": {}, "_steps_since_snapshot": 0}, None, [], "state", 7]
    for foreign in ({}, {"version": 2}, {"version": "1"}, *others):
        with pytest.raises(StateMismatchError):
            dataset.load_state_dict(foreign)
    assert dataset.state_dict()["step"] == 0


DAMAGED: dict[tuple[str | int, ...], list[object]] = {
    ("step",): [-1, 2.5, "9", 2**63],
    ("lanes",): [[]],
    ("lanes", 0, "epoch"): [-1],
    ("lanes", 0, "window"): [6 * 31, -1],
    ("lanes", 0, "total_shards"): [0, 7, 5],
    ("lanes", 0, "next_total_shards"): [5, 900, 0],
    ("lanes", 0, "shards_sha256"): ["0" * 64],
    ("lanes", 0, "pins"): [[], [[0, 5]], [[0, 2], [1, 6]], [[0, 6], [0, 6]], [[0, 6, 1]], [[-1, 6]]],
    ("rotations",): [[-3], "all"],
    ("losses",): [[None], {"a": 1}],
    ("identity", "seq_len"): [None],
    ("worker",): [{"id": 0}],
    ("surplus",): [1],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in DAMAGED.items() for value in values])
def test_a_damaged_state(six_shards, make_dataset, state, path, value):
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
def test_any_damage_is_refused_or_harmless(six_shards, make_dataset, state, data):
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


OLD_MIXTURE: dict[str, Any] = {
    "identity": {
        "node_id": "gpu-7",
        "seq_len": 64,
        "batch_size": 4,
        "seed": 0,
        "count": 2,
        "assignment": "modulo",
        "sources": [["alpha", 0.7], ["beta", 0.3]],
        "holdout": 0,
        "split": "train",
    },
    "step": 11,
    "lanes": [
        {
            "total_shards": 10,
            "shards_sha256": "72f681e72c60a81aded3667beb3fab08f71738f58aadff9d70dae70e387b4d5b",
            "epoch": 0,
            "window": 54,
            "source": "alpha",
        },
        {
            "total_shards": 10,
            "shards_sha256": "46c7e1f53de97908e8a251bdc234efbfab7412f5b3b28f79601157c640d45b7c",
            "epoch": 0,
            "window": 40,
            "source": "beta",
        },
    ],
    "version": 1,
    "rotations": [3, 14],
    "losses": [],
}
"""Of a mixture, written by the release before the exact order."""


@pytest.mark.parametrize(
    ("epochs", "sha256"),
    [(None, "8416de6debc410187a30221f"), (1, "32d299006334aa00eac65958")],
    ids=["endless", "passes"],
)
def test_a_mixture_of_an_older_release_goes_on_in_its_order(two_sources, make_dataset, epochs, sha256):
    """Its next 60 batches, as that release made them."""
    options = {"sources": {"alpha": 0.7, "beta": 0.3}, "count": 2, "epochs": epochs}
    state = OLD_MIXTURE if epochs is None else {**OLD_MIXTURE, "end_epoch": 1}
    dataset = make_dataset(two_sources, "gpu-7", state, **options)
    found: list[str] = []
    while len(found) < 60:
        found += take(dataset, 60 - len(found))
        again = make_dataset(two_sources, "gpu-7", json.loads(json.dumps(dataset.state_dict())), **options)
        assert again.state_dict() == dataset.state_dict()
    assert sha256_hex("".join(found).encode())[:24] == sha256
    assert dataset.state_dict()["version"] == 1  # Which that release reads.
    assert digest(dataset.replay("gpu-7", 40, rotations=[3, 14])) == found[40 - 11]
    new = make_dataset(two_sources, "gpu-7", **options)
    assert new.state_dict()["version"] == 2
    assert take(new, 3) != take(make_dataset(two_sources, "gpu-7", mixture="weyl", **options), 3)


def test_a_state_of_another_store_or_one_that_has_shrunk(tmp_path, make_dataset, state):
    other = TokenStore(tmp_path / "store")
    for shard_id in range(6):
        other.add(other.ids(shard_id + 1))
    other.publish()
    with pytest.raises(StateMismatchError, match="another store"):
        make_dataset(other).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="at least 6 shards"):
        make_dataset(TokenStore.of(tmp_path / "small", 5)).load_state_dict(state)


def test_an_error_leaves_the_stream_at_the_batch_that_failed(tmp_path: Path, make_dataset: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 6)
    options = {"cache_dir": tmp_path / "cache", "timeout_s": 1.0, "batch_size": 5}
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
    resumed = make_dataset(store, **options, state=state)
    assert take(resumed, len(rest)) == rest


def test_a_removed_cache_is_no_loss(six_shards, make_dataset, tmp_path):
    expected = take(make_dataset(six_shards), 60)
    dataset = make_dataset(six_shards, cache_dir=tmp_path / "cache")
    found = take(dataset, 20)
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    assert [*found, *take(dataset, 40)] == expected
