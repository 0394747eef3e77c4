"""What a node answers the others in a round: as coordinator, as reducer, and as one who may know the outcome.

Nothing is kept for longer than it is of use: gatherings and agreements of the last `_KEPT` rounds, the reductions of
the round that runs. A message about anything else is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.aggregation import Moments, RuleConfig
from trainer.collective.commit_vote import CommitVote
from trainer.collective.config import CollectiveConfig
from trainer.collective.directory import Directory
from trainer.collective.exchange import EXCHANGE
from trainer.collective.latecomers import Latecomers
from trainer.collective.membership import GatheringRules, MembershipGathering
from trainer.collective.messages import (
    Acknowledge,
    AcknowledgeReply,
    Agreement,
    Decision,
    ExchangeOpen,
    Invite,
    InviteReply,
    JoinRequest,
    MomentsOpen,
    MomentsReply,
    StatusReply,
    StatusRequest,
    Vote,
    Why,
)
from trainer.collective.moments import MomentsAllReduce, findings_of, join_sums
from trainer.collective.planning import coordinator_order, first_plan
from trainer.collective.reduction import Reduction
from trainer.collective.terms import Terms
from trainer.errors import CodecError, RefusedError, RpcError
from trainer.network.rpc import Endpoint, Peer, Reply, Request, ServerStream

__all__ = ["RoundService"]

logger = logging.getLogger(__name__)

_KEPT = 4
_LARGEST_SUM = 1e90
"""Squares of the largest fp32 number, added up 1e13 times."""


@dataclass(slots=True)
class _KnownRound:
    """One agreement this node has acknowledged."""

    agreement: Agreement
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: bool = False
    ballot: CommitVote | None = None
    consultation: MomentsAllReduce | None = None
    outcome: Decision | None = None


class RoundService:
    """The answering side of all rounds of one node; lives in the event loop of its endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        terms: Terms,
        rule: RuleConfig,
        config: CollectiveConfig,
        values_per_part: int,
        directory: Directory,
    ) -> None:
        self.next_round = -1
        """The round this node trains towards; -1 while it has no state to take part with."""
        self.catching_up = False
        """Whether it is fetching the others' state, to take part with that."""
        self._endpoint = endpoint
        self._own_id = endpoint.peer_id
        self._run_id = run_id
        self._terms = terms
        self._rule = rule
        self._config = config
        self._values_per_part = values_per_part
        self._directory = directory
        self._invited_at_s: float | None = None
        self._gatherings: OrderedDict[int, MembershipGathering] = OrderedDict()
        self._rounds: OrderedDict[str, _KnownRound] = OrderedDict()
        self._reductions: dict[tuple[str, str], Reduction] = {}
        self._reductions_changed = asyncio.Condition()
        self._latecomers = Latecomers()

    def catch_up(self) -> None:
        """This node is fetching the others' state, and comes to their round with that (`move_to`)."""
        self.catching_up = True

    def register(self) -> None:
        """Tells the endpoint what is answered here."""
        self._endpoint.register("round/join", JoinRequest, self._on_join)
        self._endpoint.register("round/acknowledge", Acknowledge, self._on_acknowledge)
        self._endpoint.register("round/moments", MomentsOpen, self._on_moments)
        self._endpoint.register("round/vote", Vote, self._on_vote)
        self._endpoint.register("round/invite", Invite, self._on_invite)
        self._endpoint.register("round/status", StatusRequest, self._on_status)
        self._endpoint.register_stream(EXCHANGE, ExchangeOpen, self._on_exchange)

    def invited(self, now_s: float) -> bool:
        """Whether others wait for this node; ``now_s`` of `time.monotonic`."""
        return self._invited_at_s is not None and now_s >= self._invited_at_s

    def move_to(self, next_round: int) -> None:
        """The round this node trains towards from now on."""
        self.next_round = next_round
        self.catching_up = self.catching_up and next_round < 0
        self._invited_at_s = None

    # -- as coordinator ------------------------------------------------------------------------------------------------

    async def join(self, peer_id: str, request: JoinRequest) -> Agreement:
        """A node, possibly this one, asks this node to coordinate its round.

        Raises:
            RefusedError: it does not belong here (`Terms.check`), is ``behind``, should ask another
                (``not_coordinator``, ``not_ready``), or the gathering says so.
        """
        self._terms.check(request.terms, f"node {peer_id[:8]}")
        if request.round_index < self.next_round:
            raise RefusedError(
                "behind",
                f"round {request.round_index} is over, the next one here is {self.next_round}; fetch the state first",
            )
        if self.next_round < 0 or request.round_index > self.next_round + 1:
            # Also what keeps strangers from filling this node with rounds that will never be.
            raise RefusedError("not_ready", f"this node is not ready for round {request.round_index}; ask the next one")
        if peer_id != self._own_id:
            self._check_order(request)
        gathering = self._gatherings.get(request.round_index)
        if gathering is None or self._came_to_nothing(gathering):
            gathering = self._open_gathering(request.round_index)
        return await gathering.join(peer_id, request)

    async def acknowledge(self, peer_id: str, round_index: int, agreement_digest: str) -> Agreement | None:
        """A member has read the agreement; see `MembershipGathering.acknowledge`."""
        gathering = self._gatherings.get(round_index)
        if gathering is None:
            raise RefusedError("unknown", "no such agreement here; join again")
        return await gathering.acknowledge(peer_id, agreement_digest)

    async def vote(self, peer_id: str, vote: Vote, sums: Moments | None) -> Decision:
        """A member's vote, to this node as the coordinator or the one that has taken over."""
        known = self._known(vote.plan.agreement)
        if known.outcome is not None:
            return known.outcome
        if known.ballot is None:
            known.ballot = CommitVote(
                known.agreement,
                self._own_id,
                lambda peer: self._probe(known.agreement, peer),
                lambda sums: self._examine(known.agreement, sums),
                max_passes=self._config.max_passes,
                timeout_s=self._config.round_timeout_s / 2,
                patience_s=4 * self._config.stall_timeout_s,
            )
        return await known.ballot.vote(peer_id, vote, sums)

    async def consult(self, peer_id: str, agreement_digest: str, sums: bytes) -> tuple[bytes, ...]:
        """A reducer's sums; everybody's come back."""
        known = self._known(agreement_digest)
        if peer_id not in known.agreement.peer_ids:
            raise RefusedError("unknown", "no member of this round")
        try:
            found = Moments.from_bytes(sums, len(known.agreement.members))
        except CodecError as error:
            raise RefusedError("malformed", f"the sums of a reducer: {error}") from error
        if found.num_values > known.agreement.num_values or float(abs(found.gram).max()) > _LARGEST_SUM:
            raise RefusedError("malformed", "the sums of a reducer: larger than sums of so many fp32 values can be")
        if known.consultation is None:
            reducers = frozenset(task.reducer for task in first_plan(known.agreement).tasks)
            known.consultation = MomentsAllReduce(reducers, 2 * self._config.stall_timeout_s)
        return await known.consultation.add(peer_id, sums)

    # -- as member -----------------------------------------------------------------------------------------------------

    def acknowledged(self, agreement: Agreement) -> asyncio.Event:
        """Remembers an agreement; the event is set when somebody has begun it."""
        digest = agreement.fingerprint()
        if digest not in self._rounds:
            self._rounds[digest] = _KnownRound(agreement)
            while len(self._rounds) > _KEPT:
                self._forget(self._rounds.popitem(last=False)[1])
        return self._rounds[digest].begun

    def abandon(self, agreement: Agreement) -> None:
        """This node goes on without that agreement, and answers so."""
        known = self._rounds.get(agreement.fingerprint())
        if known is not None:
            known.abandoned = True

    def abandon_unless_settled(self, agreement: Agreement) -> None:
        """At the end of a round, however it ended."""
        known = self._rounds.get(agreement.fingerprint())
        if known is not None and known.outcome is None:
            known.abandoned = True

    def settle(self, agreement: Agreement, outcome: Decision) -> None:
        """Remembers how a round ended, for those who ask."""
        known = self._rounds.get(agreement.fingerprint())
        if known is not None and known.outcome is None:
            known.outcome = outcome
        if outcome.commit is not None:
            self._latecomers.began(outcome.commit.members)

    async def offer(self, plan_digest: str, reductions: Sequence[Reduction]) -> None:
        """From now on contributions to these are taken; those of passes before stay while somebody reads from them."""
        async with self._reductions_changed:
            for reduction in reductions:
                self._reductions[plan_digest, reduction.task.key] = reduction
            self._reductions_changed.notify_all()

    def withdraw_all(self) -> None:
        """The round is over; streams that are still served end by themselves."""
        self._reductions.clear()

    def close(self) -> None:
        """Ends everything that waits."""
        for gathering in self._gatherings.values():
            gathering.close()
        for known in self._rounds.values():
            self._forget(known)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _on_join(self, request: Request[JoinRequest]) -> Reply[Agreement]:
        return Reply(await self.join(request.sender, request.body))

    async def _on_acknowledge(self, request: Request[Acknowledge]) -> Reply[AcknowledgeReply]:
        return Reply(
            AcknowledgeReply(
                agreement=await self.acknowledge(request.sender, request.body.round_index, request.body.agreement)
            )
        )

    async def _on_moments(self, request: Request[MomentsOpen]) -> Reply[MomentsReply]:
        sums = await self.consult(request.sender, request.body.agreement, bytes(request.payload))
        reply, payload = join_sums(sums)
        return Reply(reply, payload)

    async def _on_vote(self, request: Request[Vote]) -> Reply[Decision]:
        sums: Moments | None = None
        if request.payload:
            try:
                members = len(self._known(request.body.plan.agreement).agreement.members)
                sums = Moments.from_bytes(request.payload, members)
            except CodecError as error:
                raise RefusedError("malformed", f"the sums of a vote: {error}") from error
        return Reply(await self.vote(request.sender, request.body, sums))

    async def _on_invite(self, request: Request[Invite]) -> Reply[InviteReply]:
        round_index, next_round = request.body.round_index, self.next_round
        is_known = request.sender == self._own_id or request.sender in self._directory.peers()
        if is_known and self.catching_up:
            return Reply(InviteReply(coming=False, next_round=-1, catching_up=True))
        if not is_known or next_round < 0 or round_index not in (next_round, next_round + 1):
            return Reply(InviteReply(coming=False, next_round=next_round))
        gathering = self._gatherings.get(round_index)
        if gathering is not None and not gathering.over and request.sender != self._own_id:
            if not self._precedes(request.sender, round_index):
                return Reply(InviteReply(coming=False, next_round=next_round, coordinator=self._own_id))
            await gathering.give_way(request.sender)
        if round_index == next_round and self._invited_at_s is None:
            self._invited_at_s = asyncio.get_running_loop().time() + request.body.after_s
        return Reply(InviteReply(coming=True, next_round=next_round))

    async def _on_status(self, request: Request[StatusRequest]) -> Reply[StatusReply]:
        known = self._rounds.get(request.body.agreement)
        if known is None or known.abandoned:
            raise RefusedError("unknown", "not in that round")
        return Reply(StatusReply(decision=known.outcome))

    async def _on_exchange(self, request: Request[ExchangeOpen], stream: ServerStream) -> None:
        known = self._known(request.body.agreement)
        if request.sender not in known.agreement.peer_ids:
            raise RefusedError("unknown", "no member of this round")
        # Only who has seen that all acknowledged sends parts: the round has begun, whatever became of its coordinator.
        known.begun.set()
        key = (request.body.plan, request.body.task)
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._config.stall_timeout_s), self._reductions_changed:
                await self._reductions_changed.wait_for(lambda: key in self._reductions)
        reduction = self._reductions.get(key)
        if reduction is None:
            raise RefusedError("unknown", "not reduced here, or not any more")
        try:
            await reduction.serve(request.sender, stream)
        except ConnectionAbortedError as error:
            raise RefusedError("unknown", str(error)) from error

    # -- inside --------------------------------------------------------------------------------------------------------

    def _known(self, agreement_digest: str) -> _KnownRound:
        known = self._rounds.get(agreement_digest)
        if known is None or known.abandoned:
            raise RefusedError("unknown", "no such agreement here")
        return known

    def _forget(self, known: _KnownRound) -> None:
        if known.ballot is not None:
            known.ballot.close()

    def _check_order(self, request: JoinRequest) -> None:
        for candidate in self._order(request.round_index):
            if candidate == self._own_id:
                return
            if candidate not in request.tried:
                raise RefusedError("not_coordinator", f"round {request.round_index} is coordinated by {candidate[:8]}")

    def _order(self, round_index: int) -> list[str]:
        return coordinator_order(self._run_id, round_index, {self._own_id, *self._directory.peers()})

    def _precedes(self, peer_id: str, round_index: int) -> bool:
        order = coordinator_order(self._run_id, round_index, {self._own_id, peer_id})
        return order[0] == peer_id != self._own_id

    def _came_to_nothing(self, gathering: MembershipGathering) -> bool:
        """Whether a gathering is over without a round that could still commit, so that there may be another."""
        if not gathering.over or gathering.agreement is None:
            return gathering.over
        known = self._rounds.get(gathering.agreement.fingerprint())
        if known is None:
            return not gathering.begun
        return known.abandoned or (known.outcome is not None and known.outcome.kind == "abort")

    def _open_gathering(self, round_index: int) -> MembershipGathering:
        config = self._config
        self._gatherings[round_index] = MembershipGathering(
            round_index,
            GatheringRules(
                own_id=self._own_id,
                min_members=config.min_members,
                invite_after_s=config.invite_after_s,
                gather_timeout_s=config.gather_timeout_s,
                acknowledge_timeout_s=config.stall_timeout_s,
                max_weight_ratio=config.max_weight_ratio,
                values_per_part=self._values_per_part,
                expected=lambda _: set(self._directory.peers()),
                invite=self._invite,
                precedes=self._precedes,
                may_wait=self._may_wait,
                in_vain=self._waited_in_vain,
                bear_silence_s=config.stall_timeout_s / 2,
            ),
        )
        while len(self._gatherings) > _KEPT:
            self._gatherings.popitem(last=False)[1].close()
        return self._gatherings[round_index]

    def _may_wait(self, peer_id: str, round_index: int) -> bool:
        peer = self._directory.peers().get(peer_id)
        return peer is not None and self._latecomers.may_wait(peer, round_index)

    def _waited_in_vain(self, round_index: int, peer_ids: Collection[str]) -> None:
        peers = self._directory.peers()
        self._latecomers.in_vain(round_index, [peers[peer_id] for peer_id in peer_ids if peer_id in peers])

    async def _invite(self, peer_id: str, round_index: int, after_s: float) -> InviteReply | None:
        invite = Invite(round_index=round_index, after_s=after_s)
        if peer_id == self._own_id:
            return (await self._on_invite(Request(peer_id, invite))).body
        peer = self._directory.peers().get(peer_id)
        if peer is None:
            return InviteReply(coming=False, next_round=-1)
        stall_timeout_s = self._config.stall_timeout_s
        try:
            reply = await self._endpoint.call(peer, "round/invite", invite, InviteReply, timeout_s=stall_timeout_s)
        except RpcError as error:
            logger.debug("round %d: node %s is not there: %s", round_index, peer_id[:8], error)
            return None
        return reply.body

    async def _probe(self, agreement: Agreement, peer_id: str) -> tuple[bool, Decision | None]:
        if peer_id == self._own_id:
            return True, None
        member = agreement.members[agreement.peer_ids.index(peer_id)]
        certificate = member.certificate.encode() if member.certificate else None
        try:
            reply = await self._endpoint.call(
                Peer(peer_id, member.address, certificate),
                "round/status",
                StatusRequest(agreement=agreement.fingerprint()),
                StatusReply,
                timeout_s=self._config.stall_timeout_s,
            )
        except RpcError as error:
            logger.debug("round %d: member %s is not there: %s", agreement.round_index, peer_id[:8], error)
            return False, None
        return True, reply.body.decision

    def _examine(self, agreement: Agreement, sums: Sequence[Moments]) -> tuple[Why, ...]:
        return findings_of(agreement, sums, self._rule)
