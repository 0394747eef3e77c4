from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.collective.test_planning import agreement_of
from trainer.collective.checking import check_agreement, check_plan, may_follow
from trainer.collective.messages import Agreement, Task
from trainer.collective.planning import first_plan, next_plan
from trainer.errors import RefusedError

MOST_VALUES = 1 << 18


def check(agreement: Agreement, **changes) -> None:
    facts = {
        "own_id": agreement_of(4, 100_000).peer_ids[1],
        "round_index": 3,
        "state_digest": "0" * 64,
        "num_values": 100_000,
        "own_weight": 1.0,
        "own_progress": 1.0,
        "vocabulary_rows": 1024,
        "values_per_part": MOST_VALUES,
        "max_weight_ratio": 3.0,
    }
    check_agreement(agreement, **(facts | changes))


def weighing(agreement: Agreement, *weights: float) -> Agreement:
    members = zip(agreement.members, weights, strict=True)
    return agreement.model_copy(
        update={"members": tuple(member.model_copy(update={"weight": weight}) for member, weight in members)}
    )


def test_a_fair_agreement_is_taken():
    check(agreement_of(4, 100_000))
    check(weighing(agreement_of(4, 100_000), 3.0, 1.0, 1.0, 1.0))
    check(weighing(agreement_of(4, 100_000), 1.0, 3.0, 1.0, 1.0), own_weight=50.0)


@pytest.mark.parametrize(
    "change",
    [
        {"round_index": 4},
        {"state_digest": "1" * 64},
        {"num_values": 100_001},
        {"part_values": 1},
        {"part_values": 1 << 20},
        {"vocabulary_rows": 1 << 40},
        {"members": ()},
    ],
)
def test_an_agreement_about_something_else_is_refused(change):
    agreement = agreement_of(4, 100_000)
    with pytest.raises(RefusedError):
        check(agreement.model_copy(update=change))


def test_nobody_is_weighed_away_and_nobody_counts_for_more_than_he_may():
    for weights in ((1.0, 0.0, 0.0, 0.0), (1.0, 0.5, 1.0, 1.0), (4.0, 1.0, 1.0, 1.0)):
        with pytest.raises(RefusedError, match="weigh"):
            check(weighing(agreement_of(4, 100_000), *weights))


def test_members_in_another_order_or_twice_are_refused():
    agreement = agreement_of(4, 100_000)
    for members in (agreement.members[::-1], (*agreement.members[:3], agreement.members[2])):
        with pytest.raises(RefusedError):
            check(agreement.model_copy(update={"members": members}))


def test_plans_of_strangers_with_holes_or_without_end_are_refused():
    agreement = agreement_of(4, 100_000)
    plan = first_plan(agreement)
    check_plan(plan, agreement, max_passes=4)
    first = plan.tasks[0]
    bad = [
        {"tasks": plan.tasks[1:]},
        {"tasks": (*plan.tasks, plan.tasks[0].model_copy(update={"key": "0.99"}))},
        {"tasks": (first.model_copy(update={"reducer": "f" * 64}), *plan.tasks[1:])},
        {"tasks": (Task(key="0.0", reducer=first.reducer, first_part=0, last_part=1 << 40),)},
        {"members": ("f" * 64,)},
        {"pass_index": 4},
        {"agreement": "f" * 64},
    ]
    for change in bad:
        with pytest.raises(RefusedError):
            check_plan(plan.model_copy(update=change), agreement, max_passes=4)


def test_only_a_plan_that_follows_from_the_one_before_takes_its_place():
    agreement = agreement_of(4, 100_000)
    plan = first_plan(agreement)
    liar = plan.members[0]
    lost = {task.key for task in plan.tasks}
    assert may_follow(next_plan(plan, {plan.tasks[1].key}, plan.members, plan.members), plan)
    assert not may_follow(next_plan(plan, lost, plan.members, [liar]), plan), "one member cannot take it all"
    following = next_plan(plan, lost, plan.members, plan.members)
    assert not may_follow(following.model_copy(update={"pass_index": 3}), plan)
    shifted = tuple(task.model_copy(update={"reducer": liar}) for task in following.tasks)
    assert not may_follow(following.model_copy(update={"tasks": shifted}), plan)


@pytest.mark.slow
@given(st.integers(2, 10), st.integers(1, 2_000_000), st.data())
def test_every_plan_that_is_made_passes_and_follows(num_members, num_values, data):
    agreement = agreement_of(num_members, num_values)
    plan = first_plan(agreement)
    for _ in range(2):
        check_plan(plan, agreement, max_passes=4)
        lost = data.draw(st.sets(st.sampled_from([task.key for task in plan.tasks]), min_size=1))
        left = sorted(data.draw(st.sets(st.sampled_from(plan.members), min_size=1)))
        following = next_plan(plan, lost, left, left)
        check_plan(following, agreement, max_passes=4)
        num_lost = sum(task.last_part - task.first_part for task in following.fresh)
        if num_lost >= len(left):
            assert may_follow(following, plan)
        plan = following


def test_nobody_says_another_progress_of_a_node_than_it_did():
    with pytest.raises(RefusedError, match="progress"):
        check(agreement_of(4, 100_000), own_progress=0.25)
