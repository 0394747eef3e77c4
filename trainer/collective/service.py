"""What a node answers the others in a round: as coordinator, as reducer, and as a member that may know the outcome.

It keeps gatherings and agreements of the last `_KEPT` rounds and the reductions of the current one. A message about
anything else is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from trainer.aggregation import Moments
from trainer.collective import messages
from trainer.collective.commit_vote import CommitVote
from trainer.collective.config import Changes, CollectiveConfig, RoundSettings
from trainer.collective.latecomers import LatecomerBackoff
from trainer.collective.levels import GroupedAgreement, LevelService
from trainer.collective.membership import MembershipGathering
from trainer.collective.messages import Agreement, CommitDecision, InviteReply, JoinRequest
from trainer.collective.planning import coordinator_order, first_plan, precedes
from trainer.collective.quorum import AttendanceCall, QuorumHistory
from trainer.collective.reduction import REDUCTION_METHOD, Reduction
from trainer.errors import CodecError, RefusedError, RpcError
from trainer.network.rpc import Peer, Reply, Request, ServerStream
from trainer.network.rpc.credential import Role
from trainer.network.rpc.token_buckets import TokenBuckets

logger = logging.getLogger(__name__)

_KEPT = 4
_PHASES = 6  # Agreements of a round, at most: of two phases, in groups of its members, and of a group and a column.
_MEMBERS: Final[tuple[Role, ...]] = ("node", "worker")
"""Who may take part in rounds, where the run has an authority."""
_CALLS_AT_ONCE: Final = 8.0  # Of one node to attend rounds; then `_CALLS_PER_S`.
_CALLS_PER_S: Final = 0.5
_LARGEST_SUM = 1e90  # Squares of the largest fp32 number, added up 1e13 times.

B = TypeVar("B", bound=BaseModel)


@dataclass(slots=True)
class KnownRound:
    """One agreement this node has acknowledged."""

    agreement: Agreement
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # Set when a member has begun the round.
    abandoned: bool = False  # Messages about it are refused.
    expects_phase: bool = False  # Its result goes into a second phase that this node has not come to yet.
    commit_vote: CommitVote | None = None
    sums: dict[str, bytes] = field(default_factory=dict)  # Reducers' sums over their slices, by reducer.
    all_sums: list[bytes] | None = None  # The sums that go out to all, in the order of the reducers' ids.
    outcome: CommitDecision | None = None

    @property
    def came_to_nothing(self) -> bool:
        """Whether it is over without a result, so that the same members may agree on the same once more."""
        return self.abandoned or (self.outcome is not None and self.outcome.kind == "abort")

    def end(self) -> None:
        """Ends the vote on it."""
        if self.commit_vote is not None:
            self.commit_vote.close()


class RoundService:
    """The answering side of all rounds of one node; lives in the event loop of its endpoint."""

    def __init__(self, settings: RoundSettings) -> None:
        self.settings = settings
        self.traffic = settings.endpoint.counters.of_scope("round")  # Without that of joiners who fetch the state.
        self.next_round = -1  # The round this node trains towards; -1 while it has no state to take part with.
        self.catching_up = False  # Whether it is fetching the others' state, to take part with that.
        self._own_id = settings.own_id
        self._invited_at_s: float | None = None
        self._gatherings: OrderedDict[int, MembershipGathering] = OrderedDict()
        self._gave_way_to: dict[int, set[str]] = {}  # By round.
        self._num_failed: tuple[int, Counter[str]] = (-1, Counter())  # A round, and its failures by coordinator.
        self._rounds: OrderedDict[str, KnownRound] = OrderedDict()
        self._reductions: dict[tuple[str, str], Reduction] = {}
        self._changes = Changes()
        self._latecomers = LatecomerBackoff()
        self.history = QuorumHistory(settings.cycle)
        self.attendance = AttendanceCall()
        self._calls = TokenBuckets(_CALLS_AT_ONCE, _CALLS_PER_S)
        self.levels = LevelService(lambda: self.settings)
        self._forked: set[str] = set()  # Coordinators of whom the log says that they go by another change.
        methods: tuple[tuple[str, type[BaseModel], Callable[[Request[Any]], Awaitable[Reply[Any]]]], ...] = (
            ("round/join", messages.JoinRequest, self.join),
            ("round/acknowledge", messages.Acknowledge, self.acknowledge),
            ("round/moments", messages.MomentsOpen, self.all_reduce_moments),
            ("round/vote", messages.Vote, self.vote),
            ("round/invite", messages.Invite, self.invite),
            ("round/attend", messages.Invite, self.attend),
            ("round/status", messages.StatusRequest, self.status),
        )
        self._answers = {method: answer for method, _, answer in methods}
        for method, body, answer in methods:
            settings.endpoint.register(method, body, answer, roles=_MEMBERS)
        settings.endpoint.register_stream(
            REDUCTION_METHOD, messages.ReductionOpen, self._serve_reduction, roles=_MEMBERS
        )

    @property
    def _config(self) -> CollectiveConfig:
        return self.settings.config

    def invited(self, now_s: float) -> bool:
        """Returns whether others wait for this node; ``now_s`` of `time.monotonic`."""
        return self._invited_at_s is not None and now_s >= self._invited_at_s

    def catch_up(self) -> None:
        """Notes that this node is fetching the others' state, and will join their round with it (`move_to`)."""
        self.catching_up = True

    def move_to(self, next_round: int) -> None:
        """Notes the round this node trains towards from now on."""
        self.next_round = next_round
        gathering = self._gatherings.get(next_round)
        if gathering is not None and gathering.left_behind:  # Tried anew, with a state of the others or without.
            del self._gatherings[next_round]
        if next_round >= 0:
            self.settings = self.settings.at(next_round)
        self.catching_up = self.catching_up and next_round < 0
        self._invited_at_s = None

    def note_fork(self, coordinator: str, error: RefusedError) -> None:
        """Says once of each coordinator that the run's owner has signed two changes, and that it goes by the other."""
        self._forked &= self.settings.directory.peers().keys()
        if coordinator not in self._forked:
            self._forked.add(coordinator)
            logger.warning("%s", error)

    async def ask(
        self, peer: Peer, method: str, body: BaseModel, reply: type[B], timeout_s: float, payload: bytes = b""
    ) -> Reply[B]:
        """Asks a node of a round; this node is asked without a message.

        Raises:
            RpcError: no answer, or a refusal.
        """
        if peer.peer_id == self._own_id:
            return await self._answers[method](Request(self._own_id, body, payload))
        stall_timeout_s = self._config.stall_timeout_s
        return await self.settings.endpoint.call(
            peer, method, body, reply, payload=payload, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s
        )

    # -- answers; the sender may be this node itself -------------------------------------------------------------------

    async def join(self, request: Request[JoinRequest]) -> Reply[Agreement]:
        """Takes a node into the round it asks for, and returns the agreement.

        Raises:
            RefusedError: it does not belong here (`Terms.check`), is ``behind``, should ask another coordinator
                (``not_coordinator``, ``not_ready``), or the gathering refuses it.
        """
        peer_id, body = request.sender, request.body
        self.settings.terms.check(body.terms, f"node {peer_id[:8]}")
        if body.round_index < self.next_round:
            raise RefusedError(
                "behind",
                f"round {body.round_index} is over, the next one here is {self.next_round}; fetch the state first",
            )
        gathering = self._gatherings.get(body.round_index)
        is_gathering = gathering is not None and not gathering.over  # Also while this node fetches the others' state.
        if not is_gathering and (self.next_round < 0 or body.round_index > self.next_round + 1):
            # Also keeps strangers from filling this node with rounds that will never be.
            raise RefusedError("not_ready", f"this node is not ready for round {body.round_index}; ask the next one")
        if peer_id != self._own_id:
            self._check_order(body)
            if not is_gathering and self._own_id in self.failed_under(body.round_index):
                raise RefusedError("not_ready", f"round {body.round_index} has failed here before; ask the next one")
        await self._compare_changes(peer_id, body)
        gathering = self._gatherings.get(body.round_index)
        if gathering is None or self._came_to_nothing(gathering):
            if self._config.quorum and not body.num_batches:  # Or one call could have everybody asked to a round.
                raise RefusedError("not_ready", f"nobody has come to round {body.round_index} with work yet")
            gathering = self._open_gathering(body.round_index)
        return Reply(self.levels.as_sent(await gathering.join(peer_id, body), peer_id))

    async def _compare_changes(self, peer_id: str, request: JoinRequest) -> None:
        """Fetches the changes of a node that knows more of them, and has those who came without come again."""
        changes, peer = self.settings.changes, self.settings.directory.peers().get(peer_id)
        # Of strangers, whom anybody can make, there is nothing to learn.
        if changes is not None and peer is not None and request.change > changes.number_at(request.round_index):
            await changes.fetch(peer)
        gathering = self._gatherings.get(request.round_index)
        if gathering is not None:
            gathering.change_to(self.settings.at(request.round_index))

    async def acknowledge(self, request: Request[messages.Acknowledge]) -> Reply[messages.AcknowledgeReply]:
        """Takes a member's acknowledgement; see `MembershipGathering.acknowledge`."""
        gathering = self._gatherings.get(request.body.round_index)
        if gathering is None:
            raise RefusedError("unknown", "no such agreement here; join again")
        agreement = await gathering.acknowledge(request.sender, request.body.agreement)
        if agreement is not None:
            agreement = self.levels.as_sent(agreement, request.sender)
        return Reply(messages.AcknowledgeReply(agreement=agreement))

    async def all_reduce_moments(self, request: Request[messages.MomentsOpen]) -> Reply[messages.MomentsReply]:
        """Takes a reducer's sums and waits for the others'; returns the same to all, in the order of their ids."""
        known = await self._member_round(request.sender, request.body.agreement)
        found = _sums_in(request, known)
        if found.num_values > known.agreement.num_values or float(abs(found.gram).max()) > _LARGEST_SUM:
            raise RefusedError("malformed", "the sums of a reducer: larger than sums of so many fp32 values can be")
        known.sums.setdefault(request.sender, bytes(request.payload))
        self._changes.notify()
        reducers = {task.reducer for task in first_plan(known.agreement).tasks}
        await self._changes.wait_for(
            lambda: known.all_sums is not None or reducers <= known.sums.keys(), 2 * self._config.stall_timeout_s
        )
        if known.all_sums is None:
            known.all_sums = [known.sums[sender] for sender in sorted(known.sums)]
            self._changes.notify()
        sizes_bytes = tuple(len(sums) for sums in known.all_sums)
        return Reply(messages.MomentsReply(sizes_bytes=sizes_bytes), b"".join(known.all_sums))

    async def vote(self, request: Request[messages.Vote]) -> Reply[CommitDecision]:
        """Takes a member's vote, as the coordinator or its successor, and returns the decision."""
        known = await self._awaited(request.sender, request.body.plan.agreement)
        sums = _sums_in(request, known) if request.payload else None
        if known.outcome is not None:
            return Reply(known.outcome)
        if known.commit_vote is None:
            known.commit_vote = CommitVote(
                known.agreement, self.settings, lambda peer_id: self._probe(known.agreement, peer_id)
            )
        return Reply(await known.commit_vote.vote(request.sender, request.body, sums))

    async def invite(self, request: Request[messages.Invite]) -> Reply[InviteReply]:
        """Returns whether this node will come to a round, and notes that others wait for it."""
        round_index, next_round = request.body.round_index, self.next_round
        is_known = request.sender == self._own_id or request.sender in self.settings.directory.peers()
        if is_known and self.catching_up:
            return Reply(InviteReply(coming=False, next_round=-1, catching_up=True))
        if not is_known or next_round < 0 or round_index not in (next_round, next_round + 1):
            return Reply(InviteReply(coming=False, next_round=next_round))
        gathering, settings = self._gatherings.get(round_index), self.settings.at(round_index)
        change, digest = settings.change, settings.change_digest
        if settings.is_forked(request.body.change, request.body.change_digest):
            return Reply(InviteReply(coming=False, next_round=next_round, change=change, change_digest=digest))
        is_other = request.sender != self._own_id
        # Nobody gives way to a coordinator that knows fewer changes, and whose round this node could not join.
        if gathering is not None and not gathering.over and is_other and request.body.change >= change:
            if not precedes(self.settings.run_id, round_index, request.sender, self._own_id):
                return Reply(
                    InviteReply(
                        coming=False,
                        next_round=next_round,
                        coordinator=self._own_id,
                        change=change,
                        change_digest=digest,
                    )
                )
            if not gathering.gives_way_to(request.sender):
                return Reply(InviteReply(coming=False, next_round=next_round, change=change, change_digest=digest))
            gathering.give_way(request.sender)
        if round_index == next_round and self._invited_at_s is None:
            self._invited_at_s = asyncio.get_running_loop().time() + request.body.after_s
        return Reply(InviteReply(coming=True, next_round=next_round, change=change, change_digest=digest))

    async def attend(self, request: Request[messages.Invite]) -> Reply[InviteReply]:
        """Returns whether this node attends a round that closes by its quorum, and has it do so beside training."""
        round_index, next_round = request.body.round_index, self.next_round
        is_known = request.sender == self._own_id or request.sender in self.settings.directory.peers()
        is_ours = is_known and next_round >= 0 and round_index in (next_round, next_round + 1)
        # A call costs memory for a vector and a message to each coordinator, whether there is a round or not.
        is_heard = is_ours and (request.sender == self._own_id or self._calls.take(request.sender))
        return Reply(InviteReply(coming=is_heard and self.attendance.call(round_index), next_round=next_round))

    async def status(self, request: Request[messages.StatusRequest]) -> Reply[messages.StatusReply]:
        """Returns the outcome of a round, if it is known."""
        if request.body.agreement not in self._rounds and self._expects_phase(request.sender):
            return Reply(messages.StatusReply(decision=None))  # Of a phase that this node is about to come to.
        return Reply(messages.StatusReply(decision=self._known(request.body.agreement).outcome))

    async def _serve_reduction(self, request: Request[messages.ReductionOpen], stream: ServerStream) -> None:
        # Only a member that knows that all have acknowledged sends parts: the round has begun, even if its coordinator
        # is gone.
        (await self._member_round(request.sender, request.body.agreement)).begun.set()
        key = (request.body.plan, request.body.task)
        await self._changes.wait_for(lambda: key in self._reductions, 2 * self._config.stall_timeout_s)
        reduction = self._reductions.get(key)
        if reduction is None:
            raise RefusedError("unknown", "not reduced here, or not any more")
        try:
            await reduction.serve(request.sender, stream)
        except ConnectionAbortedError as error:
            raise RefusedError("unknown", str(error)) from error

    # -- as member -----------------------------------------------------------------------------------------------------

    def acknowledged(self, agreement: Agreement) -> KnownRound:
        """Remembers an agreement that this node accepts; anew, if one with the same words came to nothing."""
        digest = agreement.fingerprint()
        known = self._rounds.pop(digest, None)
        if known is None or known.came_to_nothing:
            if known is not None:
                known.end()
            known = KnownRound(agreement)
        self._rounds[digest] = known
        while len(self._rounds) > _PHASES * _KEPT:
            self._rounds.popitem(last=False)[1].end()
        self._changes.notify()  # Members that came to this phase before this node wait.
        return known

    def begin_phase(self, agreement: Agreement, first: KnownRound | None) -> KnownRound:
        """Comes to the second phase of a round; its members need no acknowledgement beside the first one's commit."""
        known = self.acknowledged(agreement)
        known.begun.set()
        # Others may come to its levels before this node, from now on.
        known.expects_phase = isinstance(agreement, GroupedAgreement)
        if first is not None:
            first.expects_phase = False
        return known

    def note_failed(self, agreement: Agreement) -> None:
        """Notes that a round has come to nothing under a coordinator, which is not asked first at the next attempt."""
        if self._num_failed[0] != agreement.round_index:
            self._num_failed = (agreement.round_index, Counter())
        self._num_failed[1][agreement.coordinator] += 1
        self._gave_way_to.setdefault(agreement.round_index, set()).add(agreement.coordinator)

    def failed_under(self, round_index: int) -> frozenset[str]:
        """Returns under whom more attempts at a round came to nothing here than under others; empty: all are alike."""
        noted, num_failed = self._num_failed
        if noted != round_index:
            return frozenset()
        known = {self._own_id, *self.settings.directory.peers()}
        least = min(num_failed[peer_id] for peer_id in known)
        return frozenset(peer_id for peer_id in known if num_failed[peer_id] > least)

    def settle(self, known: KnownRound, outcome: CommitDecision) -> None:
        """Remembers how a round ended, for those who ask."""
        known.outcome = known.outcome or outcome
        if outcome.commit is not None:
            self._latecomers.joined(outcome.commit.members)
            self.history.committed(known.agreement, time.monotonic())

    def settle_grouped(self, known: KnownRound, members: Sequence[str]) -> None:
        """Remembers that a round in groups has committed; its parts stay to be fetched."""
        known.outcome, known.expects_phase = CommitDecision(kind="commit"), False
        self._latecomers.joined(members)
        self._changes.notify()

    def offer(self, plan_digest: str, reductions: Sequence[Reduction]) -> None:
        """Serves these reductions from now on; those of earlier passes stay while a member reads from them."""
        for reduction in reductions:
            self._reductions[plan_digest, reduction.task.key] = reduction
        self._changes.notify()

    def end_round(self, known: KnownRound | None, plan_digests: Collection[str]) -> None:
        """Withdraws its reductions, whose streams end by themselves, and abandons an agreement without an outcome."""
        for key in [key for key in self._reductions if key[0] in plan_digests]:
            del self._reductions[key]
        if known is not None and known.outcome is None:
            known.abandoned = True

    def end_phases(self, known: KnownRound | None, *, have_result: bool) -> None:
        """Ends the waiting for a second phase; without its result the first one's is nothing, and may be made again."""
        if known is not None:
            known.expects_phase = False
            known.abandoned = known.abandoned or not have_result
        self._changes.notify()

    def close(self) -> None:
        """Ends everything that waits."""
        for gathering in self._gatherings.values():
            gathering.close()
        for known in self._rounds.values():
            known.end()
        self.levels.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _known(self, agreement_digest: str) -> KnownRound:
        known = self._rounds.get(agreement_digest)
        if known is None or known.abandoned:
            raise RefusedError("unknown", "no such agreement here")
        return known

    def _expects_phase(self, peer_id: str) -> bool:
        """Whether this node is about to come to a second phase that the other may have come to already."""
        return any(
            known.expects_phase and not known.abandoned and peer_id in known.agreement.peer_ids
            for known in self._rounds.values()
        )

    async def _awaited(self, peer_id: str, agreement_digest: str) -> KnownRound:
        """Returns a known agreement; a member's that is not known may be of a phase this node is about to come to."""
        await self._changes.wait_for(
            lambda: agreement_digest in self._rounds or not self._expects_phase(peer_id), self._config.round_timeout_s
        )
        return self._known(agreement_digest)

    async def _member_round(self, peer_id: str, agreement_digest: str) -> KnownRound:
        known = await self._awaited(peer_id, agreement_digest)
        if peer_id not in known.agreement.peer_ids:
            raise RefusedError("unknown", "no member of this round")
        return known

    def _check_order(self, request: JoinRequest) -> None:
        peer_ids = {self._own_id, *self.settings.directory.peers()}
        for candidate in coordinator_order(self.settings.run_id, request.round_index, peer_ids):
            if candidate == self._own_id:
                return
            if candidate not in request.tried:
                raise RefusedError("not_coordinator", f"round {request.round_index} is coordinated by {candidate[:8]}")

    def _came_to_nothing(self, gathering: MembershipGathering) -> bool:
        """Whether a gathering is over without a round that could still commit, so that there may be another."""
        if gathering.left_behind:  # Or else each stranger's call would have all others asked again.
            return False
        if gathering.is_of_few:
            return True
        if not gathering.over or gathering.agreement is None:
            return gathering.over
        known = self._rounds.get(gathering.agreement.fingerprint())
        return not gathering.begun if known is None else known.came_to_nothing

    def _open_gathering(self, round_index: int) -> MembershipGathering:
        self._gatherings[round_index] = MembershipGathering(
            round_index,
            self.settings.at(round_index),
            self._latecomers,
            self._ask_to_come,
            self.history,
            partial(self._ask_to_come, method="round/attend"),
            is_due=lambda: self.next_round < 0 or self.next_round >= round_index,
            gave_way_to=self._gave_way_to.setdefault(round_index, set()),
        )
        while len(self._gave_way_to) > _KEPT:
            del self._gave_way_to[next(iter(self._gave_way_to))]
        while len(self._gatherings) > _KEPT:
            self._gatherings.popitem(last=False)[1].close()
        return self._gatherings[round_index]

    async def _ask_to_come(
        self, peer_id: str, round_index: int, after_s: float, method: str = "round/invite"
    ) -> InviteReply | None:
        peer = self.settings.endpoint.peer if peer_id == self._own_id else self.settings.directory.peers().get(peer_id)
        if peer is None:
            return InviteReply(coming=False, next_round=-1)
        settings = self.settings.at(round_index)
        invite = messages.Invite(
            round_index=round_index, after_s=after_s, change=settings.change, change_digest=settings.change_digest
        )
        try:
            return (await self.ask(peer, method, invite, InviteReply, self._config.stall_timeout_s / 2)).body
        except RpcError as error:
            logger.debug("round %d: node %s is not there: %s", round_index, peer_id[:8], error)
            return None

    async def _probe(self, agreement: Agreement, peer_id: str) -> tuple[bool, CommitDecision | None]:
        if peer_id == self._own_id:
            return True, None
        peer = agreement.members[agreement.peer_ids.index(peer_id)].peer
        status = messages.StatusRequest(agreement=agreement.fingerprint())
        try:
            reply = await self.ask(peer, "round/status", status, messages.StatusReply, self._config.stall_timeout_s)
        except RpcError as error:
            logger.debug("round %d: member %s is not there: %s", agreement.round_index, peer_id[:8], error)
            return False, None
        return True, reply.body.decision


def _sums_in(request: Request[Any], known: KnownRound) -> Moments:
    try:
        return Moments.from_bytes(request.payload, len(known.agreement.members))
    except CodecError as error:
        raise RefusedError("malformed", f"the sums of member {request.sender[:8]}: {error}") from error
