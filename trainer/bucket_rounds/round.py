"""One node's way through one round in a bucket.

    look ─▶ an agreement that counts? ─▶ fetch what it lists ─▶ aggregate ─▶ result
      ▲            │ no
      │            ├─ put the own contribution, once: one that an earlier life of this node put is taken as its own
      └── wait ◀───┴─ fetch what is new, verify it, and close the round where this node may

Whatever fails at the store is tried again until the round's deadline. What is in the bucket is judged again from
nothing by whoever comes later, so a node that is killed anywhere finds its place when it is started again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from genesis.errors import GenesisError
from genesis.populate.crashpoint import crash_point
from trainer.aggregation import RuleConfig
from trainer.bucket_rounds.config import BucketConfig
from trainer.bucket_rounds.documents import (
    MAX_AGREEMENT_BYTES,
    MAX_HEADER_BYTES,
    Agreement,
    Claims,
    ContributionHeader,
    contribution_body,
    credential_field,
    payload_digest,
    split_contribution,
)
from trainer.bucket_rounds.forms import Aggregated, Form, Payload
from trainer.bucket_rounds.history import History, Refusal, nobody_refused
from trainer.bucket_rounds.place import (
    ListedContribution,
    Place,
    RoundListing,
    agreement_key,
    contribution_key,
    slice_key,
)
from trainer.bucket_rounds.reducers import SlicedForm, SliceReduction
from trainer.bucket_rounds.rules import (
    CLOCK_SLACK_S,
    PutContribution,
    RoundFacts,
    RoundRules,
    check_members,
    check_outline,
    check_times,
    chosen,
    closing_after_s,
    progress_of,
    proposal_at,
    proposed,
)
from trainer.collective.planning import coordinator_order
from trainer.errors import (
    CodecError,
    MalformedAnswerError,
    RefusedError,
    RoundFailedError,
    RoundLeftError,
    StateBehindError,
)
from trainer.network.rpc import Identity
from trainer.network.rpc.credential import Credential
from trainer.outer.engine.collective import Contribution, RoundReport, RoundResult

logger = logging.getLogger(__name__)

BUCKET_CRASH_POINTS: Final = (
    "bucket-contribution-made",
    "bucket-contribution-put",
    "bucket-agreement-put",
    "bucket-round-fetched",
    "bucket-round-reduced",
    "bucket-state-put",
    "bucket-snapshot-part-put",
    "bucket-snapshot-put",
)
"""Where a test can have a node killed (`genesis.populate.crashpoint`), in the order of a round."""
_FETCHING_THREADS: Final = 4
_MOST_EACH: Final = 4  # Contributions of one member to one round that are looked at.
_MOST_OF_NEW: Final = 2  # Of a member that was not in the round before.
_ABSENT_AFTER_S: Final = 15.0
"""So long after an agreement was seen, what it lists and is not there counts as never put."""
_LEAVE_AFTER_S: Final = 10.0
_TELL_AFTER_S: Final = 5.0  # For whom a round waits, in the log, and then again each minute.
_TELL_EVERY_S: Final = 60.0
_NOBODY_AFTER: Final = 4  # Times `gather_timeout_s`, for a node that has nothing to contribute.


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """What all rounds of a node have in common."""

    identity: Identity
    place: Place
    rules: RoundRules
    rule: RuleConfig
    config: BucketConfig
    form_of: Callable[[int], Form]  # By the length of a vector.
    round_timeout_s: float
    invite_after_s: float
    refusal: Refusal = nobody_refused
    """Why a member may not take part, or say what it holds, by the document and when it was put; empty: it may."""
    credential: Callable[[], Credential | None] = lambda: None  # This node's, where the run has an authority.
    is_unwelcome: Callable[[str], bool] = lambda _member: False
    """Whether this node leaves a member out of rounds that it closes; it takes part in those that others close."""
    vocabulary_rows: Callable[[], int] = lambda: 0
    carried_share: float = 1.0
    """Of work that a round did not take, which goes into the next; the rest stays in the parameters by the merge."""
    stopping: Callable[[], bool] = lambda: False
    removes: bool = True
    """Whether this node removes old rounds that it has closed; where the run's authority signs requests, that does."""
    false_reducers: set[str] = field(default_factory=set)
    """Members that have said something false of a slice; grows while the node runs."""

    @property
    def own_id(self) -> str:
        """This node's key."""
        return self.identity.peer_id

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.rules.run_id


class StoreClock:
    """What time it is by the store, never ahead of it: from the times of objects when they were listed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._offset_s = float("-inf")

    def observe(self, newest_at: float) -> None:
        """Notes that an object of that time (Unix; 0: there is none) is there now."""
        if newest_at:
            self._offset_s = max(self._offset_s, newest_at - self._clock())

    @property
    def now(self) -> float:
        """Unix time; minus infinity before the first observation."""
        return self._clock() + self._offset_s


@dataclass(frozen=True, slots=True)
class _Read:
    put: PutContribution
    payload: Payload | None  # None: of another state, so it is in no round of this node's.


class BucketRound:
    """One round of one node; for one thread.

    Where this node closes it, it asks ``is_snapshot_due``, and for whom it waits besides those of the round before
    (``awaited``).
    """

    def __init__(
        self,
        settings: BucketSettings,
        contribution: Contribution,
        before: Agreement | None,
        clock: StoreClock,
        is_snapshot_due: Callable[[], bool] = lambda: False,
        awaited: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._settings = settings
        self._place = settings.place
        self._contribution = contribution
        self._clock = clock
        self._is_snapshot_due = is_snapshot_due
        self._awaited = awaited
        self._form = settings.form_of(contribution.vector.numel())
        self._facts = RoundFacts(
            contribution.round_index, contribution.state_digest, self._form.name, self._form.num_values, before
        )
        self._read: dict[tuple[str, str], _Read] = {}
        self._ignored: set[tuple[str, str]] = set()
        self._void: dict[int, str] = {}  # Attempts that came to nothing, and who proposed them, if anybody did.
        self._attempt = 0
        self._agreed_at = 0.0
        self._own_sha256 = ""  # Of this node's contribution; empty: it has none yet.
        self._own_payload: Payload | None = None
        self._own_slices: Payload | None = None  # Of a round in slices: what the payload has the digests of.
        self._own_header: ContributionHeader | None = None  # Of what this node itself has put in this round.
        self._waited: dict[int, float] = {}  # Since when what an attempt lists has been missing.
        self._began_s = time.monotonic()
        self._tells_after_s = _TELL_AFTER_S
        self._asked_to_stop_s: float | None = None
        self._vector: Tensor | None = None
        self.agreement: Agreement | None = None
        """What the round consists of, once that is known."""

    def run(self) -> RoundResult:
        """Goes through the round; raises RoundFailedError, and StateBehindError where others hold another state."""
        cost_before = self._place.cost
        agreement = self._agreed()
        agreed_s = time.monotonic()
        crash_point("bucket-round-fetched")
        result = self._reduced(agreement)
        crash_point("bucket-round-reduced")
        self.agreement = agreement
        now_s = time.monotonic()
        cost = self._place.cost.since(cost_before)
        report = RoundReport(
            round_index=agreement.round_index,
            members=agreement.keys,
            dropped=(*result.dropped, *self._not_listed(agreement)),
            completeness=result.completeness,
            sent_bytes=cost.sent_bytes,
            received_bytes=cost.received_bytes,
            seconds=now_s - self._began_s,
            rule=result.rule,
            weights=tuple(each.weight for each in agreement.members),
            validation=result.odd,
            findings=result.findings,
            note=result.note,
            phases=(agreed_s - self._began_s, now_s - agreed_s, 0.0),
        )
        logger.info(
            "round %d: %d member%s, closed by %s after %.1f s; %s",
            *(agreement.round_index, len(agreement.members), "s" * (len(agreement.members) != 1)),
            *(agreement.member[:8], agreed_s - self._began_s),
            cost.text(self._place.prices),
        )
        return RoundResult(
            vector=result.vector,
            report=report,
            residual=self._residual(agreement, result),
            progress=progress_of(agreement),
        )

    # -- until the round is agreed -------------------------------------------------------------------------------------

    def _agreed(self) -> Agreement:
        """Returns the agreement that counts, all of whose contributions were read."""
        while True:
            self._check_time()
            try:
                listing = self._place.round(self._facts.round_index)
                self._clock.observe(listing.newest_at)
                agreement = self._resolved(listing)
                if agreement is not None:
                    return agreement
                if self._attempt not in listing.agreements and self._goes_on(listing):
                    continue
                self._tell()
            except GenesisError as error:
                logger.warning("round %d: %s; trying again", self._facts.round_index, error)
            time.sleep(self._settings.config.poll_interval_s)

    def _tell(self) -> None:
        """Says now and then for whom the round waits, since training stands still meanwhile."""
        waited_s = time.monotonic() - self._began_s
        if waited_s < self._tells_after_s:
            return
        self._tells_after_s = waited_s + _TELL_EVERY_S
        there = {member for (member, _), read in self._read.items() if read.payload is not None}
        before = () if self._facts.before is None else self._facts.before.keys
        missing = sorted(member[:8] for member in {*before, *self._awaited()} - there)
        logger.info(
            "round %d waits for others since %.0f s: the work of %d is there, %s",
            *(self._facts.round_index, waited_s, len(there)),
            f"that of {', '.join(missing[:8])} is not" if missing else "nobody else is known to come",
        )

    def _goes_on(self, listing: RoundListing) -> bool:
        """Contributes, fetches, closes the round; returns whether there is something new to look at now."""
        self._fetch([each for each in self._wanted(listing) if each.member == self._settings.own_id])
        if self._contribute():
            return True
        self._fetch(self._wanted(listing))
        self._check_common_state()
        return self._propose()

    def _resolved(self, listing: RoundListing) -> Agreement | None:
        """Returns the first agreement that is not void; None: there is none yet, or it cannot be judged yet."""
        for attempt in range(1000):
            self._attempt = attempt
            listed = listing.agreements.get(attempt)
            if listed is None:
                return None
            if attempt in self._void:
                continue
            body = b"" if listed.size_bytes > MAX_AGREEMENT_BYTES else self._agreement_body(attempt)
            if body is None:
                return None
            try:
                agreement = Agreement.parse(body, self._settings.run_id)
            except MalformedAnswerError as error:
                self._pass_over(attempt, "", error)
                continue
            try:
                if self._is_valid(agreement, attempt, listed.put_at, listing):
                    self._agreed_at = listed.put_at
                    return agreement
            except RefusedError as error:
                self._pass_over(attempt, agreement.member, error)
                continue
            return None
        raise RoundFailedError(f"round {self._facts.round_index}: a thousand agreements, all of them void")

    def _agreement_body(self, attempt: int) -> bytes | None:
        return self._place.get(agreement_key(self._facts.round_index, attempt), MAX_AGREEMENT_BYTES)

    def _pass_over(self, attempt: int, proposer: str, why: Exception) -> None:
        self._void[attempt] = proposer
        logger.warning("%s (attempt %d, by %s)", why, attempt, proposer[:12] or "nobody")

    def _is_valid(self, agreement: Agreement, attempt: int, put_at: float, listing: RoundListing) -> bool:
        """Whether an agreement counts; False: not all it lists is there yet. Raises RefusedError if it is void."""
        settings, facts = self._settings, self._facts
        check_outline(agreement, facts, attempt, settings.rules)
        wanted = {(each.member, each.payload_sha256) for each in agreement.members}
        listed = {(each.member, each.payload_sha256): each for each in listing.contributions}
        excluded = {proposer for number, proposer in self._void.items() if number < attempt and proposer}
        if wanted <= listed.keys():
            there = [listed[each.member, each.payload_sha256] for each in agreement.members]
            check_times(agreement, there, facts, put_at, settings.rules, excluded)
            self._fetch(there)
        bad = wanted & self._ignored
        if bad:
            raise RefusedError("agreement", f"it lists what {sorted(bad)[0][0][:12]} did not properly contribute")
        missing = wanted - self._read.keys()
        if missing:
            return self._waits_for(missing, attempt, agreement)
        found = {member: self._read[member, sha256].put for member, sha256 in wanted}
        check_members(agreement, found, facts, put_at, settings.rules, excluded)
        if agreement.state_digest != facts.state_digest or agreement.form != facts.form:
            raise StateBehindError(
                f"round {facts.round_index}: {len(agreement.members)} others hold the state "
                f"{agreement.state_digest[:12]}, this node {facts.state_digest[:12]}"
            )
        return True

    def _waits_for(self, missing: set[tuple[str, str]], attempt: int, agreement: Agreement) -> bool:
        """Returns False while what an agreement lists may still come; raises as `_is_valid`."""
        round_index = self._facts.round_index
        later = History(self._place, self._settings.rules).attempts(round_index + 1)
        if any(each.follows == agreement.digest for each in later):
            raise StateBehindError(
                f"round {round_index} is over, and {len(missing)} contributions to it were removed; this node was away "
                "for too long, and needs the others' state"
            )
        since_s = self._waited.setdefault(attempt, time.monotonic())
        if time.monotonic() - since_s > _ABSENT_AFTER_S:
            raise RefusedError("agreement", f"round {round_index}: an agreement is void: it lists what is not there")
        return False

    def _contribute(self) -> bool:
        """Puts this node's contribution, unless it is there; returns whether it did."""
        contribution, settings = self._contribution, self._settings
        if self._own_sha256 or not contribution.num_batches:
            return False
        own = [key for key, read in self._read.items() if key[0] == settings.own_id and read.payload is not None]
        if own:
            self._own_sha256 = min(own)[1]
            logger.info("round %d: this node has contributed before; that stands", self._facts.round_index)
            return False
        contribution.wait_until_filled()
        vector = self._whole_vector()
        try:
            payload = self._form.encode(vector)
        except CodecError as error:
            raise RoundFailedError(f"round {self._facts.round_index}: {error}") from error
        payload = self._in_slices(payload)
        header = self._header(payload)
        crash_point("bucket-contribution-made")
        key = contribution_key(self._facts.round_index, settings.own_id, header.payload_sha256)
        if self._place.put_once(key, contribution_body(header, payload)):
            self._own_header = header
        crash_point("bucket-contribution-put")
        self._own_payload, self._own_sha256 = payload, header.payload_sha256
        return True

    def _in_slices(self, payload: Payload) -> Payload:
        """Puts the slices of an encoded vector, where slices have reducers, and returns what stands for them."""
        form, round_index = self._form, self._facts.round_index
        if not isinstance(form, SlicedForm):
            return payload
        for number, piece in enumerate(form.pieces(payload)):
            key = slice_key(round_index, self._settings.own_id, number, payload_digest(piece))
            self._place.put_once(key, piece)
        self._own_slices = payload
        return form.digests_of(payload)

    def _header(self, payload: Payload) -> ContributionHeader:
        contribution, settings = self._contribution, self._settings
        return ContributionHeader(
            run_id=settings.run_id,
            member=settings.own_id,
            round_index=self._facts.round_index,
            state_digest=self._facts.state_digest,
            form=self._form.name,
            num_values=self._form.num_values,
            payload_bytes=len(payload),
            payload_sha256=payload_digest(payload),
            claims=Claims(
                num_batches=contribution.num_batches,
                age_s=round(contribution.age_s, 3),
                progress=contribution.progress,
                vocabulary_rows=settings.vocabulary_rows(),
            ),
            credential=credential_field(settings.credential()),
        ).signed(settings.identity)

    def _whole_vector(self) -> Tensor:
        """This node's work with what earlier rounds left of it, [P]; made once, not to be changed before the end."""
        if self._vector is None:
            contribution = self._contribution
            vector, residual = contribution.vector, contribution.residual
            self._vector = vector if residual is None else vector + residual
        return self._vector

    def _wanted(self, listing: RoundListing) -> list[ListedContribution]:
        """Contributions that are new and may be read, those of the round before first.

        Of keys that were not in the round before, which cost whoever makes them nothing, as many payloads are read in
        all as a round may have members, at most two of one key; of more, in the round's own order.
        """
        config, facts = self._settings.config, self._facts
        known = {*(() if facts.before is None else facts.before.keys), *config.members, self._settings.own_id}
        numbers = Counter(member for member, _ in (*self._read, *self._ignored))
        num_new = sum(number for member, number in numbers.items() if member not in known)
        order = coordinator_order(self._settings.run_id, facts.round_index, {it.member for it in listing.contributions})
        rank = {member: place for place, member in enumerate(order)}
        wanted = []
        for each in sorted(listing.contributions, key=lambda it: it.put_at):
            is_read = (each.member, each.payload_sha256) in self._read
            if is_read or (each.member, each.payload_sha256) in self._ignored:
                continue
            if numbers[each.member] < (_MOST_EACH if each.member in known else _MOST_OF_NEW):
                wanted.append((each.member not in known, numbers[each.member], rank[each.member], each))
                numbers[each.member] += 1
        wanted.sort(key=lambda it: it[:3])
        room = max(0, config.max_members - num_new)
        old = [each for is_new, _, _, each in wanted if not is_new]
        return old + [each for is_new, _, _, each in wanted if is_new][:room]

    def _fetch(self, listed: Sequence[ListedContribution]) -> None:
        """Reads and verifies contributions; raises what the store does."""
        new = [each for each in listed if (each.member, each.payload_sha256) not in self._read]
        new = [each for each in new if (each.member, each.payload_sha256) not in self._ignored]
        if not new:
            return
        with ThreadPoolExecutor(min(_FETCHING_THREADS, len(new)), thread_name_prefix="bucket-fetch") as pool:
            for each, read in zip(new, pool.map(self._read_one, new), strict=True):
                if isinstance(read, _Read):
                    self._read[each.member, each.payload_sha256] = read
                elif read is not None:
                    self._ignored.add((each.member, each.payload_sha256))
                    logger.warning(
                        "round %d: what %s put is ignored: %s", self._facts.round_index, each.member[:12], read
                    )

    def _read_one(self, listed: ListedContribution) -> _Read | Exception | None:
        """Returns a contribution, why it is none, or None where it is not there any more."""
        round_index, own = self._facts.round_index, self._own_header
        if own is not None and (own.member, own.payload_sha256) == (listed.member, listed.payload_sha256):
            why = self._settings.refusal(own, listed.put_at)
            put = PutContribution(own, listed.put_at)
            return RefusedError("member", why) if why else _Read(put, self._own_payload)
        most_bytes = self._form.max_payload_bytes + MAX_HEADER_BYTES + 1
        if listed.size_bytes > most_bytes:
            return MalformedAnswerError(f"expected at most {most_bytes} bytes, found {listed.size_bytes}")

        def verified(body: bytes) -> tuple[ContributionHeader, memoryview]:
            header, payload = split_contribution(body, self._settings.run_id)
            name = (header.round_index, header.member, header.payload_sha256)
            if name != (round_index, listed.member, listed.payload_sha256):
                raise MalformedAnswerError("it is signed for another name than it has")
            return header, payload

        key = contribution_key(round_index, listed.member, listed.payload_sha256)
        try:
            found = self._place.get_verified(key, most_bytes, verified)
        except MalformedAnswerError as error:
            return error
        if found is None:
            return None
        header, payload = found
        why = self._settings.refusal(header, listed.put_at)
        if why:
            return RefusedError("member", why)
        put = PutContribution(header, listed.put_at)
        return _Read(put, payload if self._facts.fits(header) else None)

    def _check_common_state(self) -> None:
        """Raises StateBehindError where most of the round before hold another state than this node."""
        facts = self._facts
        if facts.before is None:
            return
        others = {
            member
            for (member, _), read in self._read.items()
            if member in facts.before.keys and read.put.header.state_digest != facts.state_digest
        }
        alike = {member for (member, _), read in self._read.items() if facts.fits(read.put.header)}
        if 2 * len(others - alike) > len(facts.before.keys):
            raise StateBehindError(
                f"round {facts.round_index}: {len(others)} of {len(facts.before.keys)} members hold another state than "
                "this node"
            )

    def _propose(self) -> bool:
        """Closes the round, if it is time and this node's turn; returns whether there is an agreement now."""
        settings, facts = self._settings, self._facts
        fitting: dict[str, PutContribution] = {}
        for (member, _), read in sorted(self._read.items()):
            if read.payload is not None and not self._settings.is_unwelcome(member):
                fitting.setdefault(member, read.put)
        found = chosen(fitting, facts, settings.rules) if fitting else []
        excluded = {proposer for proposer in self._void.values() if proposer}
        due_at = proposal_at(found, facts, settings.own_id, settings.rules, excluded) if found else None
        if due_at is None or self._clock.now < due_at or self._waits_for_others([each.member for each in found]):
            return False
        agreement = proposed(found, facts, self._attempt, settings.rules, has_snapshot=self._is_snapshot_due()).signed(
            settings.identity
        )
        self._place.put_once(agreement_key(facts.round_index, self._attempt), agreement.wire())
        crash_point("bucket-agreement-put")
        return True

    def _waits_for_others(self, members: Sequence[str]) -> bool:
        """Whether somebody is still to come, and this node has not waited long enough for that.

        Counted from when this node began to wait, whatever lies in the bucket from before a break of the whole run.
        """
        rules = self._settings.rules
        if rules.quorum and len(members) >= rules.quorum:
            return False
        before = () if self._facts.before is None else self._facts.before.keys
        patience_s = max(rules.gather_timeout_s, closing_after_s(members, before, rules))
        if time.monotonic() >= self._began_s + patience_s:
            return False
        missing = {*before, *self._awaited()} - set(members)
        return bool(missing) or not before

    def _check_time(self) -> None:
        settings, round_index = self._settings, self._facts.round_index
        now_s = time.monotonic()
        timeout_s = settings.round_timeout_s
        if not self._contribution.num_batches:
            timeout_s = min(timeout_s, _NOBODY_AFTER * settings.rules.gather_timeout_s)
        if now_s > self._began_s + timeout_s:
            raise RoundFailedError(f"round {round_index}: no agreement within {timeout_s:.0f} s")
        if self._asked_to_stop_s is None and settings.stopping():
            self._asked_to_stop_s = now_s
        if self._asked_to_stop_s is not None and now_s > self._asked_to_stop_s + _LEAVE_AFTER_S:
            raise RoundLeftError("left the round, since this node is to stop")

    # -- after that ----------------------------------------------------------------------------------------------------

    def _reduced(self, agreement: Agreement) -> Aggregated:
        payloads: dict[str, Payload] = {}
        for each in agreement.members:
            payload = self._read[each.member, each.payload_sha256].payload
            if payload is None:
                raise RoundFailedError(f"round {agreement.round_index}: the contribution of {each.member[:12]} is gone")
            payloads[each.member] = payload
        if isinstance(self._form, SlicedForm):
            return self._reduced_in_slices(self._form, agreement, payloads)
        weights = {each.member: each.weight for each in agreement.members}
        return self._form.aggregate(payloads, weights, self._settings.rule, self._contribution.reference)

    def _reduced_in_slices(self, form: SlicedForm, agreement: Agreement, digests: dict[str, Payload]) -> Aggregated:
        settings = self._settings
        while self._clock.now < self._agreed_at + CLOCK_SLACK_S:  # Then all that counts is there.
            self._check_time()
            time.sleep(settings.config.poll_interval_s)
        return SliceReduction(
            self._place,
            settings.identity,
            form,
            agreement,
            digests,
            settings.rule,
            self._contribution.reference,
            false_reducers=settings.false_reducers,
            agreed_at=self._agreed_at,
            wait_s=settings.config.propose_after_s,
            poll_interval_s=settings.config.poll_interval_s,
            check_time=self._check_time,
        ).run()

    def _residual(self, agreement: Agreement, result: Aggregated) -> Tensor | None:
        """What the round has not taken of this node's work, which goes into its next contribution; None: nothing."""
        contribution, settings = self._contribution, self._settings
        if not contribution.num_batches:
            return contribution.residual
        own = next((each for each in agreement.members if each.member == settings.own_id), None)
        if own is None:
            logger.info("round %d went on without this node's work, which goes into the next", agreement.round_index)
            contribution.wait_until_filled()
            # What a residual holds was in no parameter, so all of that stays.
            kept = contribution.vector * settings.carried_share
            return kept if contribution.residual is None else kept.add_(contribution.residual)
        if own.member in dict(result.dropped) and not self._form.keeps_what_was_odd:
            return None
        if self._form.is_lossless and own.payload_sha256 == self._own_sha256 and self._own_payload is not None:
            return None
        contribution.wait_until_filled()
        vector = self._whole_vector()
        payload = self._read[own.member, own.payload_sha256].payload
        if payload is not None and isinstance(self._form, SlicedForm):
            payload = self._own_slices or self._put_before(self._form, payload)
        if payload is None:
            return None
        left = vector.clone() if vector is contribution.vector else vector
        try:
            return self._form.left_out(left, payload)
        except CodecError as error:
            logger.warning("round %d: %s", agreement.round_index, error)
            return None

    def _put_before(self, form: SlicedForm, digests: Payload) -> Payload | None:
        """Returns this node's slices, which an earlier life of it has put; None: they are not to be had any more."""
        round_index, own_id, found = self._facts.round_index, self._settings.own_id, bytearray()
        try:
            for number in range(form.num_slices):
                digest = form.digest_of(digests, number)
                key = slice_key(round_index, own_id, number, digest)
                piece = self._place.get_digested(key, form.of_slice(number).max_payload_bytes, digest)
                if piece is None:
                    return None
                found += piece[0]
        except GenesisError as error:
            logger.warning("round %d: what its slices left out of this node's work: %s", round_index, error)
            return None
        return found

    def _not_listed(self, agreement: Agreement) -> tuple[tuple[str, str], ...]:
        listed = set(agreement.keys)
        late = {member for (member, _), read in self._read.items() if read.payload is not None} - listed
        return tuple((member, "late: not in the agreement") for member in sorted(late))
