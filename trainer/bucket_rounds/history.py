"""What a run's agreements say of its past: the one that counted for a round, and the newest that may be believed.

Whoever can write to the bucket can put agreements behind the newest one, or beside old ones. So a round counts by what
those say who were in the run before it: an agreement is *carried* where most members of the one before have signed
records that go by it, or by one that follows it.

    carried by most members of the round before             it counts
    most of them are not in it                              it is judged by contributions and times, as a round does
    neither, and nothing of these rounds is kept any more   the one counts that was put first

Records and contributions are removed from the beginning of a run on, so behind a round that is carried nothing counts
that is not. Records of rounds with several agreements are kept for good, and contributions to rounds that went on
without most of those before (`kept_evidence`). The trade-off: a newcomer takes the newest round for over some seconds
later than its members do, when their records are there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

from trainer.bucket_rounds.documents import (
    MAX_AGREEMENT_BYTES,
    MAX_HEADER_BYTES,
    MAX_RECORD_BYTES,
    Agreement,
    ContributionHeader,
    StateRecord,
    split_contribution,
)
from trainer.bucket_rounds.object_names import agreement_key, contribution_key, state_key
from trainer.bucket_rounds.place import ListedContribution, Place, RoundListing
from trainer.bucket_rounds.rules import (
    CLOCK_SLACK_S,
    PutContribution,
    RoundFacts,
    RoundRules,
    check_members,
    check_outline,
    check_times,
)
from trainer.collective.planning import is_majority
from trainer.errors import MalformedAnswerError, RefusedError
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.token_buckets import remember

Refusal: TypeAlias = Callable[[ContributionHeader | StateRecord, float], str]
"""Why what a member has put does not count, by the document and when it was put (Unix time); empty: it does."""

_MOST_REMEMBERED: Final = 1 << 14
_MOST_BYTES_A_VALUE: Final = 16
"""Of the model of the round before: fp32, of a vocabulary that has made it four times as large."""
MOST_ATTEMPTS: Final = 1000
"""Agreements for one round that are read: as many as a round's own members look through, or they and newcomers would go
by different ones where somebody has put many that are void."""


def nobody_refused(_document: ContributionHeader | StateRecord, _put_at: float) -> str:
    """Whoever can write may take part."""
    return ""


def refusal_by(members: Sequence[str], admission: Admission | None) -> Refusal:
    """Returns what says why a contribution, or a state record, does not count, by the time at which it was put.

    Revocations have no part in it: members hear of them at different times, and have to judge alike.
    """
    allowed = frozenset(members)

    def refusal(header: ContributionHeader | StateRecord, put_at: float) -> str:
        if allowed and header.member not in allowed:
            return "the run does not name this node (bucket.members)"
        if admission is None or header.member in admission.authorities:
            return ""
        try:
            credential = header.read_credential()
            if credential is None or credential.peer_id != header.member or credential.role != "node":
                return "it has no credential of the run's authority for a node"
            credential.verify(admission.run_name, admission.authorities, put_at, ())
        except RefusedError as error:
            return str(error)
        return ""

    return refusal


class History:
    """The past of one run, as its bucket tells it. Remembers what does not change; methods raise what the store does.

    For one thread at a time, or several whose reads may then be made twice.
    """

    def __init__(self, place: Place, rules: RoundRules, refusal: Refusal = nobody_refused) -> None:
        self._place = place
        self._rules = rules
        self._refusal = refusal
        self._agreements: OrderedDict[tuple[int, int], Agreement | None] = OrderedDict()  # None: it is malformed.
        self._records: OrderedDict[tuple[int, str], StateRecord] = OrderedDict()
        self._headers: OrderedDict[tuple[int, str, str], ContributionHeader] = OrderedDict()

    def newest(self) -> Agreement | None:
        """Returns the newest agreement that counts (see above); None: the bucket has none.

        Rounds beyond a gap were not made by this run.
        """
        rounds = self._place.rounds()
        chain, num_certain = self._chain(rounds, max(rounds, default=-1))
        return chain[max(1, num_certain) - 1] if chain else None

    def accepted(self, round_index: int) -> Agreement | None:
        """Returns the agreement that counted for a round; None: the bucket has none.

        Of several for a round of which nobody says yet by which it went, one that the next round follows, or one whose
        contributions are all there.
        """
        found = self.attempts(round_index)
        if len(found) < 2:
            return found[0] if found else None
        rounds = self._place.rounds()
        chosen = {each.round_index: each for each in self._chain(rounds, round_index)[0]}
        if round_index in chosen:
            return chosen[round_index]
        following = {each.follows for each in self.attempts(round_index + 1)}
        followed = [each for each in found if each.digest in following]
        brought = {(each.member, each.payload_sha256) for each in rounds[round_index].contributions}
        whole = [each for each in found if all((it.member, it.payload_sha256) in brought for it in each.members)]
        return (followed or whole or found)[0]

    def attempts(self, round_index: int, listing: RoundListing | None = None) -> list[Agreement]:
        """Returns the agreements for a round that are well formed, by attempt."""
        listed = (listing or self._place.round(round_index)).agreements
        found = (self._agreement(round_index, attempt, listed[attempt].size_bytes) for attempt in sorted(listed))
        return [each for each, _ in zip(found, range(MOST_ATTEMPTS), strict=False) if each is not None]

    def standing(self, round_index: int) -> Agreement | None:
        """Returns the agreement that the members of the newest round go by, as far as names and times say; None: none.

        No contribution is read, so one that lists what is none is taken for good; others may still come.
        """
        before = self.accepted(round_index - 1) if round_index else None
        before_put_at = 0.0 if before is None else self.put_at(before)
        listing = self._place.round(round_index)
        excluded: set[str] = set()
        for agreement in self.attempts(round_index, listing):
            facts = _facts_of(agreement, before, before_put_at)
            put_at = listing.agreements[agreement.attempt].put_at
            try:
                check_outline(agreement, facts, agreement.attempt, self._rules)
                check_times(agreement, _listed(agreement, listing), facts, put_at, self._rules, excluded)
            except RefusedError:
                excluded.add(agreement.member)
                continue
            return agreement
        return None

    def put_at(self, agreement: Agreement) -> float:
        """Returns when an agreement was put, Unix time by the store's clock; 0 where it is not there any more."""
        listed = self._place.round(agreement.round_index).agreements.get(agreement.attempt)
        return 0.0 if listed is None else listed.put_at

    def vouched_state(self, agreement: Agreement) -> StateRecord | None:
        """Returns a record of what most members of a round hold after it; None: too few say, or they differ.

        Whoever may not take part (``refusal``) vouches for nothing, so nobody can have his own round's state believed.
        Where the round has a snapshot, they agree about that too.
        """
        said: Counter[tuple[str, str]] = Counter()
        records: dict[tuple[str, str], StateRecord] = {}
        for member in agreement.keys:
            record = self._record(agreement.round_index, member)
            if record is not None and record.agreement == agreement.digest:
                key = (record.state_digest, record.snapshot)
                said[key] += 1
                records[key] = record
        for key, count in said.most_common(1):
            if 2 * count > len(agreement.members):
                return records[key]
        return None

    # -- the chain -----------------------------------------------------------------------------------------------------

    def _chain(self, rounds: Mapping[int, RoundListing], last_round: int) -> tuple[list[Agreement], int]:
        """Returns the agreements that count, from a round of which there is no doubt on, to a round or the newest.

        The second value says how many of them those certainly did of whom enough is kept to say so; 0: none.
        """
        numbers = _unbroken(sorted(number for number, each in rounds.items() if each.agreements))
        begin = _undoubted(rounds, numbers, last_round) if numbers else -1
        began = rounds.get(begin, RoundListing())
        first = max(self.attempts(begin, began), key=lambda it: self._num_own_records(it, began), default=None)
        if first is None:
            return [], 0
        chain = [first]
        is_whole = 2 * self._num_own_records(first, began) > len(first.members) and _is_kept(first, began)
        num_certain = int(is_whole)
        for number in range(begin + 1, min(numbers[-1], last_round) + 1):
            before, listing = chain[-1], rounds[number]
            following = [each for each in self.attempts(number, listing) if each.follows == before.digest]
            carried = self._carried(following, before, rounds)
            chosen = carried or self._judged(before, rounds, number)
            is_certain = chosen is not None
            if chosen is None and not num_certain and following:
                chosen = min(following, key=lambda each: listing.agreements[each.attempt].put_at)
            if chosen is None:
                break
            chain.append(chosen)
            if is_certain and (num_certain or (carried and _is_kept(chosen, listing))):
                num_certain = len(chain)
        return chain, num_certain

    def _num_own_records(self, agreement: Agreement, listing: RoundListing) -> int:
        """Returns how many of an agreement's own members say that they went by it."""
        members = set(agreement.keys) & set(listing.states)
        records = (self._record(agreement.round_index, member) for member in members)
        return sum(record is not None and record.agreement == agreement.digest for record in records)

    def _carried(
        self, following: Sequence[Agreement], before: Agreement, rounds: Mapping[int, RoundListing]
    ) -> Agreement | None:
        """Returns which of these most members of the round before say they went by, themselves or by what follows it.

        One pass over the rounds for all of them, as far as there are names of such records: what somebody has put
        behind the newest round costs each of its objects a read at most.
        """
        first = {each.digest: each for each in following}  # By the digest of an agreement that goes back to it.
        signers: dict[str, set[str]] = {each.digest: set() for each in following}
        number = before.round_index + 1
        last = max((each for each in rounds if set(before.keys) & set(rounds[each].states)), default=-1)
        while first and number in rounds and number <= last:
            for member in sorted(set(before.keys) & set(rounds[number].states)):
                record = self._record(number, member)
                found = None if record is None else first.get(record.agreement)
                if found is not None:
                    signers[found.digest].add(member)
                    if is_majority(signers[found.digest], list(before.keys)):
                        return found
            number += 1
            if number in rounds and number <= last:
                later = self.attempts(number, rounds[number])
                first = {each.digest: first[each.follows] for each in later if each.follows in first}
        return None

    def _judged(self, before: Agreement, rounds: Mapping[int, RoundListing], number: int) -> Agreement | None:
        """Returns the agreement of a round without most of those before, judged as its members had to; None: none."""
        listing, excluded = rounds[number], set[str]()
        before_put_at = rounds[before.round_index].agreements[before.attempt].put_at
        for agreement in self.attempts(number, listing):
            if agreement.follows != before.digest:
                continue
            facts = _facts_of(agreement, before, before_put_at)
            try:
                if is_majority(set(agreement.keys) & set(before.keys), list(before.keys)):
                    raise RefusedError("agreement", "most of those before are in it, and have yet to say so")
                check_outline(agreement, facts, agreement.attempt, self._rules)
                put_at = listing.agreements[agreement.attempt].put_at
                check_times(agreement, _listed(agreement, listing), facts, put_at, self._rules, excluded)
                vouched = self.vouched_state(before)
                if vouched is not None and vouched.state_digest != agreement.state_digest:
                    raise RefusedError("agreement", "it is from another state than most of those before vouch for")
                found = self._contributions(agreement, listing, _MOST_BYTES_A_VALUE * before.num_values)
                check_members(agreement, found, facts, put_at, self._rules, excluded)
            except (RefusedError, MalformedAnswerError):
                excluded.add(agreement.member)
                continue
            return agreement
        return None

    def _contributions(
        self, agreement: Agreement, listing: RoundListing, most_payload_bytes: int
    ) -> dict[str, PutContribution]:
        """Reads what an agreement lists; raises RefusedError, or MalformedAnswerError, where that is not there."""
        found = {}
        for there in _listed(agreement, listing):
            if there.size_bytes > most_payload_bytes + MAX_HEADER_BYTES + 1:
                raise RefusedError("agreement", "it lists what is larger than a contribution")
            header = self._header(agreement.round_index, there)
            if header is None or header.member != there.member or self._refusal(header, there.put_at):
                raise RefusedError("agreement", "it lists what does not count")
            found[there.member] = PutContribution(header, there.put_at)
        return found

    def _header(self, round_index: int, listed: ListedContribution) -> ContributionHeader | None:
        """Returns the header of a contribution, all of which was read and verified once; None: it is not there."""
        place = (round_index, listed.member, listed.payload_sha256)
        if place in self._headers:
            return self._headers[place]
        header = self._place.get_verified(
            contribution_key(*place), listed.size_bytes, lambda body: split_contribution(body, self._rules.run_id)[0]
        )
        if header is not None:
            remember(self._headers, place, header, _MOST_REMEMBERED)
        return header

    # -- documents -----------------------------------------------------------------------------------------------------

    def _agreement(self, round_index: int, attempt: int, size_bytes: int) -> Agreement | None:
        key = (round_index, attempt)
        if key in self._agreements:
            return self._agreements[key]
        body = None
        if size_bytes <= MAX_AGREEMENT_BYTES:
            body = self._place.get(agreement_key(round_index, attempt), MAX_AGREEMENT_BYTES)
        try:
            agreement = Agreement.parse(body or b"", self._rules.run_id)
            facts = _facts_of(agreement, None, 0.0)
            check_outline(agreement.model_copy(update={"follows": ""}), facts, attempt, self._rules)
        except (MalformedAnswerError, RefusedError):
            remember(self._agreements, key, None, _MOST_REMEMBERED)
            return None
        remember(self._agreements, key, agreement, _MOST_REMEMBERED)
        return agreement

    def _record(self, round_index: int, member: str) -> StateRecord | None:
        """Returns what a member says of a round; while it says nothing that counts, that is looked for again."""
        key = (round_index, member)
        if key in self._records:
            return self._records[key]
        found = self._place.get_dated(state_key(round_index, member), MAX_RECORD_BYTES)
        if found is None:
            return None
        body, put_at = found
        try:
            record = StateRecord.parse(body, self._rules.run_id)
        except MalformedAnswerError:
            return None
        if (record.member, record.round_index) != (member, round_index) or self._refusal(record, put_at):
            return None
        remember(self._records, key, record, _MOST_REMEMBERED)
        return record


def kept_evidence(
    history: History, rounds: Mapping[int, RoundListing], numbers: Collection[int]
) -> set[tuple[int, str]]:
    """Returns what is to stay of rounds that are removed, as (round, ``state`` or ``contribution``).

    Of a round with several agreements its records stay, which tell which one counted; of one that went on without most
    of those before also the contributions, which tell that it had waited.
    """
    kept = set()
    for number in numbers:
        if len(rounds.get(number, RoundListing()).agreements) > 1:  # Of slices alone anybody can put a round.
            kept.add((number, "state"))
        own, before = history.accepted(number), history.accepted(number - 1) if number else None
        if own is not None and before is not None and not is_majority(set(own.keys) & set(before.keys), before.keys):
            kept |= {(number, "state"), (number, "contribution")}
    return kept


def _facts_of(agreement: Agreement, before: Agreement | None, before_put_at: float) -> RoundFacts:
    """Returns what the members of a round began with, by its agreement."""
    said = (agreement.round_index, agreement.state_digest, agreement.form, agreement.num_values)
    return RoundFacts(*said, before, before_put_at)


def _listed(agreement: Agreement, listing: RoundListing) -> list[ListedContribution]:
    """Returns what an agreement lists as it lies in the bucket; raises RefusedError where that is not all there."""
    there = {(each.member, each.payload_sha256): each for each in listing.contributions}
    found = [there.get((each.member, each.payload_sha256)) for each in agreement.members]
    if None in found:
        raise RefusedError("agreement", "it lists what is not there")
    return [each for each in found if each is not None]


def _is_kept(agreement: Agreement, listing: RoundListing) -> bool:
    """Whether what an agreement lists is still there as it was then, so that nothing of its round was removed."""
    try:
        newest_at = max(each.put_at for each in _listed(agreement, listing))
    except RefusedError:
        return False
    return newest_at <= listing.agreements[agreement.attempt].put_at + CLOCK_SLACK_S


def _undoubted(rounds: Mapping[int, RoundListing], numbers: Sequence[int], last_round: int) -> int:
    """Returns the newest round with a single agreement that is older than all of which contributions are kept.

    It was there before its contributions were removed, so whoever put another beside it came later.
    """
    oldest = min([*(number for number in numbers if rounds[number].contributions), last_round + 1])
    single = [number for number in numbers if number < oldest and len(rounds[number].agreements) == 1]
    return single[-1] if single else numbers[0]


def _unbroken(rounds: Sequence[int]) -> Sequence[int]:
    """Returns the first run of consecutive numbers."""
    for place, (earlier, later) in enumerate(pairwise(rounds), 1):
        if later != earlier + 1:
            return rounds[:place]
    return rounds
