"""What a node answers to members, to strangers and to nonsense; over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from tests.support.round_actor import RUN_ID, KnownPeers, agreement_of, identity_of, join_request, terms
from trainer.aggregation import RuleConfig, contribution_weight
from trainer.collective import CollectiveConfig, PeerCollective
from trainer.collective.levels import GroupedAgreement
from trainer.collective.messages import (
    Acknowledge,
    AcknowledgeReply,
    Agreement,
    Commit,
    CommitDecision,
    Invite,
    InviteReply,
    JoinRequest,
    Member,
    MomentsOpen,
    ReductionOpen,
    StatusRequest,
    TaskDigest,
    Vote,
)
from trainer.collective.planning import coordinator_order, first_plan
from trainer.errors import RefusedError, RoundFailedError, StateBehindError
from trainer.network.rpc import Endpoint, Peer, Reply, Request, RpcConfig
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.run.node.loop_thread import LoopThread

ANY_DIGEST = "ab" * 32
METHODS = [f"round/{name}" for name in ("join", "acknowledge", "moments", "vote", "invite", "status")]


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


class Node:
    """An endpoint, and with options of rounds their collective."""

    def __init__(self, number: int, prepare: Callable[[Endpoint], None] = lambda _: None, **options: Any) -> None:
        self.loop = LoopThread(f"node-{number}")
        self.loop.start()
        config = RpcConfig(host="127.0.0.1", tls=False, heartbeat_s=0.2, stall_timeout_s=5.0, stop_grace_s=0.1)
        self.endpoint = Endpoint(identity_of(number), RUN_ID, config)
        self.directory = KnownPeers(holds_most_held_state=True)
        if options:
            rounds = CollectiveConfig(invite_after_s=0.0, round_timeout_s=20.0, **options)
            context = (self.endpoint, self.loop.loop, RUN_ID, terms(), RuleConfig(), rounds, self.directory)
            self.collective = PeerCollective(*context, lambda: 1024)
        prepare(self.endpoint)
        self.loop.run(self.endpoint.start(), 10)

    def call(self, peer: Peer, method: str, body: BaseModel, reply: type[BaseModel], payload: bytes = b"") -> Any:
        calling = self.endpoint.call(peer, method, body, reply, payload=payload, timeout_s=5)
        return self.loop.run(calling, 10).body

    def close(self) -> None:
        self.loop.run(self.endpoint.stop(), 10)
        self.loop.stop()


@pytest.fixture(scope="module")
def stranger():
    node = Node(90)
    yield node
    node.close()


@pytest.fixture
def node():
    node = Node(91, stall_timeout_s=2.0, gather_timeout_s=1.0)
    node.collective.move_to(5)
    yield node
    node.collective.close()
    node.close()


def contribution(round_index: int, filled: Future[None] | None = None) -> Contribution:
    return Contribution(
        round_index=round_index,
        vector=torch.ones(5_000),
        num_batches=10,
        age_s=1.0,
        reference=torch.zeros(5_000),
        state_digest=ANY_DIGEST,
        filled=filled,
    )


def refusal(stranger: Node, node: Node, method: str, body: BaseModel, payload: bytes = b"") -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        stranger.call(node.endpoint.peer, method, body, Anything, payload)
    return caught.value


@pytest.mark.parametrize(
    ("changed", "reason", "says"),
    [
        (terms(inner_steps=21), "settings", "inner_steps 20"),
        (terms().model_copy(update={"architecture": {"dim": 16}}), "architecture", "dim 8"),
        (terms().model_copy(update={"architecture": {"dim": 8, "num_layers": 2}}), "architecture", "num_layers"),
        (terms().model_copy(update={"tokenizer_lineage": "1" * 64}), "vocabulary", "000000000000"),
    ],
)
def test_a_node_that_trains_something_else_is_told_what_differs(stranger, node, changed, reason, says):
    error = refusal(stranger, node, "round/join", join_request(terms=changed))
    assert error.reason == reason
    assert says in str(error)


def test_what_belongs_to_no_known_agreement_or_round_is_refused(stranger, node):
    assert refusal(stranger, node, "round/join", join_request(round_index=4)).reason == "behind"
    assert refusal(stranger, node, "round/join", join_request(round_index=7)).reason == "not_ready"
    agreement = {"agreement": ANY_DIGEST}
    for method, body in {
        "round/acknowledge": Acknowledge(round_index=5, **agreement),
        "round/moments": MomentsOpen(task="0.0", **agreement),
        "round/status": StatusRequest(**agreement),
        "round/vote": _vote(),
    }.items():
        assert refusal(stranger, node, method, body).reason == "unknown", method

    async def trade() -> None:
        opening = ReductionOpen(plan=ANY_DIGEST, task="0.0", **agreement)
        async with stranger.endpoint.open_stream(node.endpoint.peer, "round/exchange", opening, timeout_s=5) as stream:
            await stream.send(0, b"x" * 100)
            await stream.receive()

    with pytest.raises(RefusedError) as caught:
        stranger.loop.run(trade(), 10)
    assert caught.value.reason == "unknown"


@pytest.mark.slow
def test_nonsense_is_refused_and_counted_and_rounds_go_on(stranger, node):
    chance = random.Random(7)
    before = sum(node.endpoint.counters.refused.values())
    for _ in range(150):
        method = chance.choice(METHODS)
        body = Anything.model_validate(_nonsense(chance))
        error = refusal(stranger, node, method, body, chance.randbytes(chance.randrange(200)))
        assert error.reason == "body", (method, body, error)
    assert sum(node.endpoint.counters.refused.values()) == before + 150
    result = node.collective.reduce(contribution(5))
    assert torch.equal(result.vector, torch.ones(5_000))


def invited(stranger: Node, node: Node, round_index: int) -> InviteReply:
    invite = Invite(round_index=round_index, after_s=0.0)
    return stranger.call(node.endpoint.peer, "round/invite", invite, InviteReply)


def test_an_invitation_to_this_round_is_heard_and_one_to_another_is_not(stranger, node):
    assert not node.collective.requested()
    assert not invited(stranger, node, 50).coming
    assert not invited(stranger, node, 5).coming, "a node in no directory hurries no other"
    node.directory.known = {stranger.endpoint.peer_id: stranger.endpoint.peer}
    assert invited(stranger, node, 5).coming
    assert node.collective.requested()
    node.collective.move_to(5)
    node.loop.run(asyncio.sleep(0), 5)
    assert not node.collective.requested()


def test_one_that_fetches_the_state_says_so_until_it_has_it(stranger, node):
    node.directory.known = {stranger.endpoint.peer_id: stranger.endpoint.peer}
    node.collective.move_to(-1)
    replies = [invited(stranger, node, 9)]
    node.collective.catch_up()
    replies.append(invited(stranger, node, 9))
    node.collective.move_to(9)
    replies.append(invited(stranger, node, 9))
    assert [(reply.coming, reply.catching_up) for reply in replies] == [(False, False), (False, True), (True, False)]


class LateCoordinator:
    """Three nodes, the last of which has missed round 4 and learns that while the next one gathers at it."""

    def __init__(self, gather_timeout_s: float) -> None:
        nodes = [Node(number, stall_timeout_s=5.0, gather_timeout_s=gather_timeout_s) for number in (99, 100, 101)]
        self.by_id = {node.endpoint.peer_id: node for node in nodes}  # The last of round 4 is the first of round 5.
        self.late, *self.others = (self.by_id[peer_id] for peer_id in coordinator_order(RUN_ID, 5, self.by_id))
        for node in nodes:
            node.directory.known = {it.endpoint.peer_id: it.endpoint.peer for it in nodes if it is not node}
            node.collective.move_to(4 if node is self.late else 5)

    def find_out(self) -> None:
        with pytest.raises(StateBehindError):
            self.late.collective.reduce(contribution(4))

    def close(self) -> None:
        for node in self.by_id.values():
            node.collective.close()
            node.close()


def members_of(rounds: Iterable[Future[RoundResult]]) -> list[set[str]]:
    return [set(future.result(30).report.members) for future in rounds]


def test_who_finds_out_that_it_missed_a_round_while_the_next_gathers_at_it_is_in_that() -> None:
    meeting = LateCoordinator(gather_timeout_s=15.0)
    with ThreadPoolExecutor() as threads:
        rounds = [threads.submit(other.collective.reduce, contribution(5)) for other in meeting.others]
        time.sleep(0.3)
        meeting.find_out()
        time.sleep(1.2)  # So long it fetches the state; the others ask for it twice meanwhile.
        meeting.late.collective.move_to(5)
        rounds.append(threads.submit(meeting.late.collective.reduce, contribution(5)))
        members = members_of(rounds)
    meeting.close()
    assert members == [meeting.by_id.keys()] * 3


def test_a_round_that_gathers_at_one_that_fetches_the_state_for_long_has_those_who_come_meanwhile() -> None:
    meeting = LateCoordinator(gather_timeout_s=2.0)
    with ThreadPoolExecutor() as threads:
        rounds = [threads.submit(meeting.others[0].collective.reduce, contribution(5))]
        time.sleep(0.3)
        meeting.find_out()
        rounds.append(threads.submit(meeting.others[1].collective.reduce, contribution(5)))
        members = members_of(rounds)
    meeting.close()
    assert members == [{other.endpoint.peer_id for other in meeting.others}] * 2


@pytest.mark.slow
def test_a_member_that_joins_and_says_no_more_is_left_out(stranger, node):
    async def join_and_vanish() -> None:
        with pytest.raises((RefusedError, TimeoutError)):
            async with asyncio.timeout(6):
                request = join_request()
                await stranger.endpoint.call(node.endpoint.peer, "round/join", request, Agreement, timeout_s=6)
                await asyncio.sleep(6)

    vanishing = stranger.loop.spawn(join_and_vanish())
    time.sleep(0.3)
    result = node.collective.reduce(contribution(5))
    assert result.report.members == (node.endpoint.peer_id,)
    assert result.report.seconds > 2.0, "the one that vanished was in the first agreement, and was waited for"
    vanishing.result(20)


@pytest.mark.slow
def test_a_round_with_too_few_members_fails_and_leaves_everything_as_it_was():
    alone = Node(92, min_members=2, stall_timeout_s=1.0, gather_timeout_s=0.5)
    try:
        for _ in range(2):
            with pytest.raises(RoundFailedError, match="2 members"):
                alone.collective.reduce(contribution(0))
    finally:
        alone.collective.close()
        alone.close()


@pytest.mark.parametrize("address", ["x", "", "unix:/tmp/a:1", "h:99999999", "a\0b:1", "127.0.0.1", "x" * 300 + ":1"])
def test_an_address_that_is_none_is_refused_before_anybody_connects_there(stranger, node, address):
    body = json.loads(join_request().model_dump_json()) | {"address": address}
    assert refusal(stranger, node, "round/join", Anything.model_validate(body)).reason in {"body", "head"}


def _acquainted(*nodes: Node) -> None:
    for node in nodes:
        node.directory.known = {each.endpoint.peer_id: each.endpoint.peer for each in nodes if each is not node}


def _round_that_begins_with(first: Node, *others: Node) -> int:
    peer_ids = {each.endpoint.peer_id for each in (first, *others)}
    return next(
        number for number in range(200) if coordinator_order(RUN_ID, number, peer_ids)[0] == first.endpoint.peer_id
    )


def _take_part(nodes: Sequence[Node], round_index: int) -> list[tuple[str, ...]]:
    """One round of all these nodes; returns who was in it, by each of them."""
    for node in nodes:  # Before any is asked whether it comes.
        node.collective.move_to(round_index)
        node.loop.run(asyncio.sleep(0), 5)
    with ThreadPoolExecutor(len(nodes)) as pool:
        results = pool.map(lambda node: node.collective.reduce(contribution(round_index)), nodes)
        return [result.report.members for result in results]


@pytest.fixture
def pair():
    """Two honest nodes that know each other."""
    nodes = [Node(number, stall_timeout_s=1.0, gather_timeout_s=2.5) for number in (93, 94)]
    _acquainted(*nodes)
    yield nodes
    for node in nodes:
        node.collective.close()
        node.close()


@pytest.mark.parametrize("is_known", [False, True])
def test_who_makes_a_round_alone_before_its_time_keeps_no_others_from_it(stranger, pair, is_known):
    """With two calls, whose sender need not even be known, a node had all others for late, for good."""
    if is_known:
        _acquainted(*pair, stranger)
    for node in pair:
        node.collective.move_to(5)

    async def make_alone(node: Node) -> bool:
        peer, tried = node.endpoint.peer, tuple(sorted(node.directory.known))
        request = join_request(round_index=6, address=stranger.endpoint.address, tried=tried)
        agreement = await stranger.endpoint.call(peer, "round/join", request, Agreement, timeout_s=8)
        body = Acknowledge(round_index=6, agreement=agreement.body.fingerprint())
        await stranger.endpoint.call(peer, "round/acknowledge", body, AcknowledgeReply, timeout_s=8)
        return True

    for node in pair:
        with pytest.raises(RefusedError) as caught:
            stranger.loop.run(make_alone(node), 20)
        assert caught.value.reason == "not_ready"
    _acquainted(*pair)
    honest = tuple(sorted(node.endpoint.peer_id for node in pair))
    assert _take_part(pair, 5) == [honest] * 2
    assert _take_part(pair, 6) == [honest] * 2


def test_a_stranger_has_nobody_called_to_a_round(stranger, pair):
    for node in pair:
        node.collective.move_to(5)

    async def join(node: Node) -> None:
        request = join_request(address=stranger.endpoint.address, tried=tuple(sorted(node.directory.known)))
        with pytest.raises(RefusedError):
            await stranger.endpoint.call(node.endpoint.peer, "round/join", request, Agreement, timeout_s=8)

    for node in pair:
        stranger.loop.run(join(node), 10)
    assert not any(node.collective.requested() for node in pair)


class LyingCoordinator(Node):
    """Says the same to whoever joins; "silent": nothing, and to whoever invites that it coordinates the round."""

    def __init__(self, number: int, lie: str) -> None:
        self.lie = lie
        super().__init__(number, self._prepare)

    def _prepare(self, endpoint: Endpoint) -> None:
        endpoint.register("round/join", JoinRequest, self._join)
        endpoint.register("round/invite", Invite, self._invite)

    async def _join(self, _request: Request[JoinRequest]) -> Reply[Agreement]:
        if self.lie == "silent":
            await asyncio.sleep(60)
        raise RefusedError(self.lie, "so it says")

    async def _invite(self, request: Request[Invite]) -> Reply[InviteReply]:
        own_id = self.endpoint.peer_id if self.lie == "silent" else None
        return Reply(InviteReply(coming=False, next_round=request.body.round_index, coordinator=own_id))


@pytest.mark.parametrize("lie", ["late", "state", "few", pytest.param("silent", marks=pytest.mark.slow)])
def test_a_coordinator_that_refuses_all_costs_a_round_no_more_than_its_turn(pair, lie):
    liar = LyingCoordinator(95, lie)
    try:
        _acquainted(*pair, liar)
        number = _round_that_begins_with(liar, *pair)
        honest = tuple(sorted(node.endpoint.peer_id for node in pair))
        assert _take_part(pair, number) == [honest] * 2
    finally:
        liar.close()


class SpoilingCoordinator(Node):
    """Agrees on a round with two others, and has it come to nothing: it says that all is lost, or that they are."""

    def __init__(self, number: int, lie: str) -> None:
        self.lie = lie
        self.joined: dict[str, JoinRequest] = {}
        self.num_spoilt = 0
        super().__init__(number, self._prepare)

    def _prepare(self, endpoint: Endpoint) -> None:
        endpoint.register("round/join", JoinRequest, self._join)
        endpoint.register("round/acknowledge", Acknowledge, self._acknowledge)
        endpoint.register("round/vote", Vote, self._decide)
        endpoint.register("round/invite", Invite, self._invite)

    async def _join(self, request: Request[JoinRequest]) -> Reply[Agreement]:
        self.joined[request.sender] = request.body
        while len(self.joined) < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        body, own = request.body, self.endpoint
        where = {own.peer_id: own.address} | {peer_id: each.address for peer_id, each in self.joined.items()}
        weight = contribution_weight(body.num_batches, body.age_s, "root")
        members = [
            Member(peer_id=peer_id, address=where[peer_id], certificate=None, weight=weight)
            for peer_id in sorted(where)
        ]
        facts = {"round_index": body.round_index, "state_digest": body.state_digest, "num_values": body.num_values}
        made = agreement_of(3, body.num_values).model_copy(update={**facts, "coordinator": own.peer_id})
        return Reply(made.model_copy(update={"members": tuple(members)}))

    async def _acknowledge(self, _request: Request[Acknowledge]) -> Reply[AcknowledgeReply]:
        await asyncio.sleep(0.2)
        self.joined.clear()
        return Reply(AcknowledgeReply(agreement=None))

    async def _decide(self, request: Request[Vote]) -> Reply[CommitDecision]:
        self.num_spoilt += 1
        if self.lie == "abort":
            return Reply(CommitDecision(kind="abort", reason="so it says"))
        plan, members = request.body.plan, sorted({*request.body.plan.members} - {request.sender})
        digests = tuple(TaskDigest(key=task.key, digest=ANY_DIGEST) for task in plan.tasks)
        said = Commit(plan=plan, members=tuple(members), digests=digests, dropped=(), completeness=1.0, findings=())
        return Reply(CommitDecision(kind="commit", commit=said))

    async def _invite(self, request: Request[Invite]) -> Reply[InviteReply]:
        coming = InviteReply(coming=False, next_round=request.body.round_index, coordinator=self.endpoint.peer_id)
        return Reply(coming)


@pytest.mark.parametrize("lie", ["abort", pytest.param("commit", marks=pytest.mark.slow)])
def test_a_coordinator_that_spoils_its_round_does_not_spoil_each_attempt(pair, lie):
    spoiler = SpoilingCoordinator(96, lie)
    try:
        _acquainted(*pair, spoiler)
        number = _round_that_begins_with(spoiler, *pair)
        honest = tuple(sorted(node.endpoint.peer_id for node in pair))
        num_attempts = 1
        with pytest.raises(RoundFailedError):
            _take_part(pair, number)
        while num_attempts < 3:
            num_attempts += 1
            with suppress(RoundFailedError):
                assert _take_part(pair, number) == [honest] * 2
                break
        assert spoiler.num_spoilt == 2 * (num_attempts - 1)
    finally:
        spoiler.close()


def _spoil(nodes: Sequence[Node], round_index: int) -> None:
    """A round of all these nodes that comes to nothing after it was agreed, at each of them."""
    broken = Future[None]()
    broken.set_exception(ValueError("no vector"))
    for node in nodes:
        node.collective.move_to(round_index)
        node.loop.run(asyncio.sleep(0), 5)
    with ThreadPoolExecutor(len(nodes)) as pool:
        ends = [pool.submit(node.collective.reduce, contribution(round_index, filled=broken)) for node in nodes]
    assert all(isinstance(end.exception(), RoundFailedError) for end in ends)


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_nodes_under_whom_a_round_has_failed_meet_again(pair, num_failures):
    """Whoever coordinates: under all alike, or under one more often than under another."""
    honest = tuple(sorted(node.endpoint.peer_id for node in pair))
    for _ in range(num_failures):
        _spoil(pair, 4)
    assert _take_part(pair, 4) == [honest] * 2


def test_who_does_not_know_that_a_round_has_failed_meets_those_who_do(pair):
    unaware = Node(95, stall_timeout_s=1.0, gather_timeout_s=2.5)
    nodes = (*pair, unaware)
    try:
        number = _round_that_begins_with(*pair, unaware)
        _spoil(pair, number)
        _acquainted(*nodes)
        assert _take_part(nodes, number) == [tuple(sorted(node.endpoint.peer_id for node in nodes))] * 3
    finally:
        unaware.collective.close()
        unaware.close()


def _vote() -> Vote:
    plan = first_plan(agreement_of(2, 10).model_copy(update={"state_digest": ANY_DIGEST}))
    return Vote(plan=plan, term=0, digests=(), failed=(), dropped=())


def _nonsense(chance: random.Random) -> dict[str, Any]:
    """Bodies that are almost right, or not at all."""
    bodies: list[BaseModel] = [
        join_request(),
        _vote(),
        Acknowledge(round_index=1, agreement=ANY_DIGEST),
        Invite(round_index=1, after_s=1.0),
        MomentsOpen(agreement=ANY_DIGEST, task="0.0"),
        StatusRequest(agreement=ANY_DIGEST),
    ]
    body: dict[str, Any] = json.loads(chance.choice(bodies).model_dump_json())
    wrong = [-1, 2**60, "", "x" * 500, None, [], {}, [[[]]], True, 1.5, "zz" * 32]
    if body and chance.random() < 0.5:
        body[chance.choice(sorted(body))] = chance.choice(wrong)
    body[f"surprise_{chance.randrange(9)}"] = chance.choice(wrong)
    return body


def test_one_node_calls_another_to_rounds_so_often_and_no_more(stranger, node):
    node.directory.known = {stranger.endpoint.peer_id: stranger.endpoint.peer}
    node.collective.open_attendance(is_open=True)
    invite = Invite(round_index=5, after_s=0.0)
    began_s = time.monotonic()
    coming = [stranger.call(node.endpoint.peer, "round/attend", invite, InviteReply).coming for _ in range(30)]
    assert 8 <= sum(coming) <= 9 + 0.5 * (time.monotonic() - began_s)  # Eight at once, and one more every two seconds.


def test_who_comes_to_the_levels_of_a_second_phase_before_this_node_waits_until_it_fails(
    node: Node, stranger: Node
) -> None:
    """A member of a round in groups may be through with its group before another has begun there."""
    sender = stranger.endpoint.peer_id
    members = [
        Member(peer_id=peer_id, address="127.0.0.1:1", certificate=None, weight=1.0)
        for peer_id in sorted((node.endpoint.peer_id, sender))
    ]
    facts = agreement_of(2, 5_000).model_dump() | {"members": tuple(members)}
    agreement = GroupedAgreement(**facts)

    async def calls() -> None:
        service = node.collective._service
        known = service.begin_phase(agreement, None)
        waiting = asyncio.create_task(service._awaited(sender, "ef" * 32))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        service.end_round(known, ())
        service.end_phases(known, have_result=False)
        with pytest.raises(RefusedError, match="no such agreement here"):
            await waiting

    node.loop.run(calls(), 10)
