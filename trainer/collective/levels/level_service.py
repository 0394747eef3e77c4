"""What a node answers the others in a round in groups: as coordinator or its successor, as leader, holder and witness.

It keeps the last two such rounds, with the parts that others may still fetch, two slices each. Only members of a round
are answered, and only about that round; what waits is bounded in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from manifests import sha256_hex
from trainer.collective.arithmetic import Payload
from trainer.collective.config import Changes, RoundSettings
from trainer.collective.levels import messages
from trainer.collective.levels.group_plan import GroupPlan
from trainer.collective.levels.messages import BallotReply, GroupedAgreement, Stage, TallyTable
from trainer.collective.levels.tally import Tally, Voters
from trainer.collective.messages import Agreement, Member, RosterNotice
from trainer.errors import MalformedAnswerError, RefusedError, RpcError
from trainer.network.rpc import Peer, Reply, Request, ServerStream, parse_strict_json
from trainer.network.rpc.credential import Role

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_KEPT = 2
_KEPT_AGREEMENTS = 4  # A coordinator makes a new one for each attempt.
_MEMBERS: Final[tuple[Role, ...]] = ("node", "worker")
_COORDINATORS = 8
_NEXT_SOURCE_AFTER = 1 / 8  # Of the silence after which a peer counts as dead.
_ROSTER_S = 30.0
_STATES_MAX_S = 600.0


@dataclass(slots=True)
class GroupedState:
    """What a node knows and holds of one round in groups."""

    agreement: GroupedAgreement
    plan: GroupPlan
    voters: dict[Stage, Voters] = field(default_factory=dict)  # Of tallies, as far as this node knows them.
    tallies: dict[Stage, Tally] = field(default_factory=dict)
    ballots: dict[tuple[Stage, int], str] = field(default_factory=dict)  # This node's own words, by stage and subject.
    digests: dict[int, bytes] = field(default_factory=dict)  # Of its group's result, by part.
    parts: dict[str, dict[int, Payload]] = field(default_factory=lambda: {"group": {}, "result": {}})
    members: dict[str, Member] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)

    @property
    def coordinators(self) -> list[str]:
        """Who takes a tally, one after the other: the coordinator, and few in its place."""
        first = self.agreement.coordinator
        others = [peer_id for peer_id in self.agreement.peer_ids if peer_id != first]
        named = [first] if first in self.members else []  # An agreement may name anybody.
        return [*named, *self.plan.seeded_order("coordinators", others)][:_COORDINATORS]

    def slice_numbers(self) -> list[int]:
        """Returns the slices with a part in them."""
        return [number for number in range(self.plan.num_slices) if self.parts_of(number)]

    def parts_of(self, number: int) -> range:
        """Returns the parts of a slice."""
        return self.plan.slice_parts(number, self.agreement.num_parts)

    def bounds_of(self, number: int) -> slice:
        """Returns where the values of a slice that has parts are in the vector."""
        parts = self.parts_of(number)
        return slice(self.agreement.part_bounds(parts[0])[0], self.agreement.part_bounds(parts[-1])[1])

    def set_voters(self, stage: Stage, voters: Voters) -> None:
        """Notes who has a word in a tally, which this node may have to coordinate."""
        self.voters[stage] = voters
        self.changes.notify()

    def hold(self, kind: str, parts: Mapping[int, Payload]) -> None:
        """Lets others fetch encoded parts from now on."""
        self.parts[kind] |= parts
        self.changes.notify()

    def end(self) -> None:
        """Ends what waits."""
        for tally in self.tallies.values():
            tally.close()
        self.changes.notify()


@dataclass(frozen=True, slots=True)
class _Roster:
    """An agreement that is passed on, and what follows from it."""

    agreement: GroupedAgreement
    data: bytes
    members: Mapping[str, Member]
    plan: GroupPlan


class LevelService:
    """The answering side of all rounds in groups of one node; lives in the event loop of its endpoint."""

    def __init__(self, settings: Callable[[], RoundSettings]) -> None:
        self._settings = settings
        self._states: OrderedDict[str, GroupedState] = OrderedDict()
        self._rosters: OrderedDict[str, _Roster] = OrderedDict()
        self._changes = Changes()
        endpoint = settings().endpoint
        endpoint.register(messages.ROSTER_METHOD, messages.RosterRequest, self.roster, roles=_MEMBERS)
        endpoint.register(messages.TALLY_METHOD, messages.TallyRequest, self.tally, roles=_MEMBERS)
        endpoint.register(messages.BALLOT_METHOD, messages.BallotRequest, self.ballot, roles=_MEMBERS)
        endpoint.register(messages.DIGESTS_METHOD, messages.DigestsRequest, self.part_digests, roles=_MEMBERS)
        endpoint.register_stream(messages.PARTS_METHOD, messages.PartsOpen, self.send_parts, roles=_MEMBERS)

    # -- the agreement, which no message holds -------------------------------------------------------------------------

    def as_sent(self, agreement: Agreement, peer_id: str) -> Agreement:
        """Returns an agreement as it travels to a member: of a round in groups, a notice of where to fetch it."""
        if not isinstance(agreement, GroupedAgreement):
            return agreement
        digest = agreement.fingerprint()
        kept = self._rosters.get(digest) or self._keep_roster(digest, agreement)
        leaders = kept.plan.leaders(kept.plan.group_of(peer_id))
        sources = () if peer_id in leaders else leaders
        return Agreement(
            **{name: getattr(agreement, name) for name in Agreement.model_fields if name not in ("members", "roster")},
            members=(),
            roster=RosterNotice(
                digest=digest,
                size_bytes=len(kept.data),
                sources=tuple(kept.members[leader] for leader in sources),
            ),
        )

    async def resolved(self, agreement: Agreement, coordinator: Peer) -> Agreement:
        """Returns the whole agreement that a notice is of, from the first source that has it.

        Raises:
            RpcError: no source has it, or it is another one.
        """
        notice = agreement.roster
        if notice is None:
            return agreement
        if notice.digest in self._rosters:
            return self._rosters[notice.digest].agreement
        found = await self._first_roster([*(source.peer for source in notice.sources), coordinator], notice)
        self._keep_roster(notice.digest, found)
        return found

    async def _first_roster(self, peers: Sequence[Peer], notice: RosterNotice) -> GroupedAgreement:
        """Asks one source after the other, a moment apart, and takes the first that has it.

        None has to fail first: a leader that is silent would have all of its group late, and left out.
        """
        waiting, asked = list(peers), dict[asyncio.Task[GroupedAgreement], Peer]()
        silence_s = self._settings().config.stall_timeout_s
        try:
            while waiting or asked:
                if waiting:
                    peer = waiting.pop(0)
                    asked[asyncio.create_task(self._fetch_roster(peer, notice))] = peer
                limit_s = silence_s * _NEXT_SOURCE_AFTER if waiting else None
                done, _ = await asyncio.wait(asked, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    peer = asked.pop(task)
                    try:
                        return task.result()
                    except (RpcError, ValueError, TimeoutError) as error:
                        logger.info("agreement %s: not from %s: %s", notice.digest[:12], peer.address, error)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise MalformedAnswerError(f"the agreement {notice.digest[:12]} is nowhere to be had")

    async def roster(self, request: Request[messages.RosterRequest]) -> Reply[messages.RosterPage]:
        """Returns a page of an agreement; a leader that is about to have it lets its group wait."""
        digest, offset = request.body.agreement, request.body.offset
        await self._changes.wait_for(lambda: digest in self._rosters, self._settings().config.stall_timeout_s / 2)
        kept = self._rosters.get(digest)
        if kept is None or request.sender not in kept.members:
            raise RefusedError("unknown", "no such agreement here")
        page = kept.data[offset : offset + messages.ROSTER_PAGE_BYTES]
        return Reply(messages.RosterPage(size_bytes=len(kept.data)), page)

    def _keep_roster(self, digest: str, agreement: GroupedAgreement) -> _Roster:
        members = {member.peer_id: member for member in agreement.members}
        kept = _Roster(agreement, agreement.to_bytes(), members, plan_of(self._settings().run_id, agreement))
        self._rosters[digest] = kept
        while len(self._rosters) > _KEPT_AGREEMENTS:
            self._rosters.popitem(last=False)
        self._changes.notify()
        return kept

    async def _fetch_roster(self, peer: Peer, notice: RosterNotice) -> GroupedAgreement:
        data = bytearray()
        endpoint, silence_s = self._settings().endpoint, self._settings().config.stall_timeout_s
        while len(data) < notice.size_bytes:
            expected_bytes = min(messages.ROSTER_PAGE_BYTES, notice.size_bytes - len(data))
            body = messages.RosterRequest(agreement=notice.digest, offset=len(data))
            reply = await endpoint.call(
                peer,
                messages.ROSTER_METHOD,
                body,
                messages.RosterPage,
                timeout_s=min(_ROSTER_S, 2 * silence_s),
                stall_timeout_s=silence_s,
            )
            if len(reply.payload) != expected_bytes:
                raise ValueError(f"expected a page of {expected_bytes} bytes, found {len(reply.payload)}")
            data += reply.payload
        if sha256_hex(bytes(data)) != notice.digest:
            raise ValueError(f"expected the agreement {notice.digest[:12]}, found another of {len(data)} bytes")
        try:
            parse_strict_json(bytes(data))
            found = GroupedAgreement.model_validate_json(bytes(data))
        except ValidationError as error:
            raise ValueError(f"not an agreement: {error.error_count()} errors") from None
        if len(found.members) <= self._settings().config.max_group_members:
            raise ValueError(f"{len(found.members)} members are one group here, by collective.max_group_members")
        return found

    # -- rounds --------------------------------------------------------------------------------------------------------

    def begin(self, agreement: GroupedAgreement) -> GroupedState:
        """Notes that this node takes part in a round."""
        digest = agreement.fingerprint()
        old = self._states.pop(digest, None)
        if old is not None:
            old.end()
        plan = plan_of(self._settings().run_id, agreement)
        state = self._states[digest] = GroupedState(agreement, plan)
        state.members = {member.peer_id: member for member in agreement.members}
        state.voters[Stage.GROUPS] = dict(enumerate(plan.groups))
        state.voters[Stage.HELD] = {0: agreement.peer_ids}
        while len(self._states) > _KEPT:
            self._states.popitem(last=False)[1].end()
        self._changes.notify()
        return state

    def close(self) -> None:
        """Ends everything that waits."""
        for state in self._states.values():
            state.end()

    async def tally(self, request: Request[messages.TallyRequest]) -> Reply[TallyTable]:
        """Takes a member's word, as the coordinator or in its place, and returns what all have come to."""
        body = request.body
        state = await self._state_of(request.sender, body.agreement)
        if self._settings().own_id not in state.coordinators:  # Or one could have everybody ask everybody.
            raise RefusedError("unknown", "this node takes no tally of that round")
        await state.changes.wait_for(lambda: body.stage in state.voters, _STATES_MAX_S)
        if body.stage not in state.voters:
            raise RefusedError("unknown", "this node has not come to that tally")
        tally = state.tallies.get(body.stage)
        if tally is None:
            own_id = self._settings().own_id
            is_successor = own_id != state.agreement.coordinator
            tally = state.tallies[body.stage] = Tally(
                body.stage,
                state.voters[body.stage],
                self._settings().config,
                partial(self._ballot_of, state, body.stage) if is_successor else None,
            )
        return Reply(await tally.say(request.sender, body.subject, body.word))

    async def ballot(self, request: Request[messages.BallotRequest]) -> Reply[BallotReply]:
        """Returns the word that this node has given in a tally."""
        state = await self._state_of(request.sender, request.body.agreement)
        return Reply(BallotReply(word=state.ballots.get((request.body.stage, request.body.subject))))

    async def part_digests(self, request: Request[messages.DigestsRequest]) -> Reply[messages.DigestsReply]:
        """Returns the digests of parts as this node's group holds them."""
        body = request.body
        state = await self._state_of(request.sender, body.agreement)
        numbers = range(body.first_part, min(body.last_part, state.agreement.num_parts))
        if not all(number in state.digests for number in numbers):
            raise RefusedError("unknown", "this node does not hold its group's digests")
        return Reply(messages.DigestsReply(), b"".join(state.digests[number] for number in numbers))

    async def send_parts(self, request: Request[messages.PartsOpen], stream: ServerStream) -> None:
        """Sends encoded parts, in order; waits a while for those that this node is about to hold."""
        body = request.body
        state = await self._state_of(request.sender, body.agreement)
        held = state.parts[body.kind]
        numbers = range(body.first_part, min(body.last_part, state.agreement.num_parts))
        silence_s = self._settings().config.stall_timeout_s
        await state.changes.wait_for(lambda: all(number in held for number in numbers), silence_s)
        if not all(number in held for number in numbers):
            raise RefusedError("unknown", f"this node does not hold parts {body.first_part} to {body.last_part}")
        for number in numbers:
            await stream.send(number, held[number])
        await stream.end()

    async def _state_of(self, peer_id: str, digest: str) -> GroupedState:
        """Returns a round that this node is in with another; one it is about to come to is waited for."""
        await self._changes.wait_for(lambda: digest in self._states, self._settings().config.stall_timeout_s)
        state = self._states.get(digest)
        if state is None or peer_id not in state.members:
            raise RefusedError("unknown", "no such round in groups here")
        return state

    async def _ballot_of(self, state: GroupedState, stage: Stage, peer_id: str, subject: int) -> BallotReply | None:
        return await ask_ballot(self._settings(), state, stage, subject, peer_id)


def plan_of(run_id: str, agreement: Agreement) -> GroupPlan:
    """Returns the plan that follows from an agreement."""
    return GroupPlan.of(run_id, agreement.round_index, agreement.state_digest, agreement.peer_ids)


async def ask_ballot(
    settings: RoundSettings, state: GroupedState, stage: Stage, subject: int, peer_id: str
) -> BallotReply | None:
    """Asks a member for its word in a tally; None: no answer."""
    if peer_id == settings.own_id:
        return BallotReply(word=state.ballots.get((stage, subject)))
    silence_s = settings.config.stall_timeout_s
    body = messages.BallotRequest(agreement=state.agreement.fingerprint(), stage=stage, subject=subject)
    try:
        reply = await settings.endpoint.call(
            state.members[peer_id].peer,
            messages.BALLOT_METHOD,
            body,
            BallotReply,
            timeout_s=silence_s,
            stall_timeout_s=silence_s,
        )
    except RpcError as error:
        logger.debug("round %d: no word from %s: %s", state.agreement.round_index, peer_id[:8], error)
        return None
    return reply.body
