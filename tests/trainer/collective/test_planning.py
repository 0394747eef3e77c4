from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.round_actor import identity_of
from trainer.collective.messages import Agreement, Member
from trainer.collective.planning import coordinator_order, cut_values, first_plan, next_plan

PEER_IDS = [identity_of(number).peer_id for number in range(12)]


def agreement_of(num_members: int, num_values: int, most_values: int = 1 << 18) -> Agreement:
    return Agreement(
        round_index=3,
        attempt=0,
        coordinator=PEER_IDS[0],
        state_digest="0" * 64,
        num_values=num_values,
        part_values=cut_values(num_values, num_members, most_values),
        vocabulary_rows=1024,
        members=tuple(
            Member(peer_id=peer_id, address="127.0.0.1:1", certificate=None, weight=1.0)
            for peer_id in sorted(PEER_IDS[:num_members])
        ),
    )


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
def test_later_passes_cover_what_was_lost_and_nothing_else(num_members, num_values, data):
    agreement = agreement_of(num_members, num_values)
    plan = first_plan(agreement)
    for _ in range(3):
        lost = data.draw(st.sets(st.sampled_from([task.key for task in plan.tasks]), min_size=1))
        left = data.draw(st.lists(st.sampled_from(sorted(plan.members)), min_size=1, unique=True))
        following = next_plan(plan, lost, left, left)
        assert following.pass_index == plan.pass_index + 1
        assert not lost & {task.key for task in following.tasks}
        assert {task.reducer for task in following.fresh} <= set(left)
        assert len({task.key for task in following.tasks}) == len(following.tasks)
        parts = sorted(part for task in following.tasks for part in range(task.first_part, task.last_part))
        assert parts == list(range(agreement.num_parts))
        plan = following


@pytest.mark.slow
@given(st.lists(st.sampled_from(PEER_IDS), unique=True), st.integers(0, 10**6), st.randoms())
def test_everybody_finds_the_same_coordinators_whatever_order_peers_are_known_in(peer_ids, round_index, chance):
    order = coordinator_order("run", round_index, peer_ids)
    assert sorted(order) == sorted(peer_ids)
    chance.shuffle(peer_ids)
    assert coordinator_order("run", round_index, peer_ids) == order


def test_coordinators_change_from_round_to_round():
    first = {coordinator_order("run", round_index, PEER_IDS)[0] for round_index in range(60)}
    assert len(first) > len(PEER_IDS) // 2
