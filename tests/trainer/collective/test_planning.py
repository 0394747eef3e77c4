"""Plans, and what a member accepts from a coordinator."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.round_actor import PEER_IDS, agreement_of, join_request
from trainer.aggregation import Weighing
from trainer.collective.messages import Agreement, Task
from trainer.collective.planning import (
    check_agreement,
    check_plan,
    coordinator_order,
    first_plan,
    may_follow,
    next_plan,
)
from trainer.errors import RefusedError

AGREEMENT = agreement_of(4, 100_000)


@given(st.integers(1, 12), st.integers(1, 5_000_000), st.sampled_from([1024, 4096, 1 << 18, 1 << 20]))
def test_the_first_plan_gives_every_part_to_exactly_one_member(num_members, num_values, most_values):
    agreement = agreement_of(num_members, num_values, most_values)
    plan = first_plan(agreement)
    parts = sorted(part for task in plan.tasks for part in range(task.first_part, task.last_part))
    assert parts == list(range(agreement.num_parts))
    assert {task.reducer for task in plan.tasks} <= set(agreement.peer_ids)
    assert agreement.part_values % 1024 == 0
    assert agreement.part_values <= most_values
    bounds = [agreement.part_bounds(part) for part in parts]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_values
    assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))


@pytest.mark.slow
@given(st.integers(2, 12), st.integers(1, 3_000_000), st.data())
def test_later_passes_cover_what_was_lost_and_nothing_else_and_are_accepted(num_members, num_values, data):
    agreement = agreement_of(num_members, num_values)
    plan = first_plan(agreement)
    for _ in range(3):
        check_plan(plan, agreement, max_passes=4)
        lost = data.draw(st.sets(st.sampled_from([task.key for task in plan.tasks]), min_size=1))
        left = data.draw(st.lists(st.sampled_from(sorted(plan.members)), min_size=1, unique=True))
        following = next_plan(plan, lost, left, left)
        assert following.pass_index == plan.pass_index + 1
        assert not lost & {task.key for task in following.tasks}
        assert {task.reducer for task in following.fresh} <= set(left)
        assert len({task.key for task in following.tasks}) == len(following.tasks)
        parts = sorted(part for task in following.tasks for part in range(task.first_part, task.last_part))
        assert parts == list(range(agreement.num_parts))
        check_plan(following, agreement, max_passes=4)
        if sum(task.last_part - task.first_part for task in following.fresh) >= len(left):
            assert may_follow(following, plan)
        plan = following


@pytest.mark.slow
@given(st.lists(st.sampled_from(PEER_IDS), unique=True), st.integers(0, 10**6), st.randoms())
def test_everybody_finds_the_same_coordinators_whatever_order_peers_are_known_in(peer_ids, round_index, chance):
    order = coordinator_order("run", round_index, peer_ids)
    assert sorted(order) == sorted(peer_ids)
    chance.shuffle(peer_ids)
    assert coordinator_order("run", round_index, peer_ids) == order
    first = {coordinator_order("run", round_index, PEER_IDS)[0] for round_index in range(60)}
    assert len(first) > len(PEER_IDS) // 2


def check(agreement: Agreement, weighing: Weighing = "root", **changes) -> None:
    facts = {"round_index": 3, "state_digest": "0" * 64, "num_values": 100_000, "num_batches": 1}
    request = join_request(**(facts | changes))
    own_id = AGREEMENT.peer_ids[1]
    facts = {"own_id": own_id, "values_per_part": 1 << 18, "max_weight_ratio": 3.0, "weighing": weighing}
    check_agreement(agreement, request, **facts)


def weighing(*weights: float) -> Agreement:
    members = zip(AGREEMENT.members, weights, strict=True)
    return AGREEMENT.model_copy(
        update={"members": tuple(member.model_copy(update={"weight": weight}) for member, weight in members)}
    )


@pytest.mark.parametrize(
    "change",
    [
        {"round_index": 4},
        {"state_digest": "1" * 64},
        {"num_values": 100_001},
        {"part_values": 1 << 20},
        {"vocabulary_rows": 1 << 40},
        {"members": ()},
        {"members": AGREEMENT.members[::-1]},
        {"members": (*AGREEMENT.members[:3], AGREEMENT.members[2])},
    ],
)
def test_an_agreement_about_something_else_is_refused(change):
    with pytest.raises(RefusedError):
        check(AGREEMENT.model_copy(update=change))


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0, 0.0), (1.0, 0.5, 1.0, 1.0), (4.0, 1.0, 1.0, 1.0)])
def test_an_unfair_weight_or_another_progress_is_refused_and_a_fair_one_is_not(weights):
    with pytest.raises(RefusedError, match="weigh"):
        check(weighing(*weights))
    check(AGREEMENT)
    check(weighing(3.0, 1.0, 1.0, 1.0))
    check(weighing(1.0, 3.0, 1.0, 1.0), num_batches=2500)
    with pytest.raises(RefusedError, match="progress"):
        check(AGREEMENT, progress=0.25)
    check(weighing(2500.0, 2500.0, 1000.0, 1000.0), weighing="linear", num_batches=2500)
    with pytest.raises(RefusedError, match="weigh"):
        check(weighing(2500.0, 50.0, 1000.0, 1000.0), weighing="linear", num_batches=2500)


PLAN = first_plan(AGREEMENT)


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": PLAN.tasks[1:]},
        {"tasks": (*PLAN.tasks, PLAN.tasks[0].model_copy(update={"key": "0.99"}))},
        {"tasks": (PLAN.tasks[0].model_copy(update={"reducer": "f" * 64}), *PLAN.tasks[1:])},
        {"tasks": (Task(key="0.0", reducer=PLAN.tasks[0].reducer, first_part=0, last_part=1 << 40),)},
        {"members": ("f" * 64,)},
        {"pass_index": 4},
        {"agreement": "f" * 64},
    ],
)
def test_plans_with_strangers_or_holes_or_without_end_are_refused(change):
    check_plan(PLAN, AGREEMENT, max_passes=4)
    with pytest.raises(RefusedError):
        check_plan(PLAN.model_copy(update=change), AGREEMENT, max_passes=4)


def test_only_a_plan_that_follows_from_the_one_before_replaces_it():
    liar = PLAN.members[0]
    lost = {task.key for task in PLAN.tasks}
    assert may_follow(next_plan(PLAN, {PLAN.tasks[1].key}, PLAN.members, PLAN.members), PLAN)
    assert not may_follow(next_plan(PLAN, lost, PLAN.members, [liar]), PLAN), "one member cannot take it all"
    following = next_plan(PLAN, lost, PLAN.members, PLAN.members)
    assert not may_follow(following.model_copy(update={"pass_index": 3}), PLAN)
    shifted = tuple(task.model_copy(update={"reducer": liar}) for task in following.tasks)
    assert not may_follow(following.model_copy(update={"tasks": shifted}), PLAN)
