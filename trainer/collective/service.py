"""What a node answers the others in a round: as coordinator, as reducer, and as a member that may know the outcome.

It keeps gatherings and agreements of the last `_KEPT` rounds and the reductions of the current one. A message about
anything else is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from trainer.aggregation import Moments, RuleConfig
from trainer.collective.commit_vote import CommitVote
from trainer.collective.config import CollectiveConfig
from trainer.collective.membership import GatheringRules, LatecomerBackoff, MembershipGathering
from trainer.collective.messages import (
    Acknowledge,
    AcknowledgeReply,
    Agreement,
    CommitDecision,
    Invite,
    InviteReply,
    JoinRequest,
    MomentsOpen,
    MomentsReply,
    ReductionOpen,
    StatusReply,
    StatusRequest,
    Terms,
    Vote,
)
from trainer.collective.moments import MomentsAllReduce, findings_of, join_sums
from trainer.collective.planning import coordinator_order, first_plan
from trainer.collective.reduction import REDUCTION_METHOD, Reduction
from trainer.compression.vectors import Codec
from trainer.errors import CodecError, RefusedError, RpcError
from trainer.network.rpc import Endpoint, Peer, Reply, Request, ServerStream

__all__ = ["Directory", "RoundService", "RoundSettings"]

logger = logging.getLogger(__name__)

_KEPT = 4
_LARGEST_SUM = 1e90
"""Squares of the largest fp32 number, added up 1e13 times."""


class Directory(Protocol):
    """The other nodes of the run, as discovery knows them; answers are kept fresh by others and cost nothing."""

    def peers(self) -> Mapping[str, Peer]:
        """Returns the nodes that train by the same terms and seem alive, by id, without this one."""

    def holds_most_held_state(self) -> bool:
        """Returns whether the state most nodes hold, by their own word, is this node's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """What all rounds of a node have in common."""

    run_id: str
    terms: Terms
    rule: RuleConfig
    codec: Codec
    config: CollectiveConfig
    endpoint: Endpoint
    directory: Directory

    @property
    def values_per_part(self) -> int:
        """Values that fit a message."""
        return self.codec.values_per_part(self.config.part_bytes)


@dataclass(slots=True)
class _KnownRound:
    """One agreement this node has acknowledged."""

    agreement: Agreement
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: bool = False
    commit_vote: CommitVote | None = None
    moments_all_reduce: MomentsAllReduce | None = None
    outcome: CommitDecision | None = None


class RoundService:
    """The answering side of all rounds of one node; lives in the event loop of its endpoint."""

    def __init__(self, settings: RoundSettings) -> None:
        self.next_round = -1
        """The round this node trains towards; -1 while it has no state to take part with."""
        self.catching_up = False
        """Whether it is fetching the others' state, to take part with that."""
        self._settings = settings
        self._endpoint = settings.endpoint
        self._own_id = settings.endpoint.peer_id
        self._config = settings.config
        self._directory = settings.directory
        self._invited_at_s: float | None = None
        self._gatherings: OrderedDict[int, MembershipGathering] = OrderedDict()
        self._rounds: OrderedDict[str, _KnownRound] = OrderedDict()
        self._reductions: dict[tuple[str, str], Reduction] = {}
        self._reductions_changed = asyncio.Condition()
        self._latecomers = LatecomerBackoff()

    def register(self) -> None:
        """Registers the methods that are answered here."""
        self._endpoint.register("round/join", JoinRequest, self.join)
        self._endpoint.register("round/acknowledge", Acknowledge, self.acknowledge)
        self._endpoint.register("round/moments", MomentsOpen, self.all_reduce_moments)
        self._endpoint.register("round/vote", Vote, self.vote)
        self._endpoint.register("round/invite", Invite, self.invite)
        self._endpoint.register("round/status", StatusRequest, self.status)
        self._endpoint.register_stream(REDUCTION_METHOD, ReductionOpen, self._serve_reduction)

    def invited(self, now_s: float) -> bool:
        """Returns whether others wait for this node; ``now_s`` of `time.monotonic`."""
        return self._invited_at_s is not None and now_s >= self._invited_at_s

    def catch_up(self) -> None:
        """Notes that this node is fetching the others' state, and will join their round with it (`move_to`)."""
        self.catching_up = True

    def move_to(self, next_round: int) -> None:
        """Notes the round this node trains towards from now on."""
        self.next_round = next_round
        self.catching_up = self.catching_up and next_round < 0
        self._invited_at_s = None

    # -- answers; the sender may be this node itself -------------------------------------------------------------------

    async def join(self, request: Request[JoinRequest]) -> Reply[Agreement]:
        """Takes a node into the round it asks for, and returns the agreement.

        Raises:
            RefusedError: it does not belong here (`Terms.check`), is ``behind``, should ask another coordinator
                (``not_coordinator``, ``not_ready``), or the gathering refuses it.
        """
        peer_id, body = request.sender, request.body
        self._settings.terms.check(body.terms, f"node {peer_id[:8]}")
        if body.round_index < self.next_round:
            raise RefusedError(
                "behind",
                f"round {body.round_index} is over, the next one here is {self.next_round}; fetch the state first",
            )
        if self.next_round < 0 or body.round_index > self.next_round + 1:
            # Also keeps strangers from filling this node with rounds that will never be.
            raise RefusedError("not_ready", f"this node is not ready for round {body.round_index}; ask the next one")
        if peer_id != self._own_id:
            self._check_order(body)
        gathering = self._gatherings.get(body.round_index)
        if gathering is None or self._came_to_nothing(gathering):
            gathering = self._open_gathering(body.round_index)
        return Reply(await gathering.join(peer_id, body))

    async def acknowledge(self, request: Request[Acknowledge]) -> Reply[AcknowledgeReply]:
        """Takes a member's acknowledgement; see `MembershipGathering.acknowledge`."""
        gathering = self._gatherings.get(request.body.round_index)
        if gathering is None:
            raise RefusedError("unknown", "no such agreement here; join again")
        agreement = await gathering.acknowledge(request.sender, request.body.agreement)
        return Reply(AcknowledgeReply(agreement=agreement))

    async def all_reduce_moments(self, request: Request[MomentsOpen]) -> Reply[MomentsReply]:
        """Takes a reducer's sums; returns all reducers'."""
        known = self._member_round(request.sender, request.body.agreement)
        try:
            found = Moments.from_bytes(request.payload, len(known.agreement.members))
        except CodecError as error:
            raise RefusedError("malformed", f"the sums of a reducer: {error}") from error
        if found.num_values > known.agreement.num_values or float(abs(found.gram).max()) > _LARGEST_SUM:
            raise RefusedError("malformed", "the sums of a reducer: larger than sums of so many fp32 values can be")
        if known.moments_all_reduce is None:
            reducers = frozenset(task.reducer for task in first_plan(known.agreement).tasks)
            known.moments_all_reduce = MomentsAllReduce(reducers, 2 * self._config.stall_timeout_s)
        return Reply(*join_sums(await known.moments_all_reduce.add(request.sender, bytes(request.payload))))

    async def vote(self, request: Request[Vote]) -> Reply[CommitDecision]:
        """Takes a member's vote, as the coordinator or its successor, and returns the decision."""
        known = self._known(request.body.plan.agreement)
        sums: Moments | None = None
        if request.payload:
            try:
                sums = Moments.from_bytes(request.payload, len(known.agreement.members))
            except CodecError as error:
                raise RefusedError("malformed", f"the sums of a vote: {error}") from error
        if known.outcome is not None:
            return Reply(known.outcome)
        if known.commit_vote is None:
            known.commit_vote = CommitVote(
                known.agreement,
                self._own_id,
                lambda peer: self._probe(known.agreement, peer),
                lambda sums: findings_of(known.agreement, sums, self._settings.rule),
                max_passes=self._config.max_passes,
                timeout_s=self._config.round_timeout_s / 2,
                patience_s=4 * self._config.stall_timeout_s,
            )
        return Reply(await known.commit_vote.vote(request.sender, request.body, sums))

    async def invite(self, request: Request[Invite]) -> Reply[InviteReply]:
        """Returns whether this node will come to a round, and notes that others wait for it."""
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

    async def status(self, request: Request[StatusRequest]) -> Reply[StatusReply]:
        """Returns the outcome of a round, if it is known."""
        return Reply(StatusReply(decision=self._known(request.body.agreement).outcome))

    async def _serve_reduction(self, request: Request[ReductionOpen], stream: ServerStream) -> None:
        # Only a member that knows that all have acknowledged sends parts: the round has begun, even if its coordinator
        # is gone.
        self._member_round(request.sender, request.body.agreement).begun.set()
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

    # -- as member -----------------------------------------------------------------------------------------------------

    def acknowledged(self, agreement: Agreement) -> asyncio.Event:
        """Remembers an agreement; the event is set when a member has begun the round."""
        digest = agreement.fingerprint()
        if digest not in self._rounds:
            self._rounds[digest] = _KnownRound(agreement)
            while len(self._rounds) > _KEPT:
                _end(self._rounds.popitem(last=False)[1])
        return self._rounds[digest].begun

    def abandon(self, agreement: Agreement) -> None:
        """Refuses messages about an agreement from now on."""
        known = self._rounds.get(agreement.fingerprint())
        if known is not None:
            known.abandoned = True

    def settle(self, agreement: Agreement, outcome: CommitDecision) -> None:
        """Remembers how a round ended, for those who ask."""
        known = self._rounds.get(agreement.fingerprint())
        if known is not None and known.outcome is None:
            known.outcome = outcome
        if outcome.commit is not None:
            self._latecomers.joined(outcome.commit.members)

    async def offer(self, plan_digest: str, reductions: Sequence[Reduction]) -> None:
        """Serves these reductions from now on; those of earlier passes stay while a member reads from them."""
        async with self._reductions_changed:
            for reduction in reductions:
                self._reductions[plan_digest, reduction.task.key] = reduction
            self._reductions_changed.notify_all()

    def end_round(self, agreement: Agreement | None) -> None:
        """Withdraws all reductions, whose streams end by themselves, and abandons an agreement without an outcome."""
        self._reductions.clear()
        known = self._rounds.get(agreement.fingerprint()) if agreement is not None else None
        if known is not None and known.outcome is None:
            known.abandoned = True

    def close(self) -> None:
        """Ends everything that waits."""
        for gathering in self._gatherings.values():
            gathering.close()
        for known in self._rounds.values():
            _end(known)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _known(self, agreement_digest: str) -> _KnownRound:
        known = self._rounds.get(agreement_digest)
        if known is None or known.abandoned:
            raise RefusedError("unknown", "no such agreement here")
        return known

    def _member_round(self, peer_id: str, agreement_digest: str) -> _KnownRound:
        known = self._known(agreement_digest)
        if peer_id not in known.agreement.peer_ids:
            raise RefusedError("unknown", "no member of this round")
        return known

    def _check_order(self, request: JoinRequest) -> None:
        peer_ids = {self._own_id, *self._directory.peers()}
        for candidate in coordinator_order(self._settings.run_id, request.round_index, peer_ids):
            if candidate == self._own_id:
                return
            if candidate not in request.tried:
                raise RefusedError("not_coordinator", f"round {request.round_index} is coordinated by {candidate[:8]}")

    def _precedes(self, peer_id: str, round_index: int) -> bool:
        order = coordinator_order(self._settings.run_id, round_index, {self._own_id, peer_id})
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
        rules = GatheringRules(
            own_id=self._own_id,
            config=self._config,
            values_per_part=self._settings.values_per_part,
            peers=self._directory.peers,
            invite=self._ask_to_come,
            precedes=self._precedes,
            latecomers=self._latecomers,
        )
        self._gatherings[round_index] = MembershipGathering(round_index, rules)
        while len(self._gatherings) > _KEPT:
            self._gatherings.popitem(last=False)[1].close()
        return self._gatherings[round_index]

    async def _ask_to_come(self, peer_id: str, round_index: int, after_s: float) -> InviteReply | None:
        invite = Invite(round_index=round_index, after_s=after_s)
        if peer_id == self._own_id:
            return (await self.invite(Request(peer_id, invite))).body
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

    async def _probe(self, agreement: Agreement, peer_id: str) -> tuple[bool, CommitDecision | None]:
        if peer_id == self._own_id:
            return True, None
        peer = agreement.members[agreement.peer_ids.index(peer_id)].peer
        status = StatusRequest(agreement=agreement.fingerprint())
        stall_timeout_s = self._config.stall_timeout_s
        try:
            reply = await self._endpoint.call(peer, "round/status", status, StatusReply, timeout_s=stall_timeout_s)
        except RpcError as error:
            logger.debug("round %d: member %s is not there: %s", agreement.round_index, peer_id[:8], error)
            return False, None
        return True, reply.body.decision


def _end(known: _KnownRound) -> None:
    if known.commit_vote is not None:
        known.commit_vote.close()
