"""What is believed of the others' rounds and states."""

from __future__ import annotations

import hashlib

import pytest

from trainer.network.discovery import Announcement
from trainer.outer.sparta import NOBODY, OtherRounds, choose_recent_state, frontier_of


def said(name: str, round_index: int, state: str = "") -> Announcement:
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


def test_nobody_is_known() -> None:
    assert isinstance(NOBODY, OtherRounds) and NOBODY.frontier() == 0
    NOBODY.move_to(3)


def test_a_joiner_takes_a_state_of_those_that_are_where_the_others_are() -> None:
    others = [said("a", 40), said("b", 41), said("old", 3), said("ahead", 10**9)]
    chosen = choose_recent_state((0, ""), others)
    assert chosen in {digest("a"), digest("b")}
    assert choose_recent_state((0, ""), reversed(others)) == chosen


def test_a_state_held_by_several_has_several_donors() -> None:
    others = [said("a", 40), said("b", 41), said("c", 40, "a")]
    assert choose_recent_state((0, ""), others) == digest("a")


def test_a_node_keeps_its_own_while_it_is_current() -> None:
    others = [said("a", 40), said("b", 41), said("c", 40)]
    own = digest("own")
    assert choose_recent_state((36, own), others) is None
    assert choose_recent_state((34, own), others) is not None
    assert choose_recent_state((36, ""), others) is not None
    assert choose_recent_state((0, ""), []) is None
    assert choose_recent_state((0, ""), [said("a", 4).model_copy(update={"state_digest": ""})]) is None
