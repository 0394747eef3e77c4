from __future__ import annotations

from tests.support.round_actor import identity_of
from trainer.network.discovery import Announcement
from trainer.run.node.peer_book import PeerBook

TERMS = "a" * 64
STATES = [f"{number:x}" * 64 for number in range(8)]


def announced(number: int, outer_step: int, state: str) -> Announcement:
    return Announcement(
        peer_id=identity_of(number).peer_id,
        node_id=f"node-{number}",
        run_id="run",
        address="127.0.0.1:4100",
        terms_digest=TERMS,
        outer_step=outer_step,
        state_digest=state,
    )


def test_those_who_follow_later_do_not_draw_a_node_back():
    book = PeerBook(TERMS)
    book.hold(1, STATES[1])
    book.hold(2, STATES[2])
    book.update(tuple(announced(number, 1, STATES[1]) for number in (1, 2)))
    assert book.state_to_adopt() == STATES[1]
    assert book.state_elsewhere() is None


def test_a_node_that_went_on_alone_sees_where_most_others_are():
    book = PeerBook(TERMS)
    for step in range(1, 5):
        book.hold(step, STATES[step])
    book.update(tuple(announced(number, 2, STATES[7]) for number in (1, 2)))
    assert book.state_elsewhere() == STATES[7]


def test_one_other_with_another_state_is_no_majority():
    book = PeerBook(TERMS)
    book.hold(4, STATES[4])
    book.update((announced(1, 2, STATES[7]),))
    assert book.state_elsewhere() is None
