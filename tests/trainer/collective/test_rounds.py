"""Rounds among real processes, some of which die or stop at a chosen place.

What must hold in each: the survivors end with one vector, bit for bit; in every value of it there are all survivors'
contributions, and the victim's or not; and a new process in the victim's place takes part in the next round.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from tests.support.round_swarm import RoundSwarm, mean_of

ALL = [0, 1, 2, 3]
PLACES = (
    "before_joining",
    "before_acknowledging",
    "begun",
    "before_sending",
    "sent",
    "before_publishing",
    "published",
    "before_voting",
    "before_deciding",
    "decided",
)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    swarm = RoundSwarm(tmp_path_factory.mktemp("swarm"), len(ALL))
    yield swarm
    swarm.close()


def a_round(swarm: RoundSwarm, **options):
    round_index = swarm.next_round
    swarm.next_round += 1
    swarm.begin(round_index, ALL, **options)
    return round_index, {number: swarm.outcome(number) for number in ALL}


def a_round_with_a_victim(swarm: RoundSwarm, position: int, fault: str):
    """One round in which the coordinator (position 0), the next one, … suffers a fault; then it is replaced."""
    round_index = swarm.next_round
    swarm.next_round += 1
    victim = swarm.order(round_index)[position]
    swarm.begin(round_index, ALL, faults={victim: fault})
    survivors = [number for number in ALL if number != victim]
    outcomes = {number: swarm.outcome(number) for number in survivors}
    check_survivors(swarm, round_index, victim, outcomes)
    swarm.restart(victim)


def check_survivors(swarm: RoundSwarm, round_index: int, victim: int, outcomes) -> None:
    assert all("digest" in outcome for outcome in outcomes.values()), outcomes
    assert len({outcome["digest"] for outcome in outcomes.values()}) == 1
    result = swarm.result(min(outcomes))
    without = (result - mean_of(sorted(outcomes), round_index)).abs() < 1e-5
    with_victim = (result - mean_of(ALL, round_index)).abs() < 1e-5
    assert bool((without | with_victim).all())
    for outcome in outcomes.values():
        assert {swarm.actors[number].peer_id for number in outcomes} <= set(outcome["members"])
        assert outcome["completeness"] >= 0.7
        assert outcome["seconds"] < 40


def test_a_clean_round_is_the_mean_and_the_same_everywhere(swarm):
    round_index, outcomes = a_round(swarm)
    assert len({outcome["digest"] for outcome in outcomes.values()}) == 1
    assert torch.allclose(swarm.result(0), mean_of(ALL, round_index), atol=1e-6)
    for outcome in outcomes.values():
        assert (outcome["completeness"], outcome["num_passes"], outcome["dropped"]) == (1.0, 1, [])
        assert outcome["members"] == sorted(outcome["members"])
        assert outcome["vocabulary_rows"] == 1024


def test_whoever_claims_absurd_numbers_of_batches_counts_three_times_the_median_at_most(swarm):
    round_index = swarm.next_round
    swarm.next_round += 1
    for number in ALL:
        swarm.begin(round_index, [number], num_batches=10**12 if number == 2 else 25)
    outcomes = [swarm.outcome(number) for number in ALL]
    assert len({outcome["digest"] for outcome in outcomes}) == 1
    assert sorted(outcomes[0]["weights"]) == pytest.approx([5, 5, 5, 15])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "fault"),
    [
        (0, "before_acknowledging:0:SIGKILL"),
        (1, "begun:0:SIGKILL"),
        (2, "sent:3:SIGKILL"),
        (1, "published:1:SIGKILL"),
        (0, "before_deciding:0:SIGKILL"),
        (0, "decided:0:SIGKILL"),
        (3, "sent:2:SIGSTOP"),
    ],
)
def test_a_member_that_dies_costs_the_others_nothing(swarm, position, fault):
    a_round_with_a_victim(swarm, position, fault)


@pytest.mark.slow
def test_a_member_that_was_stopped_learns_that_the_others_have_gone_on(swarm):
    round_index = swarm.next_round
    swarm.next_round += 1
    victim = swarm.order(round_index)[1]
    swarm.begin(round_index, ALL, faults={victim: "before_voting:0:SIGSTOP"})
    outcomes = {number: swarm.outcome(number) for number in ALL if number != victim}
    check_survivors(swarm, round_index, victim, outcomes)
    swarm.actors[victim].process.send_signal(18)
    late = swarm.outcome(victim)
    assert "behind" in late or "failed" in late or late.get("digest") == outcomes[min(outcomes)]["digest"]
    _, again = a_round(swarm)
    assert len({outcome.get("digest") for outcome in again.values()}) == 1


def test_members_of_another_state_are_told_to_fetch_it_and_the_others_go_on(swarm):
    round_index = swarm.next_round
    swarm.next_round += 1
    others = [number for number in ALL if number != 3]
    swarm.begin(round_index, others)
    actor = swarm.actors[3]
    actor.say(round=round_index, state="f" * 64, peers=swarm._peers_of(3), save_to="/dev/null")
    outcomes = {number: swarm.outcome(number) for number in ALL}
    assert len({outcomes[number]["digest"] for number in others}) == 1
    assert "state" in outcomes[3]["behind"]
    for outcome in (outcomes[number] for number in others):
        assert len(outcome["members"]) == 3


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [{}, {"rule": {"rule": "centered_clip"}, "compression": "int8", "tls": True}])
def test_one_of_four_dies_or_stops_at_every_place_in_every_part(tmp_path, settings):
    chance = random.Random(20261120)
    swarm = RoundSwarm(tmp_path, len(ALL), **settings)
    try:
        for place in PLACES:
            for signal_name in ("SIGKILL", "SIGSTOP"):
                fault = f"{place}:{chance.randrange(3) if place in {'sent', 'published'} else 0}:{signal_name}"
                position = 0 if place in {"before_deciding", "decided"} else chance.randrange(4)
                if settings:
                    check_agreement_only(swarm, position, fault)
                else:
                    a_round_with_a_victim(swarm, position, fault)
    finally:
        swarm.close()


def check_agreement_only(swarm: RoundSwarm, position: int, fault: str) -> None:
    """For lossy codecs and rules that are no mean: one result, finite, of all survivors."""
    round_index = swarm.next_round
    swarm.next_round += 1
    victim = swarm.order(round_index)[position]
    swarm.begin(round_index, ALL, faults={victim: fault})
    outcomes = [swarm.outcome(number) for number in ALL if number != victim]
    assert all("digest" in outcome for outcome in outcomes), (fault, outcomes)
    assert all(first["digest"] == second["digest"] for first, second in pairwise(outcomes)), fault
    swarm.restart(victim)
