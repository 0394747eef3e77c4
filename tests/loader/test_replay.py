"""The same node gives the same batches anywhere, and a peer can make any of them again."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader import GenesisDataset, LoaderUsageError, PlateauRule, verify_assignment
from loader.stream.permutation import window_order
from tests.support.batches import digest, take
from tests.support.token_store import TokenStore, fixed_ids

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


def test_golden_digests(six_shards: TokenStore, make_dataset: Make) -> None:
    for node_id, expected in GOLDEN.items():
        found = take(make_dataset(six_shards, node_id), 301)
        assert [found[step] for step in (0, 1, 50, 300)] == expected
    mixed = make_dataset(
        six_shards, "gpu-7", seed=9, batch_size=3, seq_len=100, assignment="rendezvous", count=4, holdout=1
    )
    assert take(mixed, 90)[-1] == "2932dbacf3a0edc2a6f2d0bd"


@pytest.mark.slow
def test_another_process(six_shards: TokenStore, shared_cache: Path) -> None:
    program = f"""
from loader import GenesisDataset
from tests.support.batches import take
dataset = GenesisDataset({six_shards.url!r}, "gpu-7", seq_len=64, batch_size=4, cache_dir={str(shared_cache)!r})
print(*take(dataset, 51))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    found = done.stdout.split()
    assert [found[0], found[1], found[50]] == GOLDEN["gpu-7"][:3]


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


def test_nodes_epochs_and_seeds_differ(six_shards: TokenStore, make_dataset: Make) -> None:
    first = take(make_dataset(six_shards), 94)
    assert len(set(first)) == 94  # Two epochs of 46.5 batches, no two alike.
    assert not set(first) & set(take(make_dataset(six_shards, "node-b"), 94))
    assert not set(first) & set(take(make_dataset(six_shards, seed=1), 94))


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
def test_a_peer_finds_the_batch(
    two_sources: TokenStore,
    make_dataset: Make,
    batch_size: int,
    seq_len: int,
    sources: dict[str, float] | None,
    epochs: int | None,
    rotations: set[int],
    step: int,
) -> None:
    options = {"batch_size": batch_size, "seq_len": seq_len, "sources": sources, "epochs": epochs, "count": 2}
    node = make_dataset(two_sources, "node-a", **options)
    node.load_state_dict({**node.state_dict(), "rotations": sorted(rotations)})
    found: list[str] = []
    while len(found) < 30:
        found += take(node, 30 - len(found))
    peer = make_dataset(two_sources, "node-b", **options)
    assert digest(peer.replay("node-a", step, rotations=sorted(rotations, reverse=True))) == found[step]


def test_a_peer_finds_the_batch_after_rotations(six_shards: TokenStore, make_dataset: Make) -> None:
    node = make_dataset(six_shards, plateau=QUICK)
    found = []
    for batch in itertools.islice(node, 20):
        found.append(digest(batch))
        node.report_loss(0.01)
    assert node.rotations
    peer = make_dataset(six_shards, "node-b", plateau="off")
    assert [digest(peer.replay("node-a", step, rotations=node.rotations)) for step in range(20)] == found
    assert [digest(peer.replay("node-a", step)) for step in range(20)] != found
    with pytest.raises(LoaderUsageError):
        peer.replay("node-a", -1)
    with pytest.raises(LoaderUsageError):
        peer.replay("node-a", 3, total_shards=7)


def test_a_store_that_has_grown_since(tmp_path: Path, make_dataset: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 4)
    node = make_dataset(store, cache_dir=tmp_path / "a")
    found = take(node, 5)
    store.grow(5)
    peer = make_dataset(store, "node-b", cache_dir=tmp_path / "b")
    assert digest(peer.replay("node-a", 4, total_shards=4)) == found[4]
    assert digest(peer.replay("node-a", 4)) != found[4]
    assert verify_assignment("node-a", node.shards, 4)
    assert not verify_assignment("node-a", node.shards, 9)


@pytest.mark.parametrize("sources", [None, {"alpha": 3.0, "beta": 1.0}])
def test_a_batch_far_away(two_sources: TokenStore, make_dataset: Make, sources: dict[str, float] | None) -> None:
    dataset = make_dataset(two_sources, sources=sources)
    far = 2**40 - 1
    dataset.load_state_dict(dataset.state_dict(step=far - 3))
    assert digest(dataset.replay("node-a", far)) == take(dataset, 4)[3]
    for step, rotations in ((far + 1, []), (3, [far + 1]), (3, [-1])):
        with pytest.raises(LoaderUsageError, match=r"expected steps of 0 to 2\*\*40 - 1"):
            dataset.replay("node-a", step, rotations=rotations)


@pytest.mark.parametrize("sources", [None, {"alpha": 3.0, "beta": 1.0}])
def test_a_batch_many_passes_away(
    two_sources: TokenStore, make_dataset: Make, sources: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.stream.schedule._MAX_PASSES", 400)
    dataset = make_dataset(two_sources, sources=sources, epochs=1, seq_len=999, count=2)
    found: list[str] = []
    while len(found) < 200:
        found += take(dataset)
    assert [digest(dataset.replay("node-a", step)) for step in (100, 199)] == [found[100], found[199]]
    for ask in (dataset.replay, lambda _, step: dataset.state_dict(step=step)):
        with pytest.raises(LoaderUsageError, match="expected a step within 400 passes, found 2000000"):
            ask("node-a", 2_000_000)
