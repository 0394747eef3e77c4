"""Which of a round's proposed agreements counts, and when this node proposes one itself.

    attempt 0 ─▶ void ─▶ attempt 1 ─▶ void ─▶ attempt 2      the first that is not void counts, at every member
                                              is free: whoever comes first in the round's order puts one, if absent

`RoundProposals` is proposer and acceptor of one node in one round. How an agreement is judged and when it may be put
are pure functions in `rules`; here they meet what lies in the bucket: an agreement is read, and what it lists, before
it counts.

Guarantees: an agreement is void here for nothing that another member would not find too, but for two things. What it
lists and is not there `_ABSENT_AFTER_S` after the agreement was first seen counts as never put; only who might have
proposed it by then has others wait so long. And one without most of the round before is void if it is from another
state than these vouch for. Whoever has proposed a void one is out of the round's order. A node that holds another state
than the others is told so, and proposes nothing.

The trade-off: void agreements are not removed, so that nobody judges otherwise later: each costs every member a read of
0.3 KB a member, and whoever may write can put a thousand of them into a round, which then fails.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from genesis.populate.crashpoint import crash_point
from trainer.bucket_rounds.departures import Departures
from trainer.bucket_rounds.documents import MAX_AGREEMENT_BYTES, Agreement, ContributionHeader
from trainer.bucket_rounds.fetching import ContributionId, FetchedContributions, id_of
from trainer.bucket_rounds.history import MOST_ATTEMPTS, History
from trainer.bucket_rounds.object_names import agreement_key
from trainer.bucket_rounds.place import RoundListing
from trainer.bucket_rounds.rules import (
    PutContribution,
    RoundFacts,
    check_members,
    check_outline,
    check_times,
    chosen,
    proposal_at,
    proposed,
)
from trainer.bucket_rounds.settings import BucketSettings, StoreClock
from trainer.collective.planning import is_majority
from trainer.errors import MalformedAnswerError, RefusedError, RoundFailedError, StateBehindError

logger = logging.getLogger(__name__)

_ABSENT_AFTER_S: Final = 15.0
"""So long after an agreement was seen, what it lists and is not there counts as never put."""
_UNLISTED_AFTER: Final = 3
"""Refused agreements of one attempt, after which what stands in their way is in no listing."""


@dataclass(frozen=True, slots=True)
class _Absent:
    """What an agreement lists and is not there, at the earliest that it can have been put."""

    member: str
    put_at: float


@dataclass(frozen=True, slots=True)
class AcceptedAgreement:
    """The agreement of a round that counts, all of whose contributions were read."""

    agreement: Agreement
    put_at: float  # Unix time by the store's clock.


class RoundProposals:
    """The agreements proposed for one round, as one node judges and makes them; for one thread.

    ``is_snapshot_due`` is asked before this node proposes one, and ``waits_for_others``, with the members that would be
    in it, whether somebody is still to come. Whoever is among the ``departures`` is not waited for. Contributions that
    an agreement lists are added to ``fetched``.
    """

    def __init__(
        self,
        settings: BucketSettings,
        facts: RoundFacts,
        clock: StoreClock,
        fetched: FetchedContributions,
        is_snapshot_due: Callable[[], bool] = lambda: False,
        waits_for_others: Callable[[Collection[str]], bool] = lambda _members: False,
        departures: Departures | None = None,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._clock = clock
        self._fetched = fetched
        self._is_snapshot_due = is_snapshot_due
        self._waits_for_others = waits_for_others
        self._departures = departures or Departures(settings, facts.round_index)
        self._history = History(settings.place, settings.rules, settings.refusal)
        self._attempt = 0  # The first that is not void.
        self._void: dict[int, str] = {}  # Attempts that came to nothing, and who proposed them, if anybody did.
        self._refusals = Counter[int]()  # Of this node's agreements by the store, by attempt.
        self._seen_since_s: dict[int, float] = {}  # Since when there is an agreement, by attempt.

    def accepted(self, listing: RoundListing) -> AcceptedAgreement | None:
        """Returns the first agreement that is not void; None: there is none yet, or it cannot be judged yet.

        Raises:
            StateBehindError: the others hold another state, or have gone on for longer than contributions are kept.
            RoundFailedError: there are no attempts left.
        """
        for attempt in listing.agreements:
            self._seen_since_s.setdefault(attempt, time.monotonic())
        for attempt in range(MOST_ATTEMPTS):
            self._attempt = attempt
            listed = listing.agreements.get(attempt)
            if listed is None:
                return None
            if attempt in self._void:
                continue
            body = b"" if listed.size_bytes > MAX_AGREEMENT_BYTES else self._body(attempt)
            if body is None:
                return None
            try:
                agreement = Agreement.parse(body, self._settings.run_id)
            except MalformedAnswerError as error:
                self._pass_over(attempt, "", error)
                continue
            try:
                is_whole = self._is_whole(agreement, attempt, listed.put_at, listing)
            except RefusedError as error:
                self._pass_over(attempt, agreement.member, error)
                continue
            return AcceptedAgreement(agreement, listed.put_at) if is_whole else None
        raise RoundFailedError(f"round {self._facts.round_index}: a thousand agreements, all of them void")

    def is_open(self, listing: RoundListing) -> bool:
        """Returns whether `accepted` has found all agreements listed void, so that another one is to be put."""
        return self._attempt not in listing.agreements

    def propose(self) -> bool:
        """Closes the round, if it is time and this node's turn; returns whether there is an agreement now.

        Raises:
            StateBehindError: most of the round before hold another state than this node.
        """
        settings, facts = self._settings, self._facts
        check_common_state([each.put.header for each in self._fetched.read.values()], facts)
        fitting: dict[str, PutContribution] = {}
        for (member, _), each in self._fetched.fitting.items():
            if not settings.is_unwelcome(member):
                fitting.setdefault(member, each.put)
        found = chosen(fitting, facts, settings.rules) if fitting else []
        members = [each.member for each in found]
        gone = self._departures.among(set(facts.members_before) - set(members)) if found else ()
        due_at = proposal_at(found, facts, settings.own_id, settings.rules, self._excluded(), gone) if found else None
        if due_at is None or self._clock.now < due_at or self._waits_for_others(members):
            return False
        agreement = proposed(
            found, facts, self._attempt, settings.rules, has_snapshot=self._is_snapshot_due(), departures=gone
        ).signed(settings.identity)
        key = agreement_key(facts.round_index, self._attempt)
        is_put = settings.place.put_once(key, agreement.wire())
        crash_point("bucket-agreement-put")
        if not is_put:  # Somebody else's is there, which the next listing shows, at once.
            self._refusals[self._attempt] += 1
            if self._refusals[self._attempt] == _UNLISTED_AFTER:
                logger.warning(
                    "round %d cannot be closed: %s takes no agreement, and no listing shows one; remove what is there",
                    *(facts.round_index, f"{settings.place.url}/{key}"),
                )
        return is_put or self._refusals[self._attempt] < _UNLISTED_AFTER

    def _body(self, attempt: int) -> bytes | None:
        return self._settings.place.get(agreement_key(self._facts.round_index, attempt), MAX_AGREEMENT_BYTES)

    def _pass_over(self, attempt: int, proposer: str, why: Exception) -> None:
        self._void[attempt] = proposer
        logger.warning("%s (attempt %d, by %s)", why, attempt, proposer[:12] or "nobody")

    def _excluded(self, before_attempt: int = MOST_ATTEMPTS) -> set[str]:
        """Returns who has proposed void agreements, of the attempts before that one."""
        return {proposer for attempt, proposer in self._void.items() if attempt < before_attempt and proposer}

    def _is_whole(self, agreement: Agreement, attempt: int, put_at: float, listing: RoundListing) -> bool:
        """Whether an agreement counts; False: not all it lists is there yet. Raises RefusedError if it is void."""
        rules, facts, fetched = self._settings.rules, self._facts, self._fetched
        check_outline(agreement, facts, attempt, rules)
        wanted = {(each.member, each.payload_sha256) for each in agreement.members}
        listed = {id_of(each): each for each in listing.contributions}
        excluded = self._excluded(attempt)
        there = [listed[key] for key in sorted(wanted & listed.keys())]
        not_there = [_Absent(member, facts.before_put_at) for member, _ in sorted(wanted - listed.keys())]
        check_times(agreement, [*there, *not_there], facts, put_at, rules, excluded)
        if not not_there:
            fetched.fetch(there)
        bad = wanted & fetched.rejected
        if bad:
            raise RefusedError("agreement", f"it lists what {min(bad)[0][:12]} did not properly contribute")
        missing = wanted - fetched.read.keys()
        if missing:
            self._check_may_come(missing, attempt, agreement)
            return False
        found = {member: fetched.read[member, sha256].put for member, sha256 in wanted}
        check_members(agreement, found, facts, put_at, rules, excluded)
        if agreement.state_digest != facts.state_digest or agreement.form != facts.form:
            self._check_state(agreement)
            raise StateBehindError(
                f"round {facts.round_index}: {len(agreement.members)} others hold the state "
                f"{agreement.state_digest[:12]}, this node {facts.state_digest[:12]}"
            )
        return True

    def _check_state(self, agreement: Agreement) -> None:
        """Raises RefusedError where an agreement from another state than this node's is void."""
        before, state_digest = self._facts.before, self._facts.state_digest
        if before is None or is_majority(set(agreement.keys) & set(before.keys), before.keys):
            return
        vouched = self._history.vouched_state(before)
        if vouched is not None and vouched.state_digest == state_digest != agreement.state_digest:
            raise RefusedError(
                "agreement",
                f"round {agreement.round_index}: an agreement is void: it is from another state than most of the round "
                "before vouch for",
            )

    def _is_over(self, agreement: Agreement) -> bool:
        """Whether a later round follows an agreement, and most members went by it."""
        later = self._history.attempts(agreement.round_index + 1)
        if all(each.follows != agreement.digest for each in later):
            return False
        newest = self._history.newest()
        return (
            newest is not None
            and newest.round_index > agreement.round_index
            and self._history.accepted(agreement.round_index) == agreement
        )

    def _check_may_come(self, missing: Collection[ContributionId], attempt: int, agreement: Agreement) -> None:
        """Raises, as `_is_whole`, where what an agreement lists cannot come any more."""
        round_index = self._facts.round_index
        if self._is_over(agreement):
            raise StateBehindError(
                f"round {round_index} is over, and {len(missing)} contributions to it were removed; this node was away "
                "for too long, and needs the others' state"
            )
        if time.monotonic() - self._seen_since_s[attempt] > _ABSENT_AFTER_S:
            raise RefusedError("agreement", f"round {round_index}: an agreement is void: it lists what is not there")


def check_common_state(headers: Collection[ContributionHeader], facts: RoundFacts) -> None:
    """Raises StateBehindError where most of the round before hold another state than this node.

    Whoever has contributed from both counts as holding this node's.
    """
    if facts.before is None:
        return
    before = facts.before.keys
    others = {each.member for each in headers if each.member in before and each.state_digest != facts.state_digest}
    alike = {each.member for each in headers if facts.fits(each)}
    if 2 * len(others - alike) > len(before):
        raise StateBehindError(
            f"round {facts.round_index}: {len(others)} of {len(before)} members hold another state than this node"
        )
