"""Rounds in groups, in two levels: real members over real sockets, of whom some die or lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.group_actor import GroupSwarm
from tests.support.grouped_members import GroupedMember, GroupedMembers, digest_of, peer_id_of, vector_of
from tests.support.round_actor import RUN_ID
from trainer.aggregation import RuleConfig
from trainer.collective.levels.columns import ColumnReduction
from trainer.collective.levels.level_arithmetic import ColumnArithmetic, slice_digest
from trainer.collective.levels.level_service import LevelService
from trainer.collective.levels.messages import Stage, TallyRequest, TallyTable
from trainer.collective.planning import coordinator_order
from trainer.errors import RefusedError, RoundFailedError
from trainer.network.rpc import Reply, Request
from trainer.outer.engine.collective import Contribution, RoundResult

NUM_VALUES = 30_000


@pytest.fixture
def members_of() -> Iterator[Callable[..., GroupedMembers]]:
    made: list[GroupedMembers] = []

    def make(num: int, **options: Any) -> GroupedMembers:
        made.append(GroupedMembers(range(num), **options))
        made[-1].know_each_other()
        return made[-1]

    yield make
    for members in made:
        members.close()


def mean_of(numbers: list[int], round_index: int, num_values: int = NUM_VALUES) -> torch.Tensor:
    return torch.stack([vector_of(number, round_index, num_values) for number in numbers]).mean(0)


def one_result(found: dict[int, RoundResult | Exception]) -> RoundResult:
    results = [result for result in found.values() if isinstance(result, RoundResult)]
    assert len(results) == len(found), [str(result) for result in found.values()]
    assert len({digest_of(result.vector) for result in results}) == 1
    assert len({result.report.result_digest for result in results}) == 1
    return results[0]


def test_nine_members_in_three_groups_end_with_their_mean_twice(members_of):
    members = members_of(9)
    for round_index in range(2):
        result = one_result(members.round(round_index, NUM_VALUES))
        assert torch.allclose(result.vector, mean_of(list(range(9)), round_index), atol=1e-5)
        assert (len(result.report.members), result.report.completeness) == (9, 1.0)
        assert "3 groups of 3" in result.report.note and result.report.dropped == ()


@pytest.mark.slow
def test_a_column_leaves_out_what_a_group_does_not_hold(members_of, monkeypatch):
    """A member that reduces one thing in its group, and brings another to the column, is left out of its slice."""
    members = members_of(9)
    liar = members.all[4].endpoint.peer_id
    honest = ColumnArithmetic.encode_own

    def lie(self: ColumnArithmetic, part: int) -> Any:
        payload = honest(self, part)
        return bytes(len(payload)) if self.vector is lying.get("vector") else payload

    lying: dict[str, torch.Tensor] = {}
    own_slice = ColumnReduction._own_slice

    async def remember(self: ColumnReduction, number: int) -> torch.Tensor:
        found = await own_slice(self, number)
        if self.settings.own_id == liar:
            lying["vector"] = found
        return found

    monkeypatch.setattr(ColumnReduction, "_own_slice", remember)
    monkeypatch.setattr(ColumnArithmetic, "encode_own", lie)
    found = members.round(0, NUM_VALUES)
    one_result(found)
    said = [dict(result.report.dropped) for result in found.values() if isinstance(result, RoundResult)]
    assert any("another slice than its group holds" in each.get(liar, "") for each in said)


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["groups", "slices", "held"])
def test_a_coordinator_that_tells_groups_two_stories_is_found_out(members_of, monkeypatch, lie):
    honest = LevelService.tally
    stage = {"groups": Stage.GROUPS, "slices": Stage.SLICES, "held": Stage.HELD}[lie]

    async def tell(self: LevelService, request: Any) -> Reply[TallyTable]:
        reply = await honest(self, request)
        state = self._states[request.body.agreement]
        if request.body.stage is not stage or state.plan.group_of(request.sender) != 0:
            return reply
        subject, word = reply.body.rows[-1]
        other = word[:-1] + ("0" if word[-1] != "0" else "1")
        return Reply(reply.body.model_copy(update={"rows": (*reply.body.rows[:-1], (subject, other))}))

    monkeypatch.setattr(LevelService, "tally", tell)
    members = members_of(9, round_timeout_s=30.0)  # They register the method as it is now.
    found = members.round(0, NUM_VALUES)
    results = [result for result in found.values() if isinstance(result, RoundResult)]
    assert len({digest_of(result.vector) for result in results}) <= 1  # Nobody ends with another result.
    assert any(isinstance(result, RoundFailedError) for result in found.values())


@pytest.mark.slow
def test_a_coordinator_cannot_choose_a_slice_for_everybody(members_of, monkeypatch):
    """It names zeros as what its own column has come to, serves them, and tells all who took them that all hold it."""
    tally, send_parts, sent = LevelService.tally, LevelService.send_parts, set[str]()

    def own_parts(state: Any) -> range:
        plan, liar = state.plan, state.agreement.coordinator
        return plan.slice_parts(plan.groups[plan.group_of(liar)].index(liar), state.agreement.num_parts)

    def is_liar(self: LevelService, state: Any) -> bool:
        return self._settings().own_id == state.agreement.coordinator

    async def tell(self: LevelService, request: Any) -> Reply[TallyTable]:
        state = self._states.get(request.body.agreement)
        if state is not None and request.body.stage is Stage.HELD and is_liar(self, state):
            return Reply(TallyTable(rows=((0, request.body.word),)))
        reply = await tally(self, request)
        state = self._states[request.body.agreement]
        if request.body.stage is not Stage.SLICES or not is_liar(self, state):
            return reply
        parts = own_parts(state)
        zeros = {part: bytes(len(state.parts["result"][part])) for part in parts}
        lied = state.plan.groups[state.plan.group_of(state.agreement.coordinator)].index(state.agreement.coordinator)
        rows = tuple((at, slice_digest(zeros, parts) if at == lied else word) for at, word in reply.body.rows)
        return Reply(reply.body.model_copy(update={"rows": rows}))

    async def send(self: LevelService, request: Any, stream: Any) -> None:
        state = self._states.get(request.body.agreement)
        if state is not None and request.body.kind == "result" and is_liar(self, state):
            sent.add(request.sender)
            held = state.parts["result"]
            state.parts["result"] = held | {part: bytes(len(held[part])) for part in own_parts(state)}
        await send_parts(self, request, stream)

    monkeypatch.setattr(LevelService, "tally", tell)
    monkeypatch.setattr(LevelService, "send_parts", send)
    members = members_of(9, round_timeout_s=40.0)
    found = members.round(0, NUM_VALUES)
    assert sent and not any(isinstance(result, RoundResult) for result in found.values())


@pytest.mark.slow
def test_only_few_take_a_tally_so_that_nobody_has_everybody_ask_everybody(members_of):
    members = members_of(9)
    one_result(members.round(0, NUM_VALUES))
    levels = {each.endpoint.peer_id: (each, each.collective._service.levels) for each in members.all}
    (digest, state), *_ = levels[peer_id_of(0)][1]._states.items()
    assert state.coordinators[0] == state.agreement.coordinator and len(state.coordinators) == 8
    (other,) = set(levels) - set(state.coordinators)
    member, service = levels[other]
    body = TallyRequest(agreement=digest, stage=Stage.HELD, subject=-1, word="")
    with pytest.raises(RefusedError, match="takes no tally"):
        member.loop.run(service.tally(Request(peer_id_of(0), body)), 10)


@pytest.mark.slow
def test_leaders_that_are_silent_cost_their_group_no_round(members_of, monkeypatch):
    honest = LevelService.roster
    coordinator = coordinator_order(RUN_ID, 0, [peer_id_of(number) for number in range(16)])[0]

    async def answer(self: LevelService, request: Any) -> Any:
        if self._settings().own_id != coordinator:
            await asyncio.sleep(60)
        return await honest(self, request)

    monkeypatch.setattr(LevelService, "roster", answer)
    assert len(one_result(members_of(16).round(0, NUM_VALUES)).report.members) == 16


@pytest.mark.slow
def test_whoever_serves_another_slice_is_passed_over(members_of, monkeypatch):
    liar = peer_id_of(2)
    honest = LevelService.send_parts

    async def send(self: LevelService, request: Any, stream: Any) -> None:
        if self._settings().own_id == liar and request.body.kind == "result":
            state = self._states[request.body.agreement]
            state.parts["result"] = {part: bytes(len(each)) for part, each in state.parts["result"].items()}
        await honest(self, request, stream)

    monkeypatch.setattr(LevelService, "send_parts", send)
    members = members_of(9)
    found = members.round(0, NUM_VALUES)
    result = one_result(found)
    assert torch.allclose(result.vector, mean_of(list(range(9)), 0), atol=1e-5)
    said = [dict(each.report.dropped) for each in found.values() if isinstance(each, RoundResult)]
    assert any("served another slice" in each.get(liar, "") for each in said)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["trimmed_mean", "krum"])
def test_a_lying_contribution_does_not_come_through_either_level(members_of, rule):
    members = members_of(16, rule=RuleConfig(rule=rule, validation="off"), compression="int8")
    liar = members.all[5]
    round_of = liar.round
    liar.round = lambda round_index, vector, **changes: round_of(round_index, vector * 1e6, **changes)  # type: ignore[method-assign]
    result = one_result(members.round(0, NUM_VALUES))
    assert float(result.vector.abs().max()) < 10


@pytest.mark.slow
def test_sparse_contributions_go_through_groups(members_of):
    members = members_of(9, compression="sparse", rule=RuleConfig(rule="mean", validation="off"))
    result = one_result(members.round(0, 3 * 4096 * 9))
    assert 0 < float(result.vector.abs().max()) < 10


@pytest.mark.slow
def test_a_second_phase_goes_through_other_groups_of_the_same_members(members_of):
    members = members_of(9)

    def both(member: GroupedMember) -> RoundResult:
        vector = vector_of(member.number, 0, NUM_VALUES)

        def contribution(vector: torch.Tensor, state: str) -> Contribution:
            return Contribution(
                round_index=0,
                vector=vector,
                num_batches=25,
                age_s=0.0,
                reference=torch.zeros_like(vector),
                state_digest=state,
            )

        return member.collective.reduce_in_phases(
            contribution(vector, "ab" * 32),
            lambda first: contribution(2 * vector[:9000] + first.vector[:9000], "cd" * 32),
        )

    for member in members.all:
        member.collective.move_to(0)
    with ThreadPoolExecutor(9) as pool:
        found = dict(enumerate(pool.map(both, members.all)))
    expected = 3 * mean_of(list(range(9)), 0)[:9000]
    assert torch.allclose(one_result(found).vector, expected, atol=1e-4)


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("steps", [["_reduce_columns", ""], ["_reduce_in_group", ""], ["_fetch_missing", ""]])
def test_64_members_of_eight_processes_end_alike_although_processes_are_killed(tmp_path, steps):
    """64 members in eight groups of eight; a round's coordinator dies with all of its process, at one step."""
    swarm = GroupSwarm(
        tmp_path, 8, 8, rule={"rule": "mean", "validation": "off"}, compression="int8", stall_timeout_s=40.0,
        gather_timeout_s=200.0, round_timeout_s=1600.0,
    )  # fmt: skip
    try:
        living = list(range(8))
        place_of = {swarm.peer_ids[number]: place for place in living for number in swarm.numbers[place]}
        for round_index, step in enumerate(steps):
            known = [swarm.peer_ids[number] for place in living for number in swarm.numbers[place]]
            first = coordinator_order(RUN_ID, round_index, known)[0]
            die_at = {place_of[first]: step} if step else {}
            found = swarm.round(round_index, 65_536, living, die_at, 900.0)
            failed = {number: outcome for number, outcome in found.items() if "failed" in outcome}
            assert not failed, (step, failed)
            assert len({outcome["digest"] for outcome in found.values()}) == 1
            assert len(found) == 8 * (len(living) - len(die_at))
            living = [place for place in living if place not in die_at]
            if not step:
                numbers = [number for place in living for number in swarm.numbers[place]]
                values = torch.tensor(found[numbers[0]]["values"])
                assert torch.allclose(values, mean_of(numbers, round_index, 65_536)[:8], atol=0.03)
                assert "groups of" in found[numbers[0]]["note"]
    finally:
        swarm.close()
