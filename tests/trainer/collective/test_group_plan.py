"""Groups of large rounds, what they bear, and what their tallies come to: pure functions."""

from __future__ import annotations

import hashlib
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.aggregation import RuleConfig
from trainer.collective.levels.group_plan import (
    GroupPlan,
    column_rule,
    guaranteed_liars,
    num_groups,
    survivors_in,
    survivors_mask,
)
from trainer.collective.levels.messages import Stage
from trainer.collective.levels.tally import agreed_word, is_closed, table_of
from trainer.collective.planning import is_majority
from trainer.errors import TrainerUsageError

LARGEST = 48


def ids(count: int, salt: str = "") -> list[str]:
    return [hashlib.sha256(f"{salt}{number}".encode()).hexdigest() for number in range(count)]


def plan_of(count: int, round_index: int = 3, state: str = "ab" * 32) -> GroupPlan:
    return GroupPlan.of("run", round_index, state, ids(count))


@settings(max_examples=40, deadline=None)
@given(st.integers(9, LARGEST**2), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_every_member_is_in_one_group_of_a_size_by_one_and_all_make_the_same_plan(count, round_index, chance):
    members = ids(count)
    plan = GroupPlan.of("run", round_index, "ab" * 32, members)
    shuffled = members.copy()
    chance.shuffle(shuffled)
    assert GroupPlan.of("run", round_index, "ab" * 32, shuffled) == plan
    assert sorted(member for group in plan.groups for member in group) == sorted(members)
    sizes = {len(group) for group in plan.groups}
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= LARGEST
    assert 3 <= len(plan.groups) == num_groups(count) <= LARGEST
    assert plan.num_slices == min(sizes)


@settings(max_examples=40, deadline=None)
@given(st.integers(9, 400), st.integers(1, 5000))
def test_slices_cover_all_parts_once_and_a_column_has_one_of_each_group(count, num_parts):
    plan = plan_of(count)
    parts = [part for number in range(plan.num_slices) for part in plan.slice_parts(number, num_parts)]
    assert parts == list(range(num_parts))
    survivors = dict(enumerate(plan.groups))
    speakers = [plan.column(number, survivors) for number in range(plan.num_slices)]
    for column in speakers:
        assert sorted(column.values()) == list(range(len(plan.groups)))
    everybody = [peer_id for column in speakers for peer_id in column]
    assert len(everybody) == len(set(everybody))  # Nobody speaks for two slices while all are there.


@given(st.integers(9, 200), st.data())
@settings(max_examples=40, deadline=None)
def test_a_survivor_takes_the_place_of_who_is_gone(count, data):
    plan = plan_of(count)
    group = data.draw(st.integers(0, len(plan.groups) - 1))
    members = plan.groups[group]
    left = data.draw(st.sets(st.sampled_from(members), min_size=1))
    mask = survivors_mask(members, left)
    assert set(survivors_in(members, mask)) == left
    for number in range(plan.num_slices):
        assert plan.holder(group, number, left) in left


@pytest.mark.parametrize("mask", ["0", "00f", "1" + "0" * 12, "-1", "", "g"])
def test_masks_of_no_such_group_are_refused(mask):
    with pytest.raises(ValueError):
        survivors_in(plan_of(16).groups[0], mask)


def test_groups_change_from_round_to_round_and_with_the_state():
    """Two members are in one group as often as chance has it: in a quarter of the rounds with four groups of four."""
    members = ids(16)
    together = dict.fromkeys(combinations(sorted(members), 2), 0)
    for round_index in range(200):
        for group in plan_of(16, round_index).groups:
            for pair in combinations(sorted(group), 2):
                together[pair] += 1
    assert sum(together.values()) / len(together) == pytest.approx(200 * 3 / 15)
    assert min(together.values()) > 15 and max(together.values()) < 70
    assert plan_of(16, state="cd" * 32) != plan_of(16)


@pytest.mark.parametrize("count", [0, 8, LARGEST**2 + 1])
def test_too_few_and_too_many_members_are_refused(count):
    with pytest.raises(TrainerUsageError, match="9 to 2304 members"):
        num_groups(count)


def test_what_a_round_in_groups_bears_at_worst():
    assert guaranteed_liars(1000, RuleConfig(rule="trimmed_mean", trim_fraction=0.3)) == 10 * 10 - 1
    assert guaranteed_liars(64, RuleConfig(rule="median")) == 4 * 4 - 1
    assert guaranteed_liars(64, RuleConfig(rule="mean")) == 0
    assert column_rule(RuleConfig(rule="krum")).rule == "trimmed_mean"
    assert column_rule(RuleConfig(rule="median")).rule == "median"


@given(st.integers(1, 9), st.data())
def test_a_word_counts_once_most_voters_have_said_it_and_then_stays(count, data):
    voters = ids(count)
    said: dict[str, str] = {}
    decided: str | None = None
    for voter in data.draw(st.permutations(voters)):
        said[voter] = data.draw(st.sampled_from(["a", "b"]))
        word = agreed_word(said, voters)
        assert decided in (None, word)
        decided = word
        assert is_closed(said, voters) or len(said) < count
    if decided is not None:
        assert is_majority({voter for voter in voters if said[voter] == decided}, sorted(voters))


def test_what_is_not_a_voter_has_no_word_and_the_dead_count_as_voters():
    voters = ids(4)
    strangers = dict.fromkeys(ids(9, "stranger"), "b")
    lowest, *others = sorted(voters)
    assert agreed_word({others[0]: "a", others[1]: "a", **strangers}, voters) is None
    assert is_closed({lowest: "a"}, voters, frozenset(others))
    assert not is_closed({lowest: "a"}, voters)


def test_a_round_needs_all_slices_and_most_groups():
    voters = {0: ids(3), 1: ids(3, "x"), 2: ids(3, "y")}
    words = {subject: dict.fromkeys(each, "ab") for subject, each in voters.items()}
    assert table_of(Stage.SLICES, words, voters).rows == ((0, "ab"), (1, "ab"), (2, "ab"))
    words[1] = {}
    assert "slice 1" in table_of(Stage.SLICES, words, voters).failure
    assert table_of(Stage.GROUPS, words, voters).rows == ((0, "ab"), (2, "ab"))
    words[2] = dict.fromkeys(voters[2], "")
    assert "only 1 of 3 groups" in table_of(Stage.GROUPS, words, voters).failure
    assert table_of(Stage.HELD, {}, {0: ids(3)}).failure


@pytest.mark.parametrize(
    "rows",
    [
        (),
        ((0, "7.aa"),),  # One group for all.
        ((-1, "7.aa"), (0, "7.aa"), (1, "7.aa")),  # A group twice, under a number that indexing takes.
        ((0, "7.aa"), (0, "7.aa"), (1, "7.aa")),
        ((1, "7.aa"), (0, "7.aa")),
        ((0, "7.aa"), (3, "7.aa")),
        ((0, "7.aa"), (1, "1.aa")),  # One member for its group.
        ((0, "7.aa"), (1, "")),
        ((0, "7.aa"), (1, "f.aa")),
    ],
)
def test_a_table_of_groups_names_most_groups_each_with_most_of_its_members(rows) -> None:
    plan = GroupPlan.of("run", 0, "0" * 64, [f"{number:064x}" for number in range(9)])
    with pytest.raises(ValueError, match=r"expected|invalid literal"):
        plan.survivors_told(rows)


def test_who_is_left_follows_from_a_table() -> None:
    plan = GroupPlan.of("run", 0, "0" * 64, [f"{number:064x}" for number in range(9)])
    assert plan.survivors_told(((0, "7.aa"), (2, "3.aa"))) == {0: plan.groups[0], 2: plan.groups[2][:2]}
