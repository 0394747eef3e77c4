"""Rounds among real processes, some of which die or stop at a chosen place.

What must hold in each: the survivors end with one vector, bit for bit; in every value of it there are all survivors'
contributions, and the victim's or not; and a new process in the victim's place takes part in the next round.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.round_actor import RoundSwarm, mean_of

ALL = [0, 1, 2, 3]
PLACES = ("before_joining", "before_acknowledging", "begun", "before_sending", "sent")
PLACES += ("before_publishing", "published", "before_voting", "before_deciding", "decided")


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    swarm = RoundSwarm(tmp_path_factory.mktemp("swarm"), len(ALL))
    yield swarm
    swarm.close()


def survived(swarm: RoundSwarm, position: int, fault: str, *, is_mean: bool = True) -> tuple[int, str]:
    """Goes through a round in which the coordinator (position 0), the next one, … suffers a fault.

    Returns:
        The victim, and the digest of the survivors' result.
    """
    victim = swarm.order(swarm.next_round)[position]
    round_index = swarm.begin(ALL, faults={victim: fault})
    outcomes = {number: swarm.outcome(number) for number in ALL if number != victim}
    assert all("digest" in outcome for outcome in outcomes.values()), (fault, outcomes)
    (digest,) = {outcome["digest"] for outcome in outcomes.values()}
    if is_mean:  # Neither a lossy codec nor another rule.
        result = swarm.result(min(outcomes))
        without = (result - mean_of(sorted(outcomes), round_index)).abs() < 1e-5
        with_victim = (result - mean_of(ALL, round_index)).abs() < 1e-5
        assert bool((without | with_victim).all())
        for outcome in outcomes.values():
            assert {swarm.actors[number].peer_id for number in outcomes} <= set(outcome["members"])
            assert outcome["completeness"] >= 0.7 and outcome["seconds"] < 40
    return victim, digest


def test_a_clean_round_is_the_mean_and_the_same_everywhere(swarm):
    round_index = swarm.begin(ALL)
    outcomes = [swarm.outcome(number) for number in ALL]
    assert len({outcome["digest"] for outcome in outcomes}) == 1
    assert torch.allclose(swarm.result(0), mean_of(ALL, round_index), atol=1e-6)
    for outcome in outcomes:
        assert (outcome["completeness"], outcome["num_passes"], outcome["dropped"]) == (1.0, 1, [])
        assert outcome["members"] == sorted(outcome["members"])
        assert outcome["vocabulary_rows"] == 1024


def test_whoever_claims_absurd_numbers_of_batches_counts_three_times_the_median_at_most(swarm):
    swarm.begin(ALL, each={number: {"num_batches": 10**12 if number == 2 else 25} for number in ALL})
    outcomes = [swarm.outcome(number) for number in ALL]
    assert len({outcome["digest"] for outcome in outcomes}) == 1
    assert sorted(outcomes[0]["weights"]) == pytest.approx([5, 5, 5, 15])


def test_members_of_another_state_are_told_to_fetch_it_and_the_others_go_on(swarm):
    swarm.begin(ALL, each={3: {"state": "f" * 64}})
    *others, other = (swarm.outcome(number) for number in ALL)
    assert len({outcome["digest"] for outcome in others}) == 1 and "state" in other["behind"]
    assert all(len(outcome["members"]) == 3 for outcome in others)


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
    swarm.restart(survived(swarm, position, fault)[0])


@pytest.mark.slow
def test_a_member_that_was_stopped_learns_that_the_others_have_gone_on(swarm):
    victim, digest = survived(swarm, 1, "before_voting:0:SIGSTOP")
    swarm.actors[victim].process.send_signal(18)
    late = swarm.outcome(victim)
    assert "behind" in late or "failed" in late or late.get("digest") == digest
    swarm.begin(ALL)
    assert len({swarm.outcome(number).get("digest") for number in ALL}) == 1


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
                swarm.restart(survived(swarm, position, fault, is_mean=not settings)[0])
    finally:
        swarm.close()
