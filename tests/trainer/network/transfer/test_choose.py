"""Nodes that see the same announcements choose the state most of them hold; each chunk is fetched, whoever fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.network.discovery.announcement import Announcement
from trainer.network.transfer.fetch import ChunkPool, choose_state

_A, _B, _ = _DIGESTS = [letter * 64 for letter in "abc"]


def _said(node: int, step: int, digest: str) -> Announcement:
    return Announcement(
        peer_id=f"{node:064x}", node_id=str(node), run_id="r", address="h:1", outer_step=step, state_digest=digest
    )


_nodes, _steps, _any_digest = st.integers(0, 8), st.integers(0, 5), st.sampled_from(["", *_DIGESTS])
_announcements = st.lists(st.builds(_said, _nodes, _steps, _any_digest), max_size=12)
_own = st.tuples(_steps, _any_digest)
_TWO_HONEST = [_said(node, 7, _B) for node in range(2)]


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        # The most nodes win.
        ((0, ""), [_said(1, 3, _A), _said(2, 3, _A), _said(3, 9, _B)], _A),
        ((3, _A), [_said(1, 3, _A), _said(2, 3, _A), _said(3, 9, _B)], None),
        # One liar is not believed, whatever step it claims, nor if it says it often.
        ((7, _B), [*_TWO_HONEST, _said(9, 2**50, _A)], None),
        ((0, ""), [*_TWO_HONEST, _said(9, 2**50, _A)], _B),
        ((0, ""), [*_TWO_HONEST, *[_said(9, 8, _A)] * 5], _B),
        # Ties go to the higher step, then the lower digest.
        ((0, ""), [_said(1, 3, _A), _said(2, 4, _B)], _B),
        ((0, ""), [_said(1, 3, _B), _said(2, 3, _A)], _A),
        ((3, _A), [_said(2, 3, _B)], None),
        ((3, _B), [_said(2, 3, _A)], _A),
        # Nobody has any.
        ((0, ""), [], None),
        ((0, ""), [_said(1, 0, "")], None),
        ((5, _A), [], None),
    ],
)
def test_the_state_that_most_nodes_hold_is_chosen(
    own: tuple[int, str], others: list[Announcement], chosen: str | None
) -> None:
    assert choose_state(own, others) == chosen


@pytest.mark.slow
@given(own=_own, others=_announcements, seed=st.randoms(use_true_random=False))
def test_no_other_state_has_more_holders_and_the_order_does_not_matter(
    own: tuple[int, str], others: list[Announcement], seed: object
) -> None:
    chosen = choose_state(own, others)
    last: dict[str, str] = {}
    for said in sorted(others, key=lambda said: (said.peer_id, said.outer_step, said.state_digest)):
        last[said.peer_id] = said.state_digest
    holders = {digest: [*last.values(), own[1]].count(digest) for digest in _DIGESTS}
    assert chosen != own[1] or chosen is None
    winner = chosen if chosen is not None else own[1]
    assert (holders[winner] if winner else 0) == max(holders.values())
    seed.shuffle(others)  # type: ignore[attr-defined]
    assert choose_state(own, others) == chosen


@pytest.mark.slow
@given(
    st.lists(st.builds(_said, _nodes, _steps, st.sampled_from(_DIGESTS)), min_size=1, unique_by=lambda it: it.peer_id)
)
def test_nodes_that_hear_of_each_other_agree(others: list[Announcement]) -> None:
    decisions = set()
    for me in others:
        rest = [said for said in others if said.peer_id != me.peer_id]
        decisions.add(choose_state((me.outer_step, me.state_digest), rest) or me.state_digest)
    assert len(decisions) == 1


def test_runs_shrink_towards_the_end() -> None:
    pool = ChunkPool(range(100), max_run=16)
    sizes = []
    while taken := pool.take("a", 2):
        sizes.append(len(taken))
        assert all(map(pool.done, taken))
    assert (sizes[0], sizes[-1], sum(sizes)) == (16, 1, 100)
    assert sizes == sorted(sizes, reverse=True)


def test_an_idle_donor_takes_over_what_another_owes() -> None:
    pool = ChunkPool(range(2), max_run=16)
    assert [pool.take("slow", 1) for _ in range(3)] == [[0], [1], []]  # Not its own again.
    assert pool.take("fast", 2) == [0]
    assert [pool.take("third", 2) for _ in range(2)] == [[1], []]  # Two at a time are enough.
    assert pool.done(0) and not pool.is_missing(0) and not pool.done(0)
    pool.give_back("slow", [0, 1])
    assert pool.num_missing == 1 and pool.is_missing(1)


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
    events=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=80),
)
def test_no_chunk_is_lost_or_done_twice(num_chunks: int, max_run: int, events: list[tuple[int, int]]) -> None:
    pool = ChunkPool(range(num_chunks), max_run)
    done: list[int] = []
    for donor, num_brought in events:
        taken = pool.take(str(donor), 4)
        done += [index for index in taken[:num_brought] if pool.done(index)]
        pool.give_back(str(donor), taken)
        assert pool.num_missing == num_chunks - len(done)
    while taken := pool.take("last", 1):
        done += [index for index in taken if pool.done(index)]
    assert sorted(done) == list(range(num_chunks))
