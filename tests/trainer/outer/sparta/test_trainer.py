"""Rounds of replicas: what they change and leave alone, and what a node believes of the others' rounds and states."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.replica_group import (
    Frontier,
    MeetingCollective,
    Replica,
    ReplicaGroup,
    Scripted,
    fail,
    parameter_bits,
    raising,
    refuse,
    same,
)
from trainer.errors import IncompatiblePeerError, TrainerUsageError
from trainer.network.discovery import Announcement
from trainer.outer.engine.collective import Contribution, LocalCollective
from trainer.outer.engine.strategy import OuterStrategy
from trainer.outer.sparta import NOBODY, OtherRounds, SpartaConfig, SpartaTrainer, choose_recent_state, frontier_of
from trainer.outer.sparta.rounds import RoundStanding
from trainer.pipeline.worker.replies import SharedThrough

EACH_STEP = SpartaConfig(every_steps=1, num_slices=4, background=False)
BEHIND_THE_SCENES = SpartaConfig(every_steps=2, num_slices=4)


def replica_with(answer=same, config: SpartaConfig = EACH_STEP, *, held: bool = False, **options):
    """A replica, and its collective, whose gate is shut if held."""
    collective = Scripted(answer)
    if held:
        collective.gate.clear()
    return Replica(config, collective, **options), collective


def plus(by: float) -> Callable[[Contribution], torch.Tensor]:
    return lambda contribution: contribution.vector + by


def group_of(num_replicas: int, config: SpartaConfig, failing=(), **options) -> tuple[ReplicaGroup, list[Replica]]:
    group = ReplicaGroup(num_replicas, failing)
    ranks = range(num_replicas)
    return group, [Replica(config, MeetingCollective(group, rank), number=rank, **options) for rank in ranks]


def spread(replicas: list[Replica]) -> float:
    vectors = torch.stack([replica.vector() for replica in replicas])
    return (vectors - vectors.mean(dim=0)).abs().max().item()


def take_turns(replicas: list[Replica], num_steps: int, *, train: bool = True) -> None:
    """All of them in one thread; a round begun in a step is over at its end, so that it goes the same way always."""
    for index in range(num_steps):
        for replica in replicas:
            if train:
                replica.step(index)
            replica.turn()
        for replica in replicas:
            replica.drain()


def wait_for(ready: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_at_rest_are_bit_identical_after_one_cycle(num_replicas: int) -> None:
    config = SpartaConfig(every_steps=2, num_slices=7)
    _, replicas = group_of(num_replicas, config)
    take_turns(replicas, 9)
    assert spread(replicas) > 1e-3
    take_turns(replicas, 7 * config.every_steps, train=False)
    assert len({parameter_bits(replica.model) for replica in replicas}) == 1


def test_a_round_makes_its_slice_the_mean_and_nothing_else() -> None:
    group, replicas = group_of(3, BEHIND_THE_SCENES)
    for replica in replicas:
        replica.step(replica.model.replica)
    before, moments = [replica.vector() for replica in replicas], [replica.moments() for replica in replicas]
    take_turns(replicas, 2, train=False)
    for replica, own in zip(replicas, moments, strict=True):
        now = replica.moments()
        assert now.keys() == own.keys() and all(torch.equal(now[name], own[name]) for name in own), "never averaged"
    mean = torch.stack(before).double().mean(dim=0).float()
    for replica, was in zip(replicas, before, strict=True):
        is_mean, is_kept = replica.vector() == mean, replica.vector() == was
        assert bool(is_mean[::4].all()) and bool((is_mean | is_kept).all())
        assert int((~is_kept).sum()) <= -(-len(was) // 4)
    assert len(group.history) == 1


def test_steps_taken_while_a_round_runs_are_kept() -> None:
    replica, collective = replica_with(plus(0.25), BEHIND_THE_SCENES, held=True)
    twin = Replica(BEHIND_THE_SCENES)
    replica.train(0, 2)
    twin.train(0, 2)
    for index in range(2, 7):
        assert replica.trainer.round_index == 0
        replica.train(index, index + 1)
        twin.step(index)
    assert parameter_bits(replica.model) == parameter_bits(twin.model), "nothing is touched while the round runs"
    assert len(collective.contributions) == 1, "one at most is in flight"
    collective.gate.set()
    wait_for(lambda: replica.turn() is not None)
    assert replica.results[0].committed and replica.results[0].report is not None and replica.results[0].waited_s < 30
    moved = replica.vector() - twin.vector()
    assert torch.allclose(moved[::4], torch.tensor(0.25), atol=1e-6)
    moved[::4] = 0
    assert not moved.any()


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=40))
def test_what_is_said_to_outlive_a_replica_was_in_the_rounds(steps: list[tuple[int, bool]]) -> None:
    """However long each of them takes: against what had been counted when it began."""
    replica, collective = replica_with(same, BEHIND_THE_SCENES, held=True)
    shared = SharedThrough(BEHIND_THE_SCENES.num_slices)
    by_slice, applied, brought = [0] * BEHIND_THE_SCENES.num_slices, 0, 0
    for version, (num_batches, lands) in enumerate(steps, start=1):
        applied += num_batches
        shared.stepped(version, applied)
        assert replica.turn(num_batches) is None
        if not replica.trainer.inner_step:
            brought = applied
        if lands:
            collective.gate.set()
        result = replica.drain() if lands else None
        collective.gate.clear()
        if result is not None:
            by_slice[result.fragment] = brought
            if result.contributed_steps_ago is not None:
                shared.committed(result.fragment, result.contributed_steps_ago)
        assert shared.count == min(by_slice)
    collective.gate.set()
    replica.drain()


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("answer", [fail, refuse, lambda it: it.vector * torch.nan, lambda it: it.vector[1:]])
def test_a_round_without_a_result_leaves_every_bit(answer, background: bool) -> None:
    projected: list[int] = []
    config = SpartaConfig(every_steps=3, num_slices=4, background=background)
    replica, _ = replica_with(answer, config, after_average=lambda model: projected.append(1))
    for index in range(3):
        replica.step(index)
        before, moments = parameter_bits(replica.model), replica.moments()
        replica.turn()
        replica.drain()
    assert parameter_bits(replica.model) == before and not projected
    assert all(torch.equal(value, moments[name]) for name, value in replica.moments().items())
    (result,) = replica.results
    assert not result.committed and result.error and result.report is None
    assert replica.trainer.standing.failed_in_a_row == 1


def test_a_round_that_is_given_up_goes_nowhere_and_blocks_the_next_until_it_is_over(monkeypatch) -> None:
    monkeypatch.setattr("trainer.outer.sparta.trainer._ROUND_TIMEOUT_S", 0.02)
    replica, collective = replica_with(plus(1), SpartaConfig(every_steps=1, num_slices=4), held=True)
    before = parameter_bits(replica.model)
    replica.turn()
    time.sleep(0.03)
    result = replica.turn()
    assert result is not None and not result.committed and "given up" in result.error
    assert replica.turn() is None and len(collective.contributions) == 1, "the collective is for one at a time"
    collective.gate.set()
    wait_for(lambda: replica.turn() is None and len(collective.contributions) == 2)
    assert parameter_bits(replica.model) == before
    assert replica.drain() is not None


def test_a_failed_round_is_tried_again_with_the_same_slice() -> None:
    _, replicas = group_of(2, SpartaConfig(every_steps=1, num_slices=3), failing=[1, 2])
    take_turns(replicas, 3)
    assert all(it.trainer.standing.failed_in_a_row == 2 and it.trainer.standing.counts for it in replicas)
    assert not any(it.trainer.must_rejoin for it in replicas), "no node is sent away for what happened to all"
    take_turns(replicas, 3)
    for replica in replicas:
        assert [result.committed for result in replica.results] == [True, False, False, True, True, True]
        assert [result.fragment for result in replica.results] == [0, 1, 1, 1, 2, 0]
        assert not replica.trainer.must_rejoin and replica.trainer.round_index == 4


def test_other_errors_come_out_and_change_nothing() -> None:
    replica, _ = replica_with(raising(IncompatiblePeerError("another architecture")), BEHIND_THE_SCENES)
    before = parameter_bits(replica.model)
    replica.turn(), replica.turn()
    with pytest.raises(IncompatiblePeerError, match="another architecture"):
        replica.drain()
    assert parameter_bits(replica.model) == before and replica.trainer.round_index == 0


def test_who_is_refused_goes_on_with_the_round_the_others_are_at() -> None:
    frontier = Frontier()
    config = SpartaConfig(every_steps=5, num_slices=4, background=False)
    replica, collective = replica_with(refuse, config, others=frontier)
    for _ in range(5):
        replica.turn()
    assert frontier.moved_to == [1] and replica.trainer.standing.missed_rounds == 1
    collective.answer = same
    result = replica.turn()
    assert result is not None and result.committed and result.round_index == 1, "at once: the others are there already"
    assert replica.trainer.standing.missed_rounds == 0 and replica.trainer.standing.failed_in_a_row == 0


def test_rounds_made_by_others_are_skipped_up_to_five() -> None:
    frontier = Frontier()
    config = SpartaConfig(every_steps=50, num_slices=4, background=False)
    replica, collective = replica_with(same, config, others=frontier)
    assert replica.turn() is None
    frontier.at = 5
    result = replica.turn()
    assert result is not None and (result.round_index, result.fragment, result.committed) == (5, 1, True)
    frontier.at = 3
    assert replica.turn() is None and replica.trainer.round_index == 6, "what they were at before is nothing new"
    frontier.at = 12
    result = replica.turn()
    assert result is not None and not result.committed and "their state has to be taken up" in result.error
    assert replica.trainer.behind and replica.trainer.must_rejoin and replica.trainer.round_index == 6
    assert len(collective.contributions) == 1 and replica.turn() is None


def test_batches_are_counted_since_the_slices_last_round() -> None:
    replica, collective = replica_with(same, SpartaConfig(every_steps=2, num_slices=3, background=False))
    for _ in range(12):
        replica.turn(num_batches=5)
    assert [brought.num_batches for brought in collective.contributions] == [10, 20, 30, 30, 30, 30]
    collective.answer = fail
    replica.turn(5), replica.turn(5)
    collective.answer = same
    replica.turn(5), replica.turn(0)
    assert collective.contributions[-1].num_batches == 30 + 5 + 0 + 0 + 0


def test_a_joiner_counts_for_nothing_until_its_ghost_rounds_are_over() -> None:
    config = SpartaConfig(every_steps=1, num_slices=3, ghost_rounds=2, background=False)
    donor, (joiner, collective) = Replica(config), replica_with(plus(1), config, number=1)
    donor.train(0, 4)
    joiner.trainer.adopt(donor.trainer.shared_state())
    was, ghost = joiner.vector(), []
    for _ in range(4):
        ghost.append(not joiner.trainer.standing.counts)
        joiner.turn(num_batches=3)
    assert ghost == [True, True, False, False]
    assert [brought.num_batches for brought in collective.contributions] == [0, 0, 9, 9]
    assert [result.contributed_steps_ago for result in joiner.results] == [None, None, 0, 0], "not theirs"
    assert [brought.round_index for brought in collective.contributions] == [4, 5, 6, 7]
    assert all(bool(brought.vector.any()) for brought in collective.contributions), "were all ghosts, zeros would win"
    assert bool((joiner.vector() - was > 0.9).all()), "it takes the average meanwhile"


def test_parameters_that_are_not_finite_are_not_sent_and_a_state_is_asked_for() -> None:
    (replica, collective), donor = replica_with(), Replica(EACH_STEP)
    donor.train(0, 3)
    with torch.no_grad():
        next(replica.model.parameters()).view(-1)[0] = torch.nan
    result = replica.turn()
    assert result is not None and not result.committed and "not finite" in result.error
    assert replica.trainer.behind and not collective.contributions
    assert [replica.turn() for _ in range(5)] == [None] * 5
    replica.trainer.adopt(donor.trainer.shared_state())
    assert not replica.trainer.behind and replica.turn() is not None and collective.contributions


def test_peers_that_wait_bring_a_round_forward() -> None:
    replica, collective = replica_with(same, SpartaConfig(every_steps=100, num_slices=4, background=False))
    assert replica.turn() is None
    collective.peers_wait = True
    result = replica.turn()
    assert result is not None and result.committed and result.num_batches == 2
    collective.peers_wait = False
    assert [replica.turn() for _ in range(99)] == [None] * 99
    assert replica.turn() is not None


def test_a_node_alone_trains_as_if_there_were_no_rounds() -> None:
    replica, twin = Replica(BEHIND_THE_SCENES), Replica(BEHIND_THE_SCENES)
    for index in range(20):
        replica.train(index, index + 1)
        twin.step(index)
    replica.drain()
    assert isinstance(replica.trainer, OuterStrategy)
    assert replica.results and parameter_bits(replica.model) == parameter_bits(twin.model)


@pytest.mark.slow
def test_models_and_optimizers_that_do_not_fit_are_refused() -> None:
    model = torch.nn.Linear(5, 5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TrainerUsageError, match="expected AdamW"):
        SpartaTrainer(model, EACH_STEP, LocalCollective(), optimizer=sgd)
    model.weight = torch.nn.Parameter(torch.randn(5, 5).t())
    with pytest.raises(TrainerUsageError, match="contiguous"):
        Replica(EACH_STEP, model=model)
    with pytest.raises(TrainerUsageError, match=r"sparta.num_slices"):
        Replica(SpartaConfig(num_slices=10_000))
    replica = Replica(EACH_STEP)
    with pytest.raises(TrainerUsageError, match="rows of vocabulary"):
        replica.trainer.grow(replica.model, 64)


def digest(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()


def announced(name: str, round_index: int, state: str = "") -> Announcement:
    of_state = {"outer_step": round_index, "state_digest": digest(state or name)}
    return Announcement(peer_id=digest(name), node_id=name, run_id="r", address="127.0.0.1:1", **of_state)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [([], 0), ([7], 7), ([7, 8], 7), ([7, 7, 8], 7), ([7, 8, 10**12], 8), ([0, 7, 8], 7), ([7, 8, 9, 10**12], 8)],
)
def test_a_minority_of_liars_moves_nobody(rounds: list[int], expected: int) -> None:
    assert frontier_of(rounds) == expected
    assert isinstance(NOBODY, OtherRounds) and NOBODY.frontier() == 0


def test_a_joiner_takes_a_state_of_those_that_are_where_the_others_are() -> None:
    others = [announced("a", 40), announced("b", 41), announced("old", 3), announced("ahead", 10**9)]
    chosen = choose_recent_state((0, ""), others)
    assert chosen in {digest("a"), digest("b")}
    assert choose_recent_state((0, ""), reversed(others)) == chosen
    others = [announced("a", 40), announced("b", 41), announced("c", 40, "a")]
    assert choose_recent_state((0, ""), others) == digest("a"), "held by several: several donors"
    own = digest("own")
    assert choose_recent_state((36, own), others) is None, "a node keeps its own while it is current"
    assert choose_recent_state((34, own), others) is not None
    assert choose_recent_state((36, ""), others) is not None
    assert choose_recent_state((0, ""), []) is None
    assert choose_recent_state((0, ""), [announced("a", 4).model_copy(update={"state_digest": ""})]) is None


def standing(**fields: int) -> RoundStanding:
    return RoundStanding(max_staleness_rounds=5, max_failed_rounds=2, **fields)


def test_two_rounds_failed_while_the_others_went_on() -> None:
    it = standing(round_index=4, reached=4)
    it.failed()
    it.missed()
    assert (it.round_index, it.failed_in_a_row) == (5, 1), "to be refused with a round that failed is no new failure"
    assert not it.must_rejoin
    it.missed()
    assert (it.round_index, it.failed_in_a_row) == (6, 2)
    assert it.must_rejoin and not it.behind
    it.behind = it.damaged = True
    it.committed()
    assert it.must_adopt and not it.behind, "only a state of others helps the damaged"
