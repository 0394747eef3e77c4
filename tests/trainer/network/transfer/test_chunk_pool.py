"""Every chunk is fetched, none is lost with a donor, and idle donors take over from slow ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.network.transfer.download import ChunkPool


def test_runs_shrink_towards_the_end() -> None:
    pool = ChunkPool(range(100), max_run=16)
    sizes = []
    while taken := pool.take("a", 2):
        sizes.append(len(taken))
        for index in taken:
            assert pool.done(index)
    assert sizes[0] == 16
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 100


def test_an_idle_donor_takes_over_what_another_owes() -> None:
    pool = ChunkPool(range(2), max_run=16)
    assert pool.take("slow", 1) == [0]
    assert pool.take("slow", 1) == [1]
    assert pool.take("slow", 1) == []  # Not its own again.
    assert pool.take("fast", 2) == [0]
    assert pool.take("third", 2) == [1]
    assert pool.take("third", 2) == []  # Two at a time are enough.
    assert pool.done(0)
    assert not pool.is_missing(0)
    assert not pool.done(0)
    pool.give_back("slow", [0, 1])
    assert pool.num_missing == 1
    assert pool.is_missing(1)


def test_what_a_dead_donor_owed_comes_next() -> None:
    pool = ChunkPool(range(40), max_run=4)
    taken = pool.take("dead", 1)
    assert taken == [0, 1, 2, 3]
    pool.done(0)
    pool.give_back("dead", taken)
    assert pool.take("b", 1) == [1, 2, 3, 4]


@given(
    num_chunks=st.integers(0, 60),
    max_run=st.integers(1, 8),
    events=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.booleans()), max_size=80),
)
def test_no_chunk_is_lost_or_done_twice(num_chunks: int, max_run: int, events: list[tuple[int, int, bool]]) -> None:
    pool = ChunkPool(range(num_chunks), max_run)
    done: list[int] = []
    for donor, num_brought, _ in events:
        taken = pool.take(str(donor), 4)
        done += [index for index in taken[:num_brought] if pool.done(index)]
        pool.give_back(str(donor), taken)
        assert pool.num_missing == num_chunks - len(done)
    while taken := pool.take("last", 1):
        done += [index for index in taken if pool.done(index)]
    assert sorted(done) == list(range(num_chunks))
