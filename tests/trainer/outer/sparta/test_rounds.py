"""Rounds, failures and staleness of one node among others, and what it believes of their rounds and states."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.network.discovery import Announcement
from trainer.outer.sparta import NOBODY, OtherRounds, choose_recent_state, frontier_of
from trainer.outer.sparta.rounds import RoundStanding


def announced(name: str, round_index: int, state: str = "") -> Announcement:
    return Announcement(
        peer_id=hashlib.sha256(name.encode()).hexdigest(),
        node_id=name,
        run_id="r",
        address="127.0.0.1:1",
        outer_step=round_index,
        state_digest=hashlib.sha256((state or name).encode()).hexdigest(),
    )


def digest(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [([], 0), ([7], 7), ([7, 8], 7), ([7, 7, 8], 7), ([7, 8, 10**12], 8), ([0, 7, 8], 7), ([7, 8, 9, 10**12], 8)],
)
def test_a_minority_of_liars_moves_nobody(rounds: list[int], expected: int) -> None:
    assert frontier_of(rounds) == expected
    assert isinstance(NOBODY, OtherRounds) and NOBODY.frontier() == 0


def test_a_joiner_takes_a_state_of_those_that_are_where_the_others_are() -> None:
    others = [announced("a", 40), announced("b", 41), announced("old", 3), announced("ahead", 10**9)]
    chosen = choose_recent_state((0, ""), others)
    assert chosen in {digest("a"), digest("b")}
    assert choose_recent_state((0, ""), reversed(others)) == chosen
    others = [announced("a", 40), announced("b", 41), announced("c", 40, "a")]
    assert choose_recent_state((0, ""), others) == digest("a"), "held by several: several donors"


def test_a_node_keeps_its_own_while_it_is_current() -> None:
    others = [announced("a", 40), announced("b", 41), announced("c", 40)]
    own = digest("own")
    assert choose_recent_state((36, own), others) is None
    assert choose_recent_state((34, own), others) is not None
    assert choose_recent_state((36, ""), others) is not None
    assert choose_recent_state((0, ""), []) is None
    assert choose_recent_state((0, ""), [announced("a", 4).model_copy(update={"state_digest": ""})]) is None


def standing(**fields: int) -> RoundStanding:
    return RoundStanding(max_staleness_rounds=5, max_failed_rounds=2, **fields)


def test_a_committed_round_is_counted_and_forgives() -> None:
    it = standing(round_index=4, reached=4)
    it.failed()
    it.committed()
    assert (it.round_index, it.missed_rounds, it.failed_in_a_row) == (5, 0, 0)


def test_a_round_that_fails_for_all_is_tried_again_by_all() -> None:
    it = standing(round_index=4, reached=4)
    for _ in range(7):
        it.failed()
    assert it.round_index == 4 and it.failed_in_a_row == 7
    assert not it.must_rejoin and it.counts, "no node is sent away for what happened to all"


def test_two_rounds_failed_while_the_others_went_on() -> None:
    it = standing(round_index=4, reached=4)
    it.failed()
    it.missed()
    assert (it.round_index, it.failed_in_a_row) == (5, 1), "to be refused with a round that failed is no new failure"
    assert not it.must_rejoin
    it.missed()
    assert (it.round_index, it.failed_in_a_row) == (6, 2)
    assert it.must_rejoin and not it.behind


def test_rounds_missed_are_borne_up_to_a_limit() -> None:
    it = standing(round_index=10, reached=10)
    assert not it.see(10) and not it.see(3) and it.round_index == 10
    assert it.see(15) and (it.round_index, it.missed_rounds) == (15, 5)
    assert not it.must_adopt and it.counts and it.failed_in_a_row == 0
    assert it.see(16) and it.behind and it.must_rejoin and not it.counts
    assert it.round_index == 15, "a state has to be taken up; rounds are not counted on"
    assert not it.see(17), "found behind only once"


def test_ghosts_count_after_their_rounds() -> None:
    it = standing()
    it.damaged = True
    it.adopted(7, ghost_rounds=2)
    found = []
    for _ in range(3):
        found.append(it.counts)
        it.failed()
        it.committed()
    assert found == [False, False, True] and it.round_index == 10 and not it.damaged


@pytest.mark.parametrize("field", ["behind", "damaged"])
def test_only_a_state_of_others_helps_the_damaged(field: str) -> None:
    it = standing()
    setattr(it, field, True)
    it.committed()
    assert it.must_adopt == (field == "damaged")


EVENTS = st.lists(
    st.tuples(st.sampled_from(["committed", "failed", "missed", "see", "adopted"]), st.integers(0, 30)), max_size=40
)


@given(EVENTS)
def test_whatever_happens_the_counters_make_sense(events: list[tuple[str, int]]) -> None:
    it = standing()
    for kind, number in events:
        before = it.round_index
        match kind:
            case "see":
                it.see(number)
            case "missed":
                it.missed(number)
            case "adopted":
                it.adopted(number, 5)
            case _:
                getattr(it, kind)()
        assert kind == "adopted" or it.round_index >= before
        assert 0 <= it.missed_rounds <= it.max_staleness_rounds
        assert it.ghost_rounds_left >= 0 and it.failed_in_a_row >= 0
