"""Rounds of two phases, with PowerSGD's factors in them: real members in threads and processes, over loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from tests.support.round_actor import RUN_ID, KnownPeers, RoundSwarm, agreement_of, identity_of, terms
from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective
from trainer.collective.messages import Commit, MomentsOpen, PhaseAgreement, StatusRequest, TaskDigest
from trainer.collective.planning import check_plan, first_plan, following_agreement
from trainer.errors import (
    RefusedError,
    RoundFailedError,
    StateBehindError,
    TrainerUsageError,
)
from trainer.network.rpc import Endpoint, RpcConfig
from trainer.outer.engine.collective import Contribution, FollowingPhase, LocalCollective, RoundResult
from trainer.outer.engine.powersgd import PowerSgdCollective, with_powersgd
from trainer.run.node.loop_thread import LoopThread

SHAPES = ((96, 80), (33,), (64, 128))
NUM_VALUES = 96 * 80 + 33 + 64 * 128
RANK = 8
STATE = "ab" * 32
MEAN = RuleConfig(rule="mean", validation="log")


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


class Member:
    """A node whose rounds are factored; ``lie`` changes what it brings to the second phase."""

    def __init__(self, number: int, rule: RuleConfig, compression: str, round_timeout_s: float) -> None:
        self.loop = LoopThread(f"member-{number}")
        self.loop.start()
        rpc = RpcConfig(host="127.0.0.1", tls=False, heartbeat_s=0.2, stall_timeout_s=5.0, stop_grace_s=0.1)
        self.endpoint = Endpoint(identity_of(number), RUN_ID, rpc)
        self.directory = KnownPeers(holds_most_held_state=True)
        config = CollectiveConfig(
            invite_after_s=0.2,
            gather_timeout_s=5.0,
            stall_timeout_s=2.0,
            round_timeout_s=round_timeout_s,
            compression=compression,
        )
        context = (self.endpoint, self.loop.loop, RUN_ID, terms(), rule, config, self.directory)
        self.peers = PeerCollective(*context, lambda: 1024)
        self.lie: Callable[[Contribution], Contribution] | None = None
        self.powersgd = PowerSgdCollective(self, lambda _round_index: SHAPES, RANK)
        self.loop.run(self.endpoint.start(), 10)

    def reduce_in_phases(self, contribution: Contribution, following: FollowingPhase) -> RoundResult:
        lie = self.lie
        told = following if lie is None else lambda first: lie(following(first))
        return self.peers.reduce_in_phases(contribution, told)

    def close(self) -> None:
        self.peers.close()
        self.loop.run(self.endpoint.stop(), 10)
        self.loop.stop()


class Members:
    """Some of them, who know each other and go through rounds together; state and residuals are kept per member."""

    def __init__(
        self, num: int, *, rule: RuleConfig = MEAN, compression: str = "fp32", round_timeout_s: float = 40.0
    ) -> None:
        self.all = [Member(40 + number, rule, compression, round_timeout_s) for number in range(num)]
        for member in self.all:
            member.directory.known = {
                other.endpoint.peer_id: other.endpoint.peer for other in self.all if other is not member
            }
        self.round_index = 0
        self.residuals: dict[int, torch.Tensor] = {}
        self.basis: torch.Tensor | None = None

    def contribution(self, number: int, vector: torch.Tensor, **changes: Any) -> Contribution:
        return replace(
            Contribution(
                round_index=self.round_index,
                vector=vector,
                num_batches=25,
                age_s=0.0,
                reference=torch.zeros(NUM_VALUES),
                state_digest=STATE,
                residual=self.residuals.get(number),
                basis=self.basis,
            ),
            **changes,
        )

    def round(self, contributions: dict[int, Contribution]) -> dict[int, RoundResult | Exception]:
        """What each has at the end; if it is a result for all, all go on with it."""
        for number in contributions:
            self.all[number].peers.move_to(self.round_index)

        def one(number: int) -> RoundResult | Exception:
            try:
                return self.all[number].powersgd.reduce(contributions[number])
            except RoundFailedError as error:
                return error

        with ThreadPoolExecutor(len(contributions)) as pool:
            found = dict(zip(contributions, pool.map(one, contributions), strict=True))
        results = [result for result in found.values() if isinstance(result, RoundResult)]
        if len(results) == len(found):
            self.round_index += 1
            self.basis = results[0].basis
            self.residuals |= {number: result.residual for number, result in found.items()}
        return found

    def close(self) -> None:
        for member in self.all:
            member.close()


@pytest.fixture
def members_of():
    made: list[Members] = []

    def make(num: int, **options: Any) -> Members:
        made.append(Members(num, **options))
        return made[-1]

    yield make
    for members in made:
        members.close()


def gradient(number: int, salt: int = 0, noise: float = 0.3) -> torch.Tensor:
    common = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(1000 + salt))
    own = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(number + 100 * salt))
    return common + noise * own


def same_bits(found: dict[int, Any]) -> RoundResult:
    """The result, after checking that all have one, and alike."""
    assert all(isinstance(result, RoundResult) for result in found.values()), found
    first, *others = found.values()
    for other in others:
        assert torch.equal(first.vector, other.vector) and torch.equal(first.basis, other.basis)
    return first


@pytest.mark.parametrize("compression", ["fp32", "int8"])
def test_members_end_alike_and_nothing_that_was_not_sent_is_lost(members_of, compression):
    members = members_of(3, compression=compression)
    sent, brought = torch.zeros(NUM_VALUES), torch.zeros(NUM_VALUES)
    for salt in range(3):
        vectors = [gradient(number, salt) for number in range(3)]
        found = members.round({n: members.contribution(n, vectors[n]) for n in range(3)})
        result = same_bits(found)
        sent += result.vector
        brought += sum(vectors) / 3
        kept = sum(members.residuals.values()) / 3
        lost = float((sent + kept - brought).norm() / brought.norm())
        # Results are encoded once more, of which nobody keeps what that leaves out.
        assert lost < (1e-5 if compression == "fp32" else 2e-2)
        assert result.report.completeness == 1.0 and len(result.report.members) == 3
        assert not result.report.dropped and result.report.sent_bytes > 0


def test_a_factored_round_sends_a_fraction_of_the_bytes(members_of):
    members = members_of(2)
    vectors = {number: members.contribution(number, gradient(number)) for number in range(2)}
    factored = same_bits(members.round(vectors)).report
    plan = members.all[0].powersgd.plan_of(0)
    values = plan.num_p + plan.num_q
    # Each sends half of its own to the other, and the result of the other half: one vector in all.
    assert 4 * values < factored.sent_bytes < 4 * values + 40_000
    assert values < NUM_VALUES / 3


def test_members_weigh_by_what_they_did_and_one_without_batches_keeps_its_residual(members_of):
    members = members_of(3)
    left, right = torch.randn(3, 96, 2), torch.randn(2, 80)  # Of low rank together: nothing is left out.
    vectors = []
    for number in range(3):
        vector = torch.zeros(NUM_VALUES)
        vector[: 96 * 80] = (left[number] @ right).flatten()
        vectors.append(vector)
    members.residuals[2] = gradient(2)
    contributions = {
        0: members.contribution(0, vectors[0], num_batches=25),
        1: members.contribution(1, vectors[1], num_batches=100),
        2: members.contribution(2, vectors[2], num_batches=0),
    }
    found = members.round(contributions)
    result = same_bits(found)
    (weights,) = {result.report.weights for result in found.values()}
    by_member = dict(zip(result.report.members, weights, strict=True))
    shares = [by_member[member.endpoint.peer_id] for member in members.all]
    assert shares[2] == 0 and shares[1] == pytest.approx(2 * shares[0])
    expected = (vectors[0] * shares[0] + vectors[1] * shares[1]) / sum(shares)
    assert torch.allclose(result.vector, expected, atol=1e-4)
    assert torch.equal(found[2].residual, gradient(2))


def test_rounds_begin_with_the_directions_of_the_last(members_of):
    members = members_of(2)
    vectors = [gradient(number) for number in range(2)]
    mean = sum(vectors) / 2
    errors = []
    for _ in range(6):
        members.residuals.clear()
        result = same_bits(members.round({n: members.contribution(n, vectors[n]) for n in range(2)}))
        errors.append(float((result.vector - mean).norm()))
    assert errors[-1] < 0.98 * errors[0] and errors == sorted(errors, reverse=True)
    members.basis = None
    members.residuals.clear()
    cold = same_bits(members.round({n: members.contribution(n, vectors[n]) for n in range(2)}))
    assert float((cold.vector - mean).norm()) > errors[-1]


def test_a_joiner_without_the_basis_fetches_the_state_first(members_of):
    members = members_of(3)
    same_bits(members.round({n: members.contribution(n, gradient(n)) for n in range(3)}))
    contributions = {n: members.contribution(n, gradient(n, 1)) for n in range(3)}
    contributions[2] = replace(contributions[2], basis=None)
    *others, joiner = members.round(contributions).values()
    assert isinstance(joiner, StateBehindError) and "fetch the" in str(joiner)
    result = same_bits(dict(enumerate(others)))
    members.round_index, members.basis = 2, result.basis
    members.residuals = {0: others[0].residual, 1: others[1].residual}  # The joiner's is dropped with its state.
    same_bits(members.round({n: members.contribution(n, gradient(n, 2)) for n in range(3)}))


def huge(contribution: Contribution) -> Contribution:
    return replace(contribution, vector=contribution.vector * 1000)


def turned(contribution: Contribution) -> Contribution:
    return replace(contribution, vector=-contribution.vector)


@pytest.mark.parametrize("lie", [huge, turned])
@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "krum", "multi_krum", "centered_clip"])
def test_who_lies_in_the_second_phase_has_no_say_under_any_rule(members_of, rule, lie):
    members = members_of(5, rule=RuleConfig(rule=rule))
    members.all[3].lie = lie
    vectors = [gradient(number) for number in range(5)]
    result = same_bits(members.round({n: members.contribution(n, vectors[n]) for n in range(5)}))
    honest = sum(vector for number, vector in enumerate(vectors) if number != 3) / 4
    plan = members.all[0].powersgd.plan_of(0)
    whole = torch.cat([result.vector[place] for place, _ in plan.whole])
    assert float((whole - honest[96 * 80 : 96 * 80 + 33]).norm() / whole.norm()) < 0.35
    assert float(result.vector.norm()) < float(honest.norm())
    cosine = torch.nn.functional.cosine_similarity(result.vector, honest, dim=0)
    assert float(cosine) > 0.3  # Of noise of full rank, eight directions hold so much.
    assert members.all[3].endpoint.peer_id in dict(result.report.dropped) | dict(result.report.validation)


@pytest.mark.slow
def test_who_brings_another_length_to_the_second_phase_is_left_behind(members_of):
    members = members_of(3)
    members.all[1].lie = lambda second: replace(second, vector=second.vector[:-1], reference=second.reference[:-1])
    found = members.round({n: members.contribution(n, gradient(n)) for n in range(3)})
    assert isinstance(found[1], RoundFailedError)
    same_bits({number: found[number] for number in (0, 2)})


@pytest.mark.slow
def test_a_round_that_fails_in_the_second_phase_is_nothing_and_may_be_made_again(members_of):
    members = members_of(2)
    same_bits(members.round({n: members.contribution(n, gradient(n)) for n in range(2)}))

    def failing(_contribution: Contribution) -> Contribution:
        raise RoundFailedError("it cannot")

    # Of two, the one with the lower key is a majority: without it there is no result.
    lowest, other = sorted(range(2), key=lambda number: members.all[number].endpoint.peer_id)
    members.all[lowest].lie = failing
    before = {n: members.contribution(n, gradient(n, 1)) for n in range(2)}
    kept = {n: contribution.residual.clone() for n, contribution in before.items()}
    found = members.round(before)
    assert str(found[lowest]) == "it cannot" and isinstance(found[other], RoundFailedError)
    assert not isinstance(found[other], StateBehindError)
    assert all(torch.equal(before[n].residual, kept[n]) for n in kept)

    members.all[lowest].lie = None
    again = same_bits(members.round({n: members.contribution(n, gradient(n, 1)) for n in range(2)}))
    assert again.report.round_index == 1 and len(again.report.members) == 2


@pytest.mark.slow
def test_a_member_waits_for_those_that_take_longer_to_come_to_the_second_phase(members_of):
    members = members_of(3)

    def taking(seconds: float) -> Callable[[Contribution], Contribution]:
        def take(contribution: Contribution) -> Contribution:
            threading.Event().wait(seconds)
            return contribution

        return take

    for member, seconds in zip(members.all, (4.0, 1.0, 1.0), strict=True):  # A peer may be silent for 2 s.
        member.lie = taking(seconds)
    result = same_bits(members.round({n: members.contribution(n, gradient(n)) for n in range(3)}))
    assert len(result.report.members) == 3 and result.report.completeness == 1.0


def test_strangers_and_unknown_phases_are_refused_while_a_phase_is_awaited(members_of):
    members = members_of(3)
    begun, done = threading.Event(), threading.Event()

    def held(contribution: Contribution) -> Contribution:
        begun.set()
        done.wait(10.0)
        return contribution

    members.all[0].lie = held
    stranger = Member(95, MEAN, "fp32", 40.0)
    try:
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(members.round, {n: members.contribution(n, gradient(n)) for n in (0, 1)})
            assert begun.wait(30)
            for method, body in {
                "round/moments": MomentsOpen(agreement="cd" * 32, task="0.0"),
                "round/status": StatusRequest(agreement="cd" * 32),
            }.items():
                calling = stranger.endpoint.call(members.all[0].endpoint.peer, method, body, Anything, timeout_s=5)
                with pytest.raises(RefusedError, match="no such agreement"):
                    stranger.loop.run(calling, 10)
            # A member may wait for a phase this node has not come to, and is told that it is there.
            asking = members.all[1].endpoint.call(
                members.all[0].endpoint.peer, "round/status", StatusRequest(agreement="cd" * 32), Anything, timeout_s=5
            )
            assert members.all[1].loop.run(asking, 10).body.decision is None
            done.set()
            same_bits(going.result(40))
    finally:
        stranger.close()


def test_the_second_phase_has_the_members_that_hold_the_first_and_the_majority_of_all():
    agreement = agreement_of(5, 10_000)
    plan = first_plan(agreement)
    kept = agreement.peer_ids[1:4]
    digests = tuple(TaskDigest(key=task.key, digest="0" * 64) for task in plan.tasks)
    commit = Commit(plan=plan, members=kept, digests=digests, dropped=(), completeness=1.0, findings=())
    phase = following_agreement(agreement, commit, 5_000, "1" * 64, 1 << 18)
    assert isinstance(phase, PhaseAgreement)
    assert phase.peer_ids == agreement.peer_ids and phase.weights == agreement.weights
    assert phase.taking_part == kept == tuple(sorted(member.peer_id for member in phase.succession()))
    following = first_plan(phase)
    assert {task.reducer for task in following.tasks} <= set(kept) == set(following.members)
    check_plan(following, phase, max_passes=1)
    other = commit.model_copy(update={"digests": (TaskDigest(key="0.0", digest="2" * 64), *digests[1:])})
    assert following_agreement(agreement, other, 5_000, "1" * 64, 1 << 18).fingerprint() != phase.fingerprint()
    assert following_agreement(agreement, commit, 5_001, "1" * 64, 1 << 18).fingerprint() != phase.fingerprint()


def test_a_node_alone_and_vectors_without_matrices():
    alone = PowerSgdCollective(LocalCollective(), lambda _round_index: SHAPES, RANK)
    vector = gradient(0)
    contribution = Contribution(
        round_index=0, vector=vector, num_batches=1, age_s=0.0, reference=torch.zeros(NUM_VALUES), state_digest=STATE
    )
    result = alone.reduce(contribution)
    assert torch.allclose(result.vector + result.residual, vector, atol=1e-4)
    assert result.vector.norm() < vector.norm()
    assert not alone.requested()
    plain = PowerSgdCollective(LocalCollective(), lambda _round_index: [[NUM_VALUES]], RANK).reduce(contribution)
    assert torch.equal(plain.vector, vector) and plain.basis is None
    with pytest.raises(TrainerUsageError, match=f"expected 64 values, as many as its tensors have, found {NUM_VALUES}"):
        PowerSgdCollective(LocalCollective(), lambda _round_index: [[8, 8]], 1).reduce(contribution)
    with pytest.raises(RoundFailedError, match="too large"):
        alone.reduce(replace(contribution, vector=torch.full((NUM_VALUES,), 3e38)))
    local = LocalCollective()
    assert with_powersgd(local, lambda _round_index: SHAPES, 0) is local


ALL = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    swarm = RoundSwarm(tmp_path_factory.mktemp("swarm"), len(ALL), powersgd_rank=8)
    yield swarm
    swarm.close()


def said_by(swarm: RoundSwarm, number: int) -> Any:
    try:
        return swarm.outcome(number, 1.0)
    except TimeoutError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "fault"),
    [
        (1, "begun:1:SIGKILL"),  # The second time: in the second phase.
        (0, "begun:1:SIGKILL"),
        (2, "before_voting:1:SIGKILL"),
        (0, "before_deciding:1:SIGKILL"),
        (0, "decided:0:SIGKILL"),  # Some know that the first phase is committed.
        (0, "decided:1:SIGKILL"),
        (3, "before_sending:3:SIGSTOP"),
    ],
)
def test_a_member_that_dies_in_either_phase_costs_the_others_nothing(swarm, position, fault):
    victim = swarm.order(swarm.next_round)[position]
    swarm.begin(ALL, faults={victim: fault})
    outcomes = {number: swarm.outcome(number) for number in ALL if number != victim}
    assert all("digest" in outcome for outcome in outcomes.values()), (fault, outcomes)
    assert len({(outcome["digest"], outcome["basis"]) for outcome in outcomes.values()}) == 1
    for outcome in outcomes.values():
        assert {swarm.actors[number].peer_id for number in outcomes} <= set(outcome["members"])
    assert said_by(swarm, victim) is None, "expected it to get no further than the fault"
    swarm.restart(victim)
