"""What a run's agreements say of its past: the one that counted for a round, and the newest of an unbroken chain.

Of several agreements for a round the one counted that most members say to have gone by. Of a round whose records were
removed the chain says it: each agreement names the digest of the one before. A newest one, which none follows yet, is
judged by its outline alone; who takes up its state asks a majority of its members what that is, and of those only who
may take part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from trainer.bucket_rounds.documents import (
    MAX_AGREEMENT_BYTES,
    MAX_RECORD_BYTES,
    Agreement,
    ContributionHeader,
    StateRecord,
)
from trainer.bucket_rounds.place import Place, agreement_key, state_key
from trainer.bucket_rounds.rules import RoundFacts, RoundRules, check_outline
from trainer.errors import MalformedAnswerError, RefusedError

Refusal: TypeAlias = Callable[[ContributionHeader | StateRecord, float], str]
"""Why what a member has put does not count, by the document and when it was put (Unix time); empty: it does."""


def nobody_refused(_document: ContributionHeader | StateRecord, _put_at: float) -> str:
    """Whoever can write may take part."""
    return ""


def agreements_of(place: Place, rules: RoundRules, round_index: int) -> list[Agreement]:
    """Returns the agreements for a round that are well formed, by attempt; raises what the store does."""
    found = []
    for attempt, listed in sorted(place.round(round_index).agreements.items()):
        body = None
        if listed.size_bytes <= MAX_AGREEMENT_BYTES:
            body = place.get(agreement_key(round_index, attempt), MAX_AGREEMENT_BYTES)
        if body is None:
            continue
        try:
            agreement = Agreement.parse(body, rules.run_id)
            facts = RoundFacts(round_index, agreement.state_digest, agreement.form, agreement.num_values, None)
            check_outline(agreement.model_copy(update={"follows": ""}), facts, attempt, rules)
        except (MalformedAnswerError, RefusedError):
            continue
        found.append(agreement)
    return found


def accepted_agreement(
    place: Place, rules: RoundRules, round_index: int, refusal: Refusal = nobody_refused
) -> Agreement | None:
    """Returns the agreement that counted for a round; None: the bucket has none. Raises what the store does.

    Of several that for which the most members vouch; among equals, the one that the next round follows, or one whose
    contributions are all there.
    """
    found = agreements_of(place, rules, round_index)
    if len(found) < 2:
        return found[0] if found else None
    numbers = [_vouched(place, each, refusal)[1] for each in found]
    found = [each for each, number in zip(found, numbers, strict=True) if number == max(numbers)]
    following = {each.follows for each in agreements_of(place, rules, round_index + 1)}
    followed = [each for each in found if each.digest in following]
    brought = {(each.member, each.payload_sha256) for each in place.round(round_index).contributions}
    whole = [each for each in found if all((it.member, it.payload_sha256) in brought for it in each.members)]
    return (followed or whole or found)[0]


def vouched_state(place: Place, agreement: Agreement, refusal: Refusal = nobody_refused) -> StateRecord | None:
    """Returns a record of what most members of a round hold after it; None: too few say, or they differ.

    Whoever may not take part (``refusal``) vouches for nothing, so nobody can have his own round's state believed.

    Where the round has a snapshot, they agree about that too. Raises what the store does.
    """
    return _vouched(place, agreement, refusal)[0]


def _vouched(place: Place, agreement: Agreement, refusal: Refusal) -> tuple[StateRecord | None, int]:
    """Returns `vouched_state`, and how many members say so."""
    said: Counter[tuple[str, str]] = Counter()
    records: dict[tuple[str, str], StateRecord] = {}
    for member in agreement.keys:
        record = _record_of(place, agreement, member, refusal)
        if record is not None:
            key = (record.state_digest, record.snapshot)
            said[key] += 1
            records[key] = record
    for key, count in said.most_common(1):
        if 2 * count > len(agreement.members):
            return records[key], count
    return None, 0


def _record_of(place: Place, agreement: Agreement, member: str, refusal: Refusal) -> StateRecord | None:
    found = place.get_dated(state_key(agreement.round_index, member), MAX_RECORD_BYTES)
    if found is None:
        return None
    body, put_at = found
    try:
        record = StateRecord.parse(body, agreement.run_id)
    except MalformedAnswerError:
        return None
    said = (record.member, record.round_index, record.agreement)
    if said != (member, agreement.round_index, agreement.digest) or refusal(record, put_at):
        return None
    return record


def newest_agreement(place: Place, rules: RoundRules) -> Agreement | None:
    """Returns the last agreement of the chain that begins with the first round there is; None: there is none.

    Rounds beyond a gap were not made by this run. Raises what the store does.
    """
    rounds = place.agreed_rounds()
    if not rounds:
        return None
    return _last_linked(place, rules, _unbroken(rounds))


def _unbroken(rounds: Sequence[int]) -> Sequence[int]:
    """Returns the first run of consecutive numbers."""
    for place, (earlier, later) in enumerate(pairwise(rounds), 1):
        if later != earlier + 1:
            return rounds[:place]
    return rounds


def _last_linked(place: Place, rules: RoundRules, rounds: Sequence[int]) -> Agreement | None:
    """Returns the newest agreement that follows one of the round before; looks back from the end."""
    following: list[Agreement] = []
    for round_index in reversed(rounds):
        found = agreements_of(place, rules, round_index)
        digests = {each.digest for each in found}
        linked = [each for each in following if each.follows in digests]
        if linked:
            return linked[0]
        following = found
    return following[0] if following else None
