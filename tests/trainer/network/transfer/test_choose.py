"""All nodes that see the same announcements choose the state most of them hold, whatever one of them claims."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.network.discovery.announcement import Announcement
from trainer.network.transfer.fetch import choose_state

_DIGESTS = [letter * 64 for letter in "abc"]


def _said(node: int, step: int, digest: str) -> Announcement:
    return Announcement(
        peer_id=f"{node:064x}", node_id=str(node), run_id="r", address="h:1", outer_step=step, state_digest=digest
    )


_announcements = st.lists(
    st.builds(_said, st.integers(0, 8), st.integers(0, 5), st.sampled_from(["", *_DIGESTS])), max_size=12
)
_own = st.tuples(st.integers(0, 5), st.sampled_from(["", *_DIGESTS]))


_A, _B, _ = _DIGESTS
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
def test_the_order_of_what_is_heard_does_not_matter(
    own: tuple[int, str], others: list[Announcement], seed: object
) -> None:
    shuffled = list(others)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_state(own, others) == choose_state(own, shuffled)


@pytest.mark.slow
@given(own=_own, others=_announcements)
def test_no_other_state_has_more_holders(own: tuple[int, str], others: list[Announcement]) -> None:
    last: dict[str, Announcement] = {}
    for said in sorted(others, key=lambda said: (said.peer_id, said.outer_step, said.state_digest)):
        last[said.peer_id] = said
    holders = {digest: sum(said.state_digest == digest for said in last.values()) for digest in _DIGESTS}
    if own[1]:
        holders[own[1]] += 1
    chosen = choose_state(own, others)
    assert chosen != own[1] or chosen is None
    winner = chosen if chosen is not None else own[1]
    assert (holders[winner] if winner else 0) == max(holders.values())


@pytest.mark.slow
@given(
    others=st.lists(
        st.builds(_said, st.integers(0, 8), st.integers(0, 5), st.sampled_from(_DIGESTS)),
        min_size=1,
        max_size=9,
        unique_by=lambda said: said.peer_id,
    )
)
def test_nodes_that_hear_of_each_other_agree(others: list[Announcement]) -> None:
    decisions = set()
    for me in others:
        rest = [said for said in others if said.peer_id != me.peer_id]
        decisions.add(choose_state((me.outer_step, me.state_digest), rest) or me.state_digest)
    assert len(decisions) == 1
