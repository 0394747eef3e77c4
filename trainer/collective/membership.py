"""The coordinator's first half: the membership of a round, and the agreement that all members acknowledge.

Gathering opens with the first node that asks. It ends when every expected node has come. Late nodes are asked to come
with what they have; nodes that say they are coming, or are fetching the state, are waited for (`latecomers`), and nodes
that do not answer are not. The members are those that hold the same state as most; the others are told to fetch it.
Only peers that discovery knows decide which state that is, and they come before strangers where places are few:
identities cost nothing, and discovery bounds how many of a host it knows. Then all must acknowledge the agreement; a
node that does not is left out of the next attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from trainer.aggregation import cap_weights, contribution_weight
from trainer.collective.messages import MAX_MEMBERS, Agreement, InviteReply, JoinRequest, Member
from trainer.collective.planning import cut_values
from trainer.errors import RefusedError

__all__ = ["GatheringRules", "MembershipGathering", "make_agreement"]

logger = logging.getLogger(__name__)

_INVITE_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheringRules:
    """What a gathering needs to know of the run."""

    own_id: str
    min_members: int
    invite_after_s: float
    gather_timeout_s: float
    acknowledge_timeout_s: float
    max_weight_ratio: float
    values_per_part: int
    expected: Callable[[int], set[str]]
    """Peers that should come to a round, as far as is known, without this node."""
    invite: Callable[[str, int, float], Awaitable[InviteReply | None]]
    """Asks one to come within so many seconds; None: no answer."""
    bear_silence_s: float
    """A peer that answers no invitation for so long is not waited for."""
    precedes: Callable[[str, int], bool]
    """Whether a peer comes before this node among a round's coordinators."""
    may_wait: Callable[[str, int], bool]
    """Whether a round waits for a peer that says it is coming, or fetching the state."""
    in_vain: Callable[[int, Collection[str]], None]
    """Told whom it waited for in vain."""


class MembershipGathering:
    """One round's gathering on the node that coordinates it."""

    def __init__(self, round_index: int, rules: GatheringRules) -> None:
        self.round_index = round_index
        self.agreement: Agreement | None = None
        self.begun = False
        self._rules = rules
        self._joins: dict[str, JoinRequest] = {}
        self._silent: set[str] = set()
        self._ahead: set[str] = set()
        self._awaited: set[str] = set()
        """Those who said that they would come, or were fetching the state, and were waited for."""
        self._unheard_s: dict[str, float] = {}
        self._acknowledged: set[str] = set()
        self._refused: dict[str, RefusedError] = {}
        self._changed = asyncio.Condition()
        self._running: asyncio.Task[None] | None = None
        self._failure: RefusedError | None = None

    @property
    def over(self) -> bool:
        """Whether nobody can join any more."""
        return self.agreement is not None or self._failure is not None

    async def join(self, peer_id: str, request: JoinRequest) -> Agreement:
        """Adds a node and waits for the agreement.

        Raises:
            RefusedError: ``late``: there is an agreement already; ``state``: the others hold another state; ``few``
                or ``full``.
        """
        if self.over:
            raise RefusedError("late", f"round {self.round_index} has begun without this node; join the next one")
        if len(self._joins) >= MAX_MEMBERS and peer_id not in self._joins:
            self._make_room(peer_id)
        async with self._changed:
            self._joins[peer_id] = request
            self._changed.notify_all()
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self.over)
        except asyncio.CancelledError:
            if not self.over and self._joins.get(peer_id) is request:
                del self._joins[peer_id]
            raise
        return self._agreed(peer_id)

    def _known(self) -> set[str]:
        return self._rules.expected(self.round_index) | {self._rules.own_id}

    def _make_room(self, peer_id: str) -> None:
        """Gives a place of those whom discovery does not know, and so does not bound, to one whom it does."""
        known = self._known()
        strangers = sorted(self._joins.keys() - known)
        if peer_id not in known or not strangers:
            raise RefusedError("full", f"round {self.round_index} has {MAX_MEMBERS} members already; join the next one")
        del self._joins[strangers[0]]

    async def acknowledge(self, peer_id: str, digest: str) -> Agreement | None:
        """Takes a member's word that it has read the agreement; waits for everybody's.

        Returns:
            None when all have acknowledged, a new agreement when some did not.

        Raises:
            RefusedError: ``unknown`` agreement, or one without this member.
        """
        async with self._changed:
            agreement = self.agreement
            if agreement is None or agreement.fingerprint() != digest or peer_id not in agreement.peer_ids:
                if agreement is not None and peer_id in agreement.peer_ids:
                    return agreement
                raise RefusedError("unknown", f"round {self.round_index} has no such agreement; join again")
            self._acknowledged.add(peer_id)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.begun or self.agreement is not agreement)
        return None if self.agreement is agreement else self._agreed(peer_id)

    async def give_way(self, coordinator: str) -> None:
        """Sends everybody to another coordinator, who comes first; too late once there is an agreement."""
        async with self._changed:
            if not self.over:
                self._failure = RefusedError(
                    "not_coordinator", f"round {self.round_index} is coordinated by {coordinator[:8]}"
                )
                self._changed.notify_all()

    def close(self) -> None:
        """Ends it; whoever waits is refused."""
        if self._running is not None:
            self._running.cancel()

    def _agreed(self, peer_id: str) -> Agreement:
        if self._failure is not None:
            raise self._failure
        if self.agreement is None or peer_id not in self.agreement.peer_ids:
            raise self._refused.get(peer_id) or RefusedError(
                "late", f"round {self.round_index} has begun without this node; join the next one"
            )
        return self.agreement

    async def _run(self) -> None:
        try:
            await self._gather()
        except Exception:  # whatever it is: nobody may be left waiting
            logger.exception("round %d cannot be agreed", self.round_index)
            await self._fail("few", "it cannot be agreed here; see the coordinator's log")

    async def _gather(self) -> None:
        inviting = asyncio.create_task(self._invite_missing())
        try:
            await self._wait_for_members()
        finally:
            inviting.cancel()
            with suppress(asyncio.CancelledError):
                await inviting
        self._rules.in_vain(self.round_index, self._awaited - self._joins.keys())
        if 2 * len(self._ahead) > len(self._rules.expected(self.round_index)):
            await self._fail("late", "most of the others have gone on to a later round; fetch the state first")
        if not self.over:
            await self._agree()

    async def _wait_for_members(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rules.gather_timeout_s):
                while not self.over and not self._all_here():
                    # What is expected changes with what is known of the peers: looked at again from time to time.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.25), self._changed:
                            await self._changed.wait()

    def _all_here(self) -> bool:
        missing = self._rules.expected(self.round_index) - self._joins.keys() - self._silent
        own_missing = self._rules.own_id not in self._joins.keys() | self._silent
        return not missing and not own_missing and len(self._joins) >= self._rules.min_members

    async def _invite_missing(self) -> None:
        """Asks whoever is missing to come, again and again; who does not answer, or is elsewhere, is not waited for."""
        began_s = time.monotonic()
        while True:
            after_s = max(0.0, self._rules.invite_after_s - (time.monotonic() - began_s))
            missing = (self._rules.expected(self.round_index) | {self._rules.own_id}) - self._joins.keys()
            await asyncio.gather(*(self._invite(peer_id, after_s) for peer_id in missing))
            await asyncio.sleep(_INVITE_INTERVAL_S)

    async def _invite(self, peer_id: str, after_s: float) -> None:
        reply = await self._rules.invite(peer_id, self.round_index, after_s)
        async with self._changed:
            if reply is None:
                # One lost call is no absence: it is asked again, for as long as a silent peer is borne.
                first_s = self._unheard_s.setdefault(peer_id, time.monotonic())
                gone = time.monotonic() > first_s + self._rules.bear_silence_s
            else:
                self._unheard_s.pop(peer_id, None)
                gone = not self._is_awaited(peer_id, reply)
            if gone:
                self._silent.add(peer_id)
            else:
                self._silent.discard(peer_id)
            self._changed.notify_all()
        if reply is None:
            return
        if reply.next_round > self.round_index:
            self._ahead.add(peer_id)
        # It names itself or nobody: whom it does not speak for might not even exist.
        if reply.coordinator == peer_id and self._rules.precedes(peer_id, self.round_index):
            await self.give_way(peer_id)

    def _is_awaited(self, peer_id: str, reply: InviteReply) -> bool:
        """Whether the round waits for whoever says that it comes, or fetches the state and comes then."""
        if peer_id == self._rules.own_id:
            return reply.coming
        if (reply.coming or reply.catching_up) and self._rules.may_wait(peer_id, self.round_index):
            self._awaited.add(peer_id)
            return True
        return False

    async def _agree(self) -> None:
        joins = dict(self._joins)
        for attempt in range(len(joins) + 1):
            agreement = self._propose(joins, attempt)
            if agreement is None:
                break
            async with self._changed:
                self._acknowledged.clear()
                self.agreement = agreement
                self._changed.notify_all()
            absent = await self._absent(agreement)
            if not absent:
                async with self._changed:
                    self.begun = True
                    self._changed.notify_all()
                return
            logger.info("round %d: %d members did not acknowledge", self.round_index, len(absent))
            joins = {peer_id: join for peer_id, join in joins.items() if peer_id not in absent}
            if not joins or self._rules.own_id in absent:
                break
        await self._fail("few", f"expected {self._rules.min_members} members or more, found too few")

    async def _fail(self, reason: str, text: str) -> None:
        async with self._changed:
            self.agreement = None
            self._failure = RefusedError(reason, f"round {self.round_index}: {text}")
            self._changed.notify_all()

    def _propose(self, joins: dict[str, JoinRequest], attempt: int) -> Agreement | None:
        """The agreement of those who hold the state most hold; the others' refusals are kept for them."""
        known = self._known()
        most = most_held({peer_id: join for peer_id, join in joins.items() if peer_id in known} or joins)
        members = {peer_id: join for peer_id, join in joins.items() if (join.state_digest, join.num_values) == most}
        for peer_id in joins.keys() - members.keys():
            self._refused[peer_id] = RefusedError(
                "state",
                f"round {self.round_index}: expected the state {most[0][:12]} that {len(members)} members hold, "
                f"found {joins[peer_id].state_digest[:12]}; fetch theirs",
            )
        if len(members) < self._rules.min_members:
            return None
        return make_agreement(self.round_index, attempt, members, self._rules)

    async def _absent(self, agreement: Agreement) -> set[str]:
        members = set(agreement.peer_ids)
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rules.acknowledge_timeout_s):
                    await self._changed.wait_for(lambda: self._acknowledged >= members)
        return members - self._acknowledged


def most_held(joins: dict[str, JoinRequest]) -> tuple[str, int]:
    """Digest and size of the state most have come with; of several, the one with the lowest digest."""
    counts = Counter((join.state_digest, join.num_values) for join in joins.values())
    return min(counts, key=lambda state: (-counts[state], state))


def make_agreement(round_index: int, attempt: int, joins: dict[str, JoinRequest], rules: GatheringRules) -> Agreement:
    """The agreement of these members: sorted, their weights capped, their vocabulary the least of what each knows."""
    peer_ids = sorted(joins)
    weights = cap_weights(
        [contribution_weight(joins[peer_id].num_batches, joins[peer_id].age_s) for peer_id in peer_ids],
        max_ratio=rules.max_weight_ratio,
    )
    first = joins[peer_ids[0]]
    return Agreement(
        round_index=round_index,
        attempt=attempt,
        coordinator=rules.own_id,
        state_digest=first.state_digest,
        num_values=first.num_values,
        part_values=cut_values(first.num_values, len(peer_ids), rules.values_per_part),
        vocabulary_rows=min(join.vocabulary_rows for join in joins.values()),
        members=tuple(
            Member(
                peer_id=peer_id,
                address=joins[peer_id].address,
                certificate=joins[peer_id].certificate,
                weight=float(weight),
                progress=joins[peer_id].progress,
            )
            for peer_id, weight in zip(peer_ids, weights, strict=True)
        ),
    )
