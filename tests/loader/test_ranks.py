"""Ranks of one node: each window goes to one of them, whatever their number, and a run goes on with another number."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from loader import GenesisDataset, LoaderUsageError, PlateauRule, StateMismatchError
from loader.ranks import resolve_ranks
from tests.support.token_store import TokenStore, digest, take

Make = Callable[..., GenesisDataset]
pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning", "ignore:'set_vital' is deprecated:UserWarning"
)


def rows_of(batches: Iterable[dict[str, Any]]) -> list[list[bytes]]:
    """For every batch its rows, each input and its last label."""
    return [
        [
            torch.cat((row, last[-1:])).numpy().tobytes()
            for row, last in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
        for batch in batches
    ]


def windows_of(store: TokenStore, shards: Iterable[int], seq_len: int) -> Counter[bytes]:
    """Every window of some shards, from the store's own ids."""
    count = (store.shard_tokens - 1) // seq_len
    return Counter(
        store.ids(shard)[seq_len * window : seq_len * (window + 1) + 1].tobytes()
        for shard in shards
        for window in range(count)
    )


@pytest.fixture
def ranks_of(make_dataset: Make) -> Callable[..., list[GenesisDataset]]:
    def make(store: TokenStore, world_size: int, **options: Any) -> list[GenesisDataset]:
        return [make_dataset(store, rank=rank, world_size=world_size, **options) for rank in range(world_size)]

    return make


@pytest.mark.parametrize("count", [3, None])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_window_goes_to_one_rank_an_epoch(six_shards, ranks_of, world_size, count):
    ranks = ranks_of(six_shards, world_size, count=count, epochs=1, batch_size=2)
    shards = ranks[0].shards
    assert len(shards) == (count or 6)
    for _ in range(2):  # Pass after pass.
        read = [rows_of(rank) for rank in ranks]
        assert len({len(batches) for batches in read}) == 1  # Or all would wait for the rank with a step more.
        assert Counter(row for batches in read for rows in batches for row in rows) == windows_of(
            six_shards, shards, 64
        )


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 5),
    st.integers(2, 6),
    st.sampled_from([64, 333, 999]),
    st.sampled_from([None, {"alpha": 3, "beta": 1}]),
)
def test_ranks_have_as_many_steps_each(two_sources, ranks_of, batch_size, world_size, seq_len, sources):
    ranks = ranks_of(
        two_sources, world_size, batch_size=batch_size, seq_len=seq_len, sources=sources, epochs=1, count=4
    )
    read = [rows_of(rank) for rank in ranks]
    steps = [len(batches) for batches in read]
    rows = [row for batches in read for rows in batches for row in rows]
    assert len(rows) == len(set(rows))
    if sources is None:
        assert len(rows) == 4 * (1_999 // seq_len)
    if batch_size > 1 and len(rows) >= world_size:
        assert len(set(steps)) == 1
    else:  # With one row a batch, the last rows may be fewer than ranks.
        assert max(steps) - min(steps) <= 1


@pytest.mark.parametrize("sources", [None, {"alpha": 0.8, "beta": 0.2}])
def test_ranks_together_read_what_one_reads(two_sources, make_dataset, ranks_of, sources):
    options = {"sources": sources, "count": 3}
    expected = rows_of(islice(make_dataset(two_sources, batch_size=12, **options), 20))
    for world_size, batch_size in ((2, 6), (3, 4), (12, 1)):
        ranks = ranks_of(two_sources, world_size, batch_size=batch_size, **options)
        read = [rows_of(islice(rank, 20)) for rank in ranks]
        for step, rows in enumerate(expected):
            assert sorted(row for batches in read for row in batches[step]) == sorted(rows)
            assert all(len(batches[step]) == batch_size for batches in read)


@pytest.mark.parametrize("sources", [None, {"alpha": 0.8, "beta": 0.2}])
@pytest.mark.parametrize("epochs", [None, 2])
def test_a_run_goes_on_with_another_number_of_ranks(two_sources, ranks_of, sources, epochs):
    """At any step, with any batch size: rows are counted over all ranks."""
    options = {"sources": sources, "count": 2, "seq_len": 99, "epochs": epochs}
    whole = [
        row for batch in rows_of(islice(ranks_of(two_sources, 1, batch_size=1, **options)[0], 60)) for row in batch
    ]
    state = None
    read: list[bytes] = []
    for world_size, batch_size, steps in ((2, 3, 3), (3, 2, 2), (1, 5, 2), (4, 1, 4)):
        ranks = ranks_of(two_sources, world_size, batch_size=batch_size, state=state, **options)
        batches = [rows_of(islice(rank, steps)) for rank in ranks]
        for step in range(steps):
            read += sorted(row for each in batches for row in each[step])
        states = [json.dumps(rank.state_dict()) for rank in ranks]
        assert len(set(states)) == 1  # Any rank's state is that of all.
        state = json.loads(states[0])
    assert state["step"] == 11
    assert Counter(read) == Counter(whole[: len(read)])


def test_states_of_other_ranks_that_do_not_say_where_to_go_on(two_sources, make_dataset):
    one = make_dataset(two_sources)
    take(one, 3)
    pending = {**one.state_dict(), "rotations": [3]}
    with pytest.raises(StateMismatchError, match="leave a shard at a later step"):
        make_dataset(two_sources, rank=0, world_size=2, state=pending)
    old = make_dataset(two_sources, sources={"alpha": 3, "beta": 1}, mixture="weyl")
    take(old, 3)
    mixed = {"sources": {"alpha": 3, "beta": 1}, "rank": 1, "world_size": 2}
    with pytest.raises(StateMismatchError, match="keep batch_size × world_size at 4"):
        make_dataset(two_sources, **mixed, state=old.state_dict())
    make_dataset(two_sources, **mixed, batch_size=2, state=old.state_dict())
    two = make_dataset(two_sources, rank=0, world_size=2)
    with pytest.raises(StateMismatchError, match="batch_size=5"):
        make_dataset(two_sources, rank=0, world_size=2, batch_size=5, state=two.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_a_rank_give_the_sequence_of_the_rank(two_sources, ranks_of, workers):
    options = {"epochs": 1, "count": 2, "sources": {"alpha": 2, "beta": 1}, "batch_size": 3}
    expected = [take(rank) for rank in ranks_of(two_sources, 2, **options)]
    for rank, batches in zip(ranks_of(two_sources, 2, **options), expected, strict=True):
        assert take(DataLoader(rank, batch_size=None, num_workers=workers, timeout=60)) == batches
    for rank, batches in zip(ranks_of(two_sources, 2, **options), expected, strict=True):
        loader = StatefulDataLoader(rank, batch_size=None, num_workers=workers, timeout=60)
        assert take(loader, 4) == batches[:4]
        again = StatefulDataLoader(
            ranks_of(two_sources, 2, **options)[rank.options.rank], batch_size=None, num_workers=workers, timeout=60
        )
        again.load_state_dict(copy.deepcopy(loader.state_dict()))
        assert take(again) == batches[4:]


@pytest.mark.slow
def test_a_state_of_workers_belongs_to_their_number_of_ranks(two_sources, ranks_of):
    loader = StatefulDataLoader(ranks_of(two_sources, 2)[0], batch_size=None, num_workers=1, timeout=60)
    take(loader, 3)
    state = copy.deepcopy(loader.state_dict())
    again = StatefulDataLoader(ranks_of(two_sources, 3)[0], batch_size=None, num_workers=1, timeout=60)
    again.load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"save dataset\.state_dict\(step=N\)"):
        take(again, 1)


@pytest.mark.parametrize("sources", [None, {"alpha": 3, "beta": 1}])
def test_a_peer_finds_the_batch_of_a_rank(two_sources, make_dataset, ranks_of, sources):
    ranks = ranks_of(two_sources, 3, sources=sources)
    read = [take(rank, 9) for rank in ranks]
    peer = make_dataset(two_sources, "node-b", sources=sources, rank=0, world_size=3)
    for rank in range(3):
        assert [digest(peer.replay("node-a", step, rank=rank)) for step in (0, 8)] == [read[rank][0], read[rank][8]]
    with pytest.raises(LoaderUsageError, match="rank: expected 0 to 2"):
        peer.replay("node-a", 0, rank=3)


def test_ranks_agree_on_a_store_that_grows(tmp_path, ranks_of, make_dataset):
    store = TokenStore.of(tmp_path / "store", 4)
    first = make_dataset(store, rank=0, world_size=2, cache_dir=tmp_path / "a")
    store.grow(3)
    late = make_dataset(store, rank=1, world_size=2, cache_dir=tmp_path / "b", total_shards=4)
    assert late.shards == first.shards
    assert len(make_dataset(store, cache_dir=tmp_path / "b", count=None).shards) == 7
    # More than the manifest that this machine has verified within a minute.
    assert len(make_dataset(store, cache_dir=tmp_path / "a", count=None, total_shards=7).shards) == 7
    with pytest.raises(LoaderUsageError, match="expected 1 to 7 shards"):
        make_dataset(store, total_shards=8)
    with pytest.raises(LoaderUsageError, match=r"expected refresh\(\) on rank 0, found rank 1"):
        late.refresh()
    assert first.refresh() == 7
    late.load_state_dict(first.state_dict())
    assert late.pins == first.pins == (((0, 4), (1, 7)),)


def test_labels_for_models_that_shift_them(six_shards, make_dataset):
    shifted = next(iter(make_dataset(six_shards)))
    plain = next(iter(make_dataset(six_shards, labels="input_ids")))
    assert plain["input_ids"].equal(shifted["input_ids"])
    assert plain["labels"].equal(plain["input_ids"])
    assert shifted["labels"][:, :-1].equal(plain["labels"][:, 1:])
    plain["labels"][:] = -100  # As models do that mask labels.
    assert plain["input_ids"].equal(shifted["input_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 1}, "expected both rank and world_size"),
        ({"world_size": 2}, "expected both rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank: expected 0 to 1"),
        ({"rank": -1, "world_size": 2}, "rank: expected 0 to 1"),
        ({"rank": 0, "world_size": 0}, "world_size: expected 1 or more"),
        ({"rank": 1.0, "world_size": 2}, "rank: expected a whole number"),
        ({"rank": "first", "world_size": 2}, "rank: expected a number or 'auto'"),
        ({"rank": "auto", "world_size": 2}, "expected rank='auto' or world_size"),
        ({"rank": 0, "world_size": 2, "plateau": "relative"}, "plateau: expected 'off' with 2 ranks"),
        ({"labels": "none"}, "labels: expected one of shifted, input_ids"),
        ({"mixture": "even"}, "mixture: expected one of exact, weyl"),
        ({"count": 0}, "count: expected 1 or more, or None"),
        ({"total_shards": 1.5}, "total_shards: expected a whole number"),
    ],
)
def test_options_that_make_no_sense(six_shards, make_dataset, options, message):
    with pytest.raises(LoaderUsageError, match=message):
        make_dataset(six_shards, **options)


def test_ranks_leave_shards_together(six_shards, make_dataset):
    rank = make_dataset(six_shards, rank=0, world_size=2)
    assert rank.options.plateau == PlateauRule("off")
    for _ in islice(rank, 200):
        rank.report_loss(0.0)
    assert rank.rotations == ()


def test_the_rank_that_a_launcher_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert resolve_ranks("auto", None) == (0, 1)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(LoaderUsageError, match="since SLURM_NTASKS is 4"):
        resolve_ranks("auto", None)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolve_ranks("auto", None) == (3, 4)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(LoaderUsageError, match="expected numbers in RANK and WORLD_SIZE"):
        resolve_ranks("auto", None)
