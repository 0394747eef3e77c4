"""Members that know other changes of a run do not reduce together: who knows fewer fetches them, or stays out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.round_actor import KnownPeers, identity_of, join_request, settings_of, terms
from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective
from trainer.collective.latecomers import LatecomerBackoff
from trainer.collective.membership import MembershipGathering
from trainer.collective.messages import Agreement, InviteReply, JoinRequest
from trainer.collective.planning import check_agreement
from trainer.errors import RefusedError, RoundFailedError
from trainer.network.rpc import Endpoint, Peer, RpcConfig
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.run.node.loop_thread import LoopThread

RUN_ID = "changing"
OWN, OTHER = "0" * 64, "1" * 64
RULES = {0: RuleConfig(rule="mean"), 1: RuleConfig(rule="median")}


class Changes:
    """Number 1 is in force from round ``at_round``, as far as it is known; the rule is a median then."""

    def __init__(self, at_round: int, known: int, config: CollectiveConfig, branch: str = "a") -> None:
        self.at_round = at_round
        self.branch = branch
        self.known = known
        self.worked_by = known
        self._config = config
        self.others: Mapping[str, Changes] = {}  # What peers know, by id.

    def number_at(self, round_index: int) -> int:
        return self.known if round_index >= self.at_round else 0

    def digest_of(self, number: int) -> str:
        return self.branch * 64 if number else ""

    def options_at(self, round_index: int) -> tuple[RuleConfig, CollectiveConfig]:
        return RULES[self.number_at(round_index)], self._config

    def trained_by(self) -> int:
        return self.worked_by

    async def fetch(self, peer: Peer) -> None:
        await asyncio.sleep(0.01)
        self.known = max(self.known, self.others[peer.peer_id or ""].known)


def test_messages_of_runs_without_changes_are_those_of_earlier_releases() -> None:
    assert "change" not in join_request().model_dump(mode="json")
    assert join_request(change=3).model_dump(mode="json")["change"] == 3
    found = JoinRequest.model_validate_json(json.dumps(join_request(change=3).model_dump(mode="json")))
    assert found.change == 3


async def _gathering(change: int) -> tuple[MembershipGathering, Any]:
    settings = settings_of(OWN, {OTHER: Peer(OTHER, "203.0.113.7:1")}, invite_after_s=0.0, gather_timeout_s=5.0)

    async def invite(_peer_id: str, _round_index: int, _after_s: float) -> InviteReply:
        return InviteReply(coming=True, next_round=4)

    settings = replace(settings, change=change)
    return MembershipGathering(4, settings, LatecomerBackoff(), invite), settings


def test_who_comes_by_another_change_is_sent_to_fetch_it() -> None:
    async def run() -> Agreement:
        gathering, settings = await _gathering(0)
        with pytest.raises(RefusedError) as refused:
            await gathering.join(OTHER, join_request(round_index=4, change=1))
        assert refused.value.reason == "change"
        early = asyncio.create_task(gathering.join(OWN, join_request(round_index=4)))
        await asyncio.sleep(0)
        gathering.change_to(replace(settings, change=1))  # A change is heard of meanwhile.
        with pytest.raises(RefusedError) as evicted:
            await early
        assert evicted.value.reason == "change"
        request = join_request(round_index=4, change=1)
        again = [asyncio.create_task(gathering.join(who, request)) for who in (OWN, OTHER)]
        await asyncio.sleep(0.1)
        agreement = gathering.agreement
        assert agreement is not None
        gathering.change_to(replace(settings, change=2))  # Too late for this round.
        for task in again:
            assert (await task).change == 1
        gathering.close()
        return agreement

    agreement = asyncio.run(run())
    request = join_request(round_index=4, change=1)
    limits = {"values_per_part": 1 << 18, "max_weight_ratio": 3.0}
    own = agreement.peer_ids[0]
    for number in (0, 2):
        with pytest.raises(RefusedError, match="is not in force here"):
            check_agreement(agreement.model_copy(update={"change": number}), request, own_id=own, **limits)


class Member:
    def __init__(
        self, number: int, *, at_round: int = 0, known: int = 0, changing: bool = True, branch: str = "a"
    ) -> None:
        self.loop = LoopThread(f"member-{number}")
        self.loop.start()
        rpc = RpcConfig(host="127.0.0.1", tls=False, heartbeat_s=0.2, stall_timeout_s=5.0, stop_grace_s=0.1)
        self.endpoint = Endpoint(identity_of(number), RUN_ID, rpc)
        self.directory = KnownPeers(holds_most_held_state=True)
        config = CollectiveConfig(invite_after_s=0.0, stall_timeout_s=3.0, gather_timeout_s=6.0, round_timeout_s=25.0)
        self.changes = Changes(at_round, known, config, branch)
        self.collective = PeerCollective(
            *(self.endpoint, self.loop.loop, RUN_ID, terms(), RULES[0], config, self.directory, lambda: 1024),
            changes=self.changes if changing else None,
        )
        self.value = float(number)
        self.loop.run(self.endpoint.start(), 10)

    def contribute(self, round_index: int) -> Any:
        contribution = Contribution(
            round_index=round_index,
            vector=torch.full((2000,), self.value),
            num_batches=4,
            age_s=0.0,
            progress=1.0,
            reference=torch.zeros(2000),
            state_digest="ab" * 32,
        )
        return self.collective.reduce(contribution)

    def close(self) -> None:
        self.collective.close()
        self.loop.run(self.endpoint.stop(), 10)
        self.loop.stop()


@pytest.fixture
def members(request: pytest.FixtureRequest):
    given = [Member(number, **options) for number, options in enumerate(request.param)]
    for member in given:
        others = [other for other in given if other is not member]
        member.directory.known = {other.endpoint.peer_id: other.endpoint.peer for other in others}
        member.changes.others = {other.endpoint.peer_id: other.changes for other in others}
    yield given
    for member in given:
        member.close()


def _round(members: list[Member], round_index: int) -> list[RoundResult | RoundFailedError]:
    for member in members:  # On a busy machine none is left out because its thread has not begun.
        member.collective.move_to(round_index)

    async def all_of_them() -> list[Any]:
        calls = [asyncio.to_thread(member.contribute, round_index) for member in members]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())


KNOWS, BEHIND = {"at_round": 3, "known": 1}, {"at_round": 3, "known": 0}


@pytest.mark.slow
@pytest.mark.parametrize("members", [[KNOWS] * 3, [BEHIND] * 3], indirect=True)
def test_all_go_over_to_a_change_at_its_round(members: list[Member]) -> None:
    rules = []
    for round_index in (2, 3):
        results = _round(members, round_index)
        assert all(isinstance(result, RoundResult) for result in results), results
        assert len({tuple(result.vector.tolist()) for result in results}) == 1
        rules += {result.report.rule for result in results}
        assert {result.change for result in results} == {members[0].changes.number_at(round_index)}
    assert rules == (["mean", "median"] if members[0].changes.known else ["mean", "mean"])


@pytest.mark.slow
@pytest.mark.parametrize("members", [[KNOWS, BEHIND, BEHIND, KNOWS], [BEHIND, BEHIND, BEHIND, KNOWS]], indirect=True)
def test_who_hears_late_fetches_the_change_and_takes_the_result_without_contributing(members: list[Member]) -> None:
    results = _round(members, 3)
    assert all(isinstance(result, RoundResult) for result in results), results
    assert len({tuple(result.vector.tolist()) for result in results}) == 1
    assert {result.change for result in results} == {1}
    assert all(member.changes.known == 1 for member in members)
    known = [member for member in members if member.changes.worked_by == 1]
    expected = torch.tensor([member.value for member in known]).median()
    if len(known) == 2:
        expected = torch.tensor([member.value for member in known]).mean()
    assert results[0].vector[0] == pytest.approx(float(expected))
    for member, result in zip(members, results, strict=True):
        assert len(result.report.members) == 4
        assert (member.endpoint.peer_id in dict(result.report.dropped)) == (member.changes.worked_by == 0)


@pytest.mark.slow
@pytest.mark.parametrize("members", [[KNOWS, KNOWS, {**BEHIND, "changing": False}]], indirect=True)
def test_who_cannot_have_the_change_leaves_the_round_to_the_others(members: list[Member]) -> None:
    *those, alone = _round(members, 3)
    assert all(isinstance(result, RoundResult) for result in those), those
    assert {(len(result.report.members), result.change, result.report.rule) for result in those} == {(2, 1, "median")}
    if isinstance(
        alone, RoundResult
    ):  # It goes on by itself, and takes up their state when it sees that they are more.
        assert alone.report.members == (members[2].endpoint.peer_id,)


FORKED = {**KNOWS, "branch": "b"}


@pytest.mark.slow
@pytest.mark.parametrize("members", [[KNOWS, FORKED, KNOWS, FORKED], [FORKED, KNOWS, KNOWS]], indirect=True)
def test_those_who_go_by_two_changes_of_one_number_do_not_average_with_each_other(
    members: list[Member], caplog: pytest.LogCaptureFixture
) -> None:
    results = _round(members, 3)
    assert all(isinstance(result, RoundResult) for result in results), results
    branches = {member.endpoint.peer_id: member.changes.branch for member in members}
    for member, result in zip(members, results, strict=True):
        assert {branches[peer_id] for peer_id in result.report.members} == {member.changes.branch}
        of_branch = sum(branch == member.changes.branch for branch in branches.values())
        assert len(result.report.members) == of_branch
    said = [record.message for record in caplog.records if "has signed two changes 1" in record.message]
    assert 1 <= len(said) <= len(members) * (len(members) - 1), "once a member and coordinator"
