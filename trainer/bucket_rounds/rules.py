"""When a round in a bucket may close, who closes it, and which agreement counts: pure functions that all members share.

An agreement is judged by what does not change after it was put: its bytes, those of the contributions it names, the
agreement before it, and the times at which the store says they were put. So members that look at different moments
judge alike, and of the agreements for one round (attempt 0, and one more for each that is void) one counts.

    at once          everybody of the round before is in it or has left, or ``quorum`` members are
    gather_timeout   after the first contribution in it, if most of the round before are in it, or there was none before
    few_members      so long after it, whoever is there: the others are gone; and after the agreement before

Each member of the round before comes at its place in an order that the round's number decides, ``propose_after`` apart.
So a member that does not close the round, or leaves others out, can do so in the rounds in which it comes first, and
never without most of the round before; what it leaves out is in the next round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from trainer.aggregation import Weighing, cap_weights, common_progress, contribution_weight
from trainer.bucket_rounds.documents import AgreedMember, Agreement, Claims, ContributionHeader, Departure
from trainer.collective.planning import coordinator_order, is_majority
from trainer.errors import RefusedError

CLOCK_SLACK_S: Final = 2.0
"""By which the times of a store may be wrong among each other: S3 tells whole seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """What all members of a run must have alike, for they judge by it."""

    run_id: str
    members: tuple[str, ...] = ()  # Who may take part; empty: whoever can write.
    min_members: int = 1
    max_members: int = 48
    quorum: int = 0
    gather_timeout_s: float = 60.0
    few_members_after_s: float = 600.0
    propose_after_s: float = 10.0
    max_weight_ratio: float = 3.0
    weighing: Weighing = "root"


class Dated(Protocol):
    """A contribution of a member, and when it was put, Unix time by the store's clock."""

    @property
    def member(self) -> str:
        """Who brought it."""

    @property
    def put_at(self) -> float:
        """When it was put."""


@dataclass(frozen=True, slots=True)
class PutContribution:
    """A contribution whose header, signature and payload were verified."""

    header: ContributionHeader
    put_at: float  # Unix time by the store's clock.

    @property
    def member(self) -> str:
        """Who brought it."""
        return self.header.member


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """What the members of a round begin with."""

    round_index: int
    state_digest: str
    form: str
    num_values: int
    before: Agreement | None  # Of the round before; None: this is the first one in the bucket.
    before_put_at: float = 0.0
    """When that was put, Unix time by the store's clock. Nobody can have begun the round sooner, so contributions that
    were put before, which are from no state of the run, count as put then."""

    @property
    def follows(self) -> str:
        """Digest of the agreement before."""
        return "" if self.before is None else self.before.digest

    @property
    def members_before(self) -> tuple[str, ...]:
        """The keys of whoever was in the round before, sorted; empty: there was none."""
        return () if self.before is None else self.before.keys

    def expected(self, departures: Sequence[Departure]) -> list[str]:
        """Returns who was in the round before and has not left since, sorted."""
        gone = {each.member for each in departures}
        return [member for member in self.members_before if member not in gone]

    def fits(self, header: ContributionHeader) -> bool:
        """Whether a contribution is to this round, from this state."""
        return (header.round_index, header.state_digest, header.form, header.num_values) == (
            self.round_index,
            self.state_digest,
            self.form,
            self.num_values,
        )


def closing_after_s(members: Collection[str], expected: Collection[str], rules: RoundRules) -> float:
    """Returns how long after the first of these members' contributions a round with them may close.

    ``expected`` are the members of the round before, without those that have left.
    """
    if rules.quorum and len(members) >= rules.quorum:
        return 0.0
    there = set(members) & set(expected)
    if expected and len(there) == len(set(expected)):
        return 0.0
    if not expected or is_majority(there, sorted(expected)):
        return rules.gather_timeout_s
    return max(rules.gather_timeout_s, rules.few_members_after_s)


def place_in_order(
    rules: RoundRules, round_index: int, members: Collection[str], excluded: Collection[str]
) -> list[str]:
    """Returns who may close a round, in order; ``excluded`` have proposed void agreements for it."""
    return coordinator_order(rules.run_id, round_index, set(members) - set(excluded))


def proposal_at(
    found: Sequence[Dated],
    facts: RoundFacts,
    own: str,
    rules: RoundRules,
    excluded: Collection[str],
    departures: Sequence[Departure] = (),
) -> float | None:
    """Returns from when on (by the store's clock) a member may close the round with these; None: it may not at all.

    Whoever was in the round before comes alone, where any of those is there: a new key closes no round.
    """
    members = [each.member for each in found]
    there = set(members) - set(excluded)
    order = place_in_order(rules, facts.round_index, there & set(facts.members_before) or there, ())
    if len(members) < max(1, rules.min_members) or own not in order:
        return None
    first_at = max(facts.before_put_at, min(each.put_at for each in found))
    waits_s = closing_after_s(members, facts.expected(departures), rules)
    return first_at + waits_s + order.index(own) * rules.propose_after_s


def chosen(found: Mapping[str, PutContribution], facts: RoundFacts, rules: RoundRules) -> list[PutContribution]:
    """Returns the contributions that go into a round, sorted by member.

    Of more than `max_members`, those of the round before come first, and others in the round's order.
    """
    fitting = {member: each for member, each in found.items() if facts.fits(each.header)}
    order = coordinator_order(rules.run_id, facts.round_index, fitting)
    kept = sorted(order, key=lambda member: member not in facts.members_before)[: rules.max_members]
    return [fitting[member] for member in sorted(kept)]


def weights_of(claims: Sequence[Claims], rules: RoundRules) -> list[float]:
    """Returns what members weigh, capped; the same bits everywhere."""
    claimed = [contribution_weight(each.num_batches, each.age_s, rules.weighing) for each in claims]
    return cap_weights(claimed, rules.max_weight_ratio)


def progress_of(agreement: Agreement) -> float:
    """Returns the share of the round's planned work that its members did."""
    return common_progress(
        [each.claims.progress for each in agreement.members], [each.weight for each in agreement.members]
    )


def proposed(
    found: Sequence[PutContribution],
    facts: RoundFacts,
    attempt: int,
    rules: RoundRules,
    *,
    has_snapshot: bool,
    departures: Sequence[Departure] = (),
) -> Agreement:
    """Returns the agreement on these contributions (`chosen`), to be signed by whoever proposes it."""
    weights = weights_of([each.header.claims for each in found], rules)
    return Agreement(
        run_id=rules.run_id,
        member=found[0].member,
        round_index=facts.round_index,
        attempt=attempt,
        follows=facts.follows,
        state_digest=facts.state_digest,
        form=facts.form,
        num_values=facts.num_values,
        members=tuple(
            AgreedMember(
                member=each.member,
                payload_sha256=each.header.payload_sha256,
                claims=each.header.claims,
                weight=weight,
            )
            for each, weight in zip(found, weights, strict=True)
        ),
        has_snapshot=has_snapshot,
        departures=tuple(departures),
    )


def check_outline(agreement: Agreement, facts: RoundFacts, attempt: int, rules: RoundRules) -> None:
    """Checks what an agreement says by itself; raises RefusedError (``agreement``) for one that is void for all.

    Whether it is about this member's state is not asked here: see `trainer.errors.StateBehindError`.
    """
    keys = list(agreement.keys)
    if (agreement.round_index, agreement.attempt) != (facts.round_index, attempt):
        raise _void(facts, f"it is for round {agreement.round_index}, attempt {agreement.attempt}")
    if agreement.follows != facts.follows:
        raise _void(facts, "it does not follow the agreement of the round before")
    if keys != sorted(set(keys)) or agreement.member not in keys:
        raise _void(facts, "its members are not a sorted list with its proposer in it")
    if rules.members and not set(keys) <= set(rules.members):
        raise _void(facts, "it lists somebody whom the run does not name (bucket.members)")
    if not max(1, rules.min_members) <= len(keys) <= rules.max_members:
        raise _void(facts, f"it has {len(keys)} members, not {rules.min_members} to {rules.max_members}")
    expected = weights_of([each.claims for each in agreement.members], rules)
    if [each.weight for each in agreement.members] != expected:
        raise _void(facts, "its weights do not follow from what the members claim")
    _check_departures(agreement, facts, rules)


def _check_departures(agreement: Agreement, facts: RoundFacts, rules: RoundRules) -> None:
    gone = [each.member for each in agreement.departures]
    if gone != sorted(set(gone) - set(agreement.keys)):
        raise _void(facts, "its departures are not a sorted list of others than its members")
    for each in agreement.departures:
        if (each.run_id, each.round_index) != (rules.run_id, facts.round_index) or not each.is_signed():
            raise _void(facts, f"that {each.member[:12]} has left is not its own word for this round")


def check_members(
    agreement: Agreement,
    found: Mapping[str, PutContribution],
    facts: RoundFacts,
    put_at: float,
    rules: RoundRules,
    excluded: Collection[str],
) -> None:
    """Checks an agreement against the contributions it names, which are all there; raises RefusedError as above."""
    for each in agreement.members:
        header = found[each.member].header
        claimed = (header.payload_sha256, header.claims, header.round_index, header.state_digest)
        if claimed != (each.payload_sha256, each.claims, agreement.round_index, agreement.state_digest):
            raise _void(facts, f"what it says of {each.member[:12]} is not what that member signed")
        if (header.form, header.num_values) != (agreement.form, agreement.num_values):
            raise _void(facts, f"the contribution of {each.member[:12]} is encoded in another form")
    check_times(agreement, [found[key] for key in agreement.keys], facts, put_at, rules, excluded)


def check_times(
    agreement: Agreement,
    listed: Sequence[Dated],
    facts: RoundFacts,
    put_at: float,
    rules: RoundRules,
    excluded: Collection[str],
) -> None:
    """Checks when an agreement was put, and by whom; needs nothing of contributions but their names and times.

    So an agreement that comes too early costs nobody a read of what it lists. Raises RefusedError as above.
    """
    for each in listed:
        if each.put_at > put_at + CLOCK_SLACK_S:
            raise _void(facts, f"the contribution of {each.member[:12]} came after it")
    earliest = proposal_at(listed, facts, agreement.member, rules, excluded, agreement.departures)
    if earliest is None:
        raise _void(facts, f"{agreement.member[:12]} may not propose it")
    if put_at < earliest - CLOCK_SLACK_S:
        raise _void(facts, f"{agreement.member[:12]} closed the round {earliest - put_at:.0f} s too early")


def _void(facts: RoundFacts, why: str) -> RefusedError:
    return RefusedError("agreement", f"round {facts.round_index}: an agreement is void: {why}")
