"""The coordinator's first half: the membership of a round, and the agreement that all members acknowledge.

Gathering begins with the first known node that joins, as soon as the coordinator itself trains towards the round or
most others have come to it, and ends when every expected node has come; those that say they are coming, or are fetching
the state, are waited for (`latecomers`). The members are those that hold the same state as most; the others fetch it.
Only peers that discovery knows decide which state that is, and they precede strangers where places are few: identities
cost nothing. Who does not acknowledge the agreement is left out of the next attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from trainer.aggregation import cap_weights, contribution_weight
from trainer.collective.config import Changes, RoundSettings
from trainer.collective.latecomers import LatecomerBackoff
from trainer.collective.levels.messages import agreement_class
from trainer.collective.messages import Agreement, InviteReply, JoinRequest, Member
from trainer.collective.planning import cut_values, most_part_values, precedes
from trainer.collective.quorum import QuorumHistory, QuorumWatch, freshness
from trainer.errors import RefusedError

logger = logging.getLogger(__name__)

_INVITE_INTERVAL_S = 0.5
_LOOK_EVERY_S = 0.25
_LEFT_BEHIND_AFTER_S = 2.0  # Into a gathering; a few invitations.
_LONGEST_ATTEND_S = 5.0
"""For those who attend a round to join it; it costs them two messages."""


@dataclass(slots=True)
class _Silence:
    """Calls in a row that a peer has not answered."""

    since_s: float  # When the first of them began, monotonic.
    num_calls: int = 0


Inviter = Callable[[str, int, float], Awaitable[InviteReply | None]]
"""Asks a peer to come to a round within so many seconds; None: no answer."""


class MembershipGathering:
    """One round's gathering on the node that coordinates it.

    ``is_due`` says whether this node trains towards the round, ``gave_way_to`` whom it has left the round to before.
    """

    def __init__(
        self,
        round_index: int,
        settings: RoundSettings,
        latecomers: LatecomerBackoff,
        invite: Inviter,
        history: QuorumHistory | None = None,
        ask_to_attend: Inviter | None = None,
        is_due: Callable[[], bool] = lambda: True,
        gave_way_to: set[str] | None = None,
    ) -> None:
        self.round_index = round_index
        self.agreement: Agreement | None = None
        self.begun = False
        self.left_behind = False
        """Whether it has failed since most of the others have gone on to a later round."""
        self._began_s = time.monotonic()
        self._settings = settings
        self._config = settings.config
        self._latecomers = latecomers
        self._ask_to_come = invite
        self._joins: dict[str, JoinRequest] = {}
        self._silent: set[str] = set()
        self._ahead: set[str] = set()
        self._awaited: set[str] = set()
        """Those who said that they would come, or were fetching the state, and were waited for."""
        self._silences: dict[str, _Silence] = {}
        self._acknowledged: set[str] = set()
        self._refused: dict[str, RefusedError] = {}
        self._changes = Changes()
        self._running: asyncio.Task[None] | None = None
        self._failure: RefusedError | None = None
        self._history = QuorumHistory() if history is None else history
        self._ask_to_attend = ask_to_attend
        self._is_due = is_due
        self._gave_way_to = set[str]() if gave_way_to is None else gave_way_to
        self._quorum = self._watch_for_quorum()

    @property
    def over(self) -> bool:
        """Whether no node can join any more."""
        return self.agreement is not None or self._failure is not None

    async def join(self, peer_id: str, request: JoinRequest) -> Agreement:
        """Adds a node and waits for the agreement.

        Raises:
            RefusedError: ``late`` (there is an agreement), ``state`` (the others hold another), ``change`` (another
                change of the run is in force), ``few``, or ``full``.
        """
        if self.over:
            raise self._late()
        if len(self._joins) >= self._config.most_members and peer_id not in self._joins:
            self._replace_stranger(peer_id)
        if self._is_sent_away(request):
            raise self._other_change(request)
        self._joins[peer_id] = request
        self._note_work(peer_id, request)
        self._changes.notify()
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            await self._changes.wait_for(lambda: self.over or self._is_sent_away(request))
            if self._is_sent_away(request):
                raise self._other_change(request)
        except asyncio.CancelledError:
            if not self.over and self._joins.get(peer_id) is request:
                del self._joins[peer_id]
                if self._quorum is not None:
                    self._quorum.left(peer_id)
            raise
        return self._agreed(peer_id)

    def change_to(self, settings: RoundSettings) -> None:
        """Goes on by what another change of the run has put in force; who came by an older one has to come again.

        Nothing changes behind an agreement: its members have all come by one change.
        """
        if self.over or settings.change == self._settings.change:
            return
        self._settings, self._config = settings, settings.config
        self._joins.clear()
        self._quorum = self._watch_for_quorum()
        self._changes.notify()

    async def acknowledge(self, peer_id: str, digest: str) -> Agreement | None:
        """Takes a member's acknowledgement, and waits for all others'; returns None, or a new agreement without some.

        Raises:
            RefusedError: ``unknown`` agreement, or one without this member.
        """
        agreement = self.agreement
        if agreement is None or peer_id not in agreement.peer_ids:
            raise RefusedError("unknown", f"round {self.round_index} has no such agreement; join again")
        if agreement.fingerprint() != digest:
            return agreement
        self._acknowledged.add(peer_id)
        self._changes.notify()
        await self._changes.wait_for(lambda: self.begun or self.agreement is not agreement)
        return None if self.agreement is agreement else self._agreed(peer_id)

    @property
    def is_of_few(self) -> bool:
        """Whether it has begun among few of the known nodes, and without this one: the others may make the round."""
        known = self._known()
        members = set() if self.agreement is None else known & set(self.agreement.peer_ids)
        return self.begun and self._settings.own_id not in members and 2 * len(members) <= len(known)

    def gives_way_to(self, coordinator: str) -> bool:
        """Whether a coordinator that precedes this one may have the round.

        Once; again only if neither this node, nor most of those that it knows, come from there and say that it could
        not be reached. Else it might have all others come and go until the round's deadline.
        """
        known = self._known()
        tried = {peer_id for peer_id in known & self._joins.keys() if coordinator in self._joins[peer_id].tried}
        is_of_no_use = self._settings.own_id in tried or 2 * len(tried) > len(known)
        return coordinator not in self._gave_way_to or not is_of_no_use

    def give_way(self, coordinator: str) -> None:
        """Sends all members to a coordinator that precedes this one; does nothing once there is an agreement."""
        if not self.over:
            self._gave_way_to.add(coordinator)
            text = f"round {self.round_index} is coordinated by {coordinator[:8]}"
            self._failure = RefusedError("not_coordinator", text)
            self._changes.notify()

    def close(self) -> None:
        """Ends the gathering."""
        if self._running is not None:
            self._running.cancel()

    def _late(self) -> RefusedError:
        return RefusedError("late", f"round {self.round_index} has begun without this node; join the next one")

    def _is_sent_away(self, request: JoinRequest) -> bool:
        settings = self._settings
        return not self.over and (
            request.change != settings.change or settings.is_forked(request.change, request.change_digest)
        )

    def _other_change(self, request: JoinRequest) -> RefusedError:
        if self._settings.is_forked(request.change, request.change_digest):
            return RefusedError(
                "fork",
                f"round {self.round_index}: the run's owner has signed two changes {request.change}: "
                f"{self._settings.change_digest[:12]} at the coordinator, {request.change_digest[:12]} at the member; "
                "they do not average with each other",
            )
        return RefusedError(
            "change",
            f"round {self.round_index}: expected change {self._settings.change} of the run to be in force, found "
            f"{request.change}; fetch the changes and come again",
        )

    def _known(self) -> set[str]:
        return {*self._settings.directory.peers(), self._settings.own_id}

    def _replace_stranger(self, peer_id: str) -> None:
        """Removes a node that discovery does not know, and so does not bound, in favour of one that it does."""
        known = self._known()
        strangers = sorted(self._joins.keys() - known)
        if peer_id not in known or not strangers:
            raise RefusedError(
                "full", f"round {self.round_index} has {self._config.most_members} members already; join the next one"
            )
        del self._joins[strangers[0]]

    def _agreed(self, peer_id: str) -> Agreement:
        if self._failure is not None:
            raise self._failure
        if self.agreement is None or peer_id not in self.agreement.peer_ids:
            raise self._refused.get(peer_id) or self._late()
        return self.agreement

    async def _run(self) -> None:
        try:
            await self._gather()
        except Exception:  # Whatever it is, no member may be left waiting.
            logger.exception("round %d cannot be agreed", self.round_index)
            self._fail("few", "it cannot be agreed here; see the coordinator's log")

    async def _gather(self) -> None:
        if not await self._may_begin():
            self._fail("not_ready", "no known node has come while this one trained towards it; ask the next one")
            return
        self._began_s = time.monotonic()
        inviting, closes = asyncio.create_task(self._invite_missing()), False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.gather_timeout_s):
                    while not (self.over or self._is_complete() or self._is_left_behind() or closes):
                        if self._has_quorum():
                            await self._let_attend()
                            closes = self._has_majority()
                        if not closes:
                            # Expected peers change as discovery learns of them: looked at again from time to time.
                            await self._changes.wait(self._look_again_s())
            if not (self._quorum is None or closes or self.over or self._is_left_behind()):
                await self._let_attend()
        finally:
            inviting.cancel()
            with suppress(asyncio.CancelledError):
                await inviting
        peers = self._settings.directory.peers()
        missing = self._awaited - self._joins.keys()
        if self._is_left_behind():  # Nobody has been waited for.
            self.left_behind = True
            self._fail("late", "most of the others have gone on to a later round; fetch the state first")
            return
        if not self.over:  # Else they have been sent to another coordinator.
            self._latecomers.missed(self.round_index, [peer for peer_id, peer in peers.items() if peer_id in missing])
            await self._agree()

    async def _may_begin(self) -> bool:
        """Waits until there is somebody to gather for, as long as a gathering may last; returns whether there is.

        Strangers, or one who comes a round too early, would have everybody called, and others' time run out before they
        can come; and a round of theirs alone would leave no place for that of all others.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.gather_timeout_s):
                while not (self.over or self._is_begun_by_known()):
                    await self._changes.wait(_LOOK_EVERY_S)
        return self.over or self._is_begun_by_known()

    def _is_begun_by_known(self) -> bool:
        known = self._known()
        joined = known & self._joins.keys()
        return bool(joined) and (self._is_due() or 2 * len(joined) > len(known))

    def _is_complete(self) -> bool:
        missing = self._known() - self._joins.keys() - self._silent
        return not missing and len(self._joins) >= self._config.min_members and not self._most_are_ahead()

    def _most_are_ahead(self) -> bool:
        """Whether most of the others say that they have gone on to a later round: nobody makes one without them."""
        peers = self._settings.directory.peers()
        return 2 * len(self._ahead & peers.keys()) > len(peers)

    def _is_left_behind(self) -> bool:
        """Whether most of the others have gone on to a later round, so that waiting for them is no use."""
        waited_s = time.monotonic() - self._began_s
        # Whoever is known first does not decide before others are.
        is_heard = waited_s >= min(_LEFT_BEHIND_AFTER_S, self._config.gather_timeout_s)
        return is_heard and self._most_are_ahead()

    # -- with a quorum -------------------------------------------------------------------------------------------------

    def _watch_for_quorum(self) -> QuorumWatch | None:
        config = self._config
        if not config.quorum:
            return None
        return QuorumWatch(config.quorum, config.max_grace_s, self._history, len(self._known()))

    def _note_work(self, peer_id: str, request: JoinRequest) -> None:
        # Of strangers, whom anybody can make, no quorum comes.
        if self._quorum is not None and request.num_batches and peer_id in self._known():
            self._quorum.came(peer_id, self._lag(peer_id, request), time.monotonic())

    def _has_quorum(self) -> bool:
        if self._quorum is None or not self._quorum.is_over(time.monotonic()):
            return False
        ready = {peer_id: join for peer_id, join in self._joins.items() if join.num_batches}
        known = self._known()
        alike = Counter(join.state_digest for peer_id, join in ready.items() if peer_id in known)
        return max(alike.values(), default=0) >= self._quorum.needed  # Work on another state is none for this round.

    def _has_majority(self) -> bool:
        """Whether most nodes are there, with work or without: no two parts of a run go on without the other."""
        known = self._known()
        return 2 * len(known & self._joins.keys()) > len(known)

    def _look_again_s(self) -> float:
        left_s = None if self._quorum is None or self._has_quorum() else self._quorum.left_s(time.monotonic())
        return _LOOK_EVERY_S if left_s is None else min(_LOOK_EVERY_S, left_s)

    def _lag(self, peer_id: str, request: JoinRequest) -> int:
        """By the member's word, and by what this node has seen, whichever is more."""
        return max(request.lag, self._history.lags.observed(self.round_index).get(peer_id, 0))

    async def _let_attend(self) -> None:
        """Has those whose work is not there come without it, to hold the result; waits some seconds at most."""
        missing = self._known() - self._joins.keys() - self._silent
        coming = {peer_id for peer_id in missing if self._may_attend(peer_id)}
        answers = asyncio.gather(*(self._attends(peer_id) for peer_id in coming))
        limit_s = min(_LONGEST_ATTEND_S, self._config.stall_timeout_s / 2)
        try:
            async with asyncio.timeout(limit_s):
                attending = {peer_id for peer_id in await answers if peer_id}
                self._awaited |= attending - {self._settings.own_id}
                while not self.over and attending - self._joins.keys():
                    await self._changes.wait()
        except TimeoutError:
            answers.cancel()

    def _may_attend(self, peer_id: str) -> bool:
        peer = self._settings.directory.peers().get(peer_id)
        return peer_id == self._settings.own_id or (
            peer is not None and self._latecomers.may_wait(peer, self.round_index)
        )

    async def _attends(self, peer_id: str) -> str:
        """Returns the peer if it says that it attends the round."""
        reply = None if self._ask_to_attend is None else await self._ask_to_attend(peer_id, self.round_index, 0.0)
        return peer_id if reply is not None and reply.coming else ""

    # -- invitations ---------------------------------------------------------------------------------------------------

    async def _invite_missing(self) -> None:
        """Asks the missing nodes to come, again and again."""
        began_s = time.monotonic()
        while True:
            after_s = max(0.0, self._config.invite_after_s - (time.monotonic() - began_s))
            missing = self._known() - self._joins.keys()
            await asyncio.gather(*(self._invite(peer_id, after_s) for peer_id in missing))
            await asyncio.sleep(_INVITE_INTERVAL_S)

    async def _invite(self, peer_id: str, after_s: float) -> None:
        began_s = time.monotonic()
        reply = await self._ask_to_come(peer_id, self.round_index, after_s)
        if reply is None:
            # One lost call is no absence. Each takes up to half of the stall timeout: a stopped peer costs all of it.
            silence = self._silences.setdefault(peer_id, _Silence(began_s))
            silence.num_calls += 1
            is_long = time.monotonic() >= silence.since_s + self._config.stall_timeout_s / 2
            gone = is_long and silence.num_calls > 1
        else:
            self._silences.pop(peer_id, None)
            gone = not self._is_awaited(peer_id, reply)
        (self._silent.add if gone else self._silent.discard)(peer_id)
        self._changes.notify()
        if reply is None:
            return
        (self._ahead.add if reply.next_round > self.round_index else self._ahead.discard)(peer_id)
        # A node may only name itself: any other might not even exist.
        settings = self._settings
        is_first = precedes(settings.run_id, self.round_index, peer_id, settings.own_id)
        is_forked = settings.is_forked(reply.change, reply.change_digest)
        may_coordinate = is_first and reply.change >= settings.change and not is_forked
        if reply.coordinator == peer_id and may_coordinate and self.gives_way_to(peer_id):
            self.give_way(peer_id)

    def _is_awaited(self, peer_id: str, reply: InviteReply) -> bool:
        """Whether the round waits for a node that says it comes, or fetches the state and comes then."""
        if peer_id == self._settings.own_id:
            # The others may have come here before this node found out that it has missed the round before.
            return reply.coming or reply.catching_up
        peer = self._settings.directory.peers().get(peer_id)
        if not (reply.coming or reply.catching_up) or peer is None:
            return False
        if self._settings.is_forked(reply.change, reply.change_digest) or not self._latecomers.may_wait(
            peer, self.round_index
        ):
            return False
        self._awaited.add(peer_id)
        return True

    async def _agree(self) -> None:
        joins = dict(self._joins)
        for attempt in range(len(joins) + 1 if joins else 0):  # They may have left, or been sent to fetch a change.
            agreement = self._propose(joins, attempt)
            if agreement is None:
                break
            members = set(agreement.peer_ids)
            self._acknowledged.clear()
            self.agreement = agreement
            self._changes.notify()
            all_have = partial(members.issubset, self._acknowledged)
            await self._changes.wait_for(all_have, self._config.stall_timeout_s)
            absent = members - self._acknowledged
            if not absent:
                self.begun = True
                self._changes.notify()
                return
            logger.info("round %d: %d members did not acknowledge", self.round_index, len(absent))
            joins = {peer_id: join for peer_id, join in joins.items() if peer_id not in absent}
            if not joins or self._settings.own_id in absent:
                break
        self._fail("few", f"expected {self._config.min_members} members or more, found too few")

    def _fail(self, reason: str, text: str) -> None:
        self.agreement = None
        self._failure = RefusedError(reason, f"round {self.round_index}: {text}")
        self._changes.notify()

    def _propose(self, joins: dict[str, JoinRequest], attempt: int) -> Agreement | None:
        """The agreement of those who hold the state that most hold; the others' refusals are kept for them."""
        known = self._known()
        states = {peer_id: (join.state_digest, join.num_values) for peer_id, join in joins.items()}
        counts = Counter([state for peer_id, state in states.items() if peer_id in known] or states.values())
        # Of equally many this node's own, so that nobody can choose another for it; then the lowest digest.
        own = states.get(self._settings.own_id)
        most = min(counts, key=lambda state: (-counts[state], state != own, state))
        members = {peer_id: join for peer_id, join in joins.items() if states[peer_id] == most}
        for peer_id in joins.keys() - members.keys():
            self._refused[peer_id] = RefusedError(
                "state",
                f"round {self.round_index}: expected the state {most[0][:12]} that {len(members)} members hold, "
                f"found {joins[peer_id].state_digest[:12]}; fetch theirs",
            )
        if len(members) < self._config.min_members or not known & members.keys():
            return None
        peer_ids = sorted(members)
        joined = [members[peer_id] for peer_id in peer_ids]
        weights = cap_weights(
            [
                contribution_weight(join.num_batches, join.age_s, self._settings.weighing, join.num_steps)
                for join in joined
            ],
            max_ratio=self._config.max_weight_ratio,
        )
        lags = [self._lag(peer_id, members[peer_id]) if self._quorum is not None else 0 for peer_id in peer_ids]
        state_digest, num_values = most
        agreement_type = agreement_class(len(peer_ids), self._config.max_group_members)
        return agreement_type(
            round_index=self.round_index,
            attempt=attempt,
            coordinator=self._settings.own_id,
            state_digest=state_digest,
            num_values=num_values,
            part_values=cut_values(
                num_values,
                len(peer_ids),
                most_part_values(agreement_type, self._settings.values_per_part),
                self._settings.codec.block_values,
            ),
            vocabulary_rows=min(join.vocabulary_rows for join in members.values()),
            change=self._settings.change,
            change_digest=self._settings.change_digest,
            members=tuple(
                Member(
                    peer_id=peer_id,
                    address=members[peer_id].address,
                    certificate=members[peer_id].certificate,
                    weight=float(weight) * freshness(lag),
                    progress=members[peer_id].progress,
                    lag=lag if weight > 0 else 0,
                )
                for peer_id, weight, lag in zip(peer_ids, weights, lags, strict=True)
            ),
        )
