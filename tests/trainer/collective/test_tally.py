"""What a tally's words come to, and when more of them cannot change it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.collective.levels.messages import Stage
from trainer.collective.levels.tally import agreed_word, is_closed, table_of

VOTERS = ("a", "b", "c", "d", "e")
WORDS = st.dictionaries(st.sampled_from((*VOTERS, "stranger")), st.sampled_from(("", "1", "2")))


@given(said=WORDS, later=WORDS, absent=st.frozensets(st.sampled_from(VOTERS)))
def test_what_is_closed_no_further_word_changes(
    said: dict[str, str], later: dict[str, str], absent: frozenset[str]
) -> None:
    found = agreed_word(said, VOTERS)
    if found is not None:
        assert 2 * sum(said.get(voter) == found for voter in VOTERS) > len(VOTERS)
    if is_closed(said, VOTERS, absent):
        more = {peer_id: word for peer_id, word in later.items() if peer_id not in absent}
        assert agreed_word(more | said, VOTERS) == found


def test_half_of_the_groups_make_no_round_and_every_slice_is_needed() -> None:
    voters = {0: VOTERS, 1: VOTERS}
    words = {0: dict.fromkeys(VOTERS[:3], "1"), 1: dict.fromkeys(VOTERS[:2], "1")}
    assert "1 of 2 groups" in table_of(Stage.GROUPS, words, voters).failure
    assert "slice 1" in table_of(Stage.SLICES, words, voters).failure
    whole = table_of(Stage.SLICES, words | {1: dict.fromkeys(VOTERS, "2")}, voters)
    assert whole.words() == {0: "1", 1: "2"} and not whole.failure


def test_of_two_halves_the_one_with_the_lowest_id_counts() -> None:
    voters = ("a", "b", "c", "d")
    assert agreed_word({"a": "1", "d": "1"}, voters) == "1"
    assert agreed_word({"a": "1", "d": "1", "b": "2", "c": "2"}, voters) == "1"
    assert agreed_word({"b": "2", "c": "2"}, voters) is None
    assert not is_closed({"b": "2", "c": "2"}, voters)
    assert is_closed({"b": "2", "c": "2"}, voters, frozenset({"a", "d"}))
