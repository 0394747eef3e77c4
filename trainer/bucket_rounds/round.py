"""One node's way through one round in a bucket.

    look ─▶ an agreement that counts? ─▶ fetch what it lists ─▶ aggregate ─▶ result
      ▲            │ no
      │            ├─ put the own contribution, once: one that an earlier life of this node put is taken as its own
      └── wait ◀───┴─ fetch what is new, verify it, and close the round where this node may

`BucketRound` is that loop and what follows it. Its parts know nothing of each other's insides: `own_contribution` puts
this node's work, `fetching` reads what others have put, `proposals` judges and makes agreements, and `waiting` says how
long all of that may last.

Guarantees: whatever fails at the store is tried again until the round's deadline. What is in the bucket is judged again
from nothing by whoever comes later, so a node that is killed anywhere finds its place when it is started again.

The trade-off: one listing of the round for each look, every ``poll_interval_s`` (1 s), in place of any notice: that is
all that waiting costs (at S3 list prices $0.018 an hour), and a member hears of an agreement up to that much later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Final

from genesis.errors import GenesisError
from genesis.populate.crashpoint import crash_point
from trainer.bucket_rounds.departures import Departures
from trainer.bucket_rounds.documents import Agreement
from trainer.bucket_rounds.fetching import FetchedContributions
from trainer.bucket_rounds.forms import Aggregated, Payload
from trainer.bucket_rounds.own_contribution import OwnContribution
from trainer.bucket_rounds.place import Cost, RoundListing
from trainer.bucket_rounds.proposals import AcceptedAgreement, RoundProposals
from trainer.bucket_rounds.reducers import SlicedForm, SliceReduction
from trainer.bucket_rounds.rules import CLOCK_SLACK_S, RoundFacts, progress_of
from trainer.bucket_rounds.settings import BucketSettings, StoreClock
from trainer.bucket_rounds.waiting import RoundWait
from trainer.errors import RoundFailedError
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
_MAX_PAUSE_S: Final = 10.0  # Between looks at a bucket that fails.
_TELL_EVERY_S: Final = 15.0
_LOOKS: Final = 12  # While others wait for this node, however the bucket fails.


class BucketRound:
    """One round of one node; for one thread.

    Where this node closes it, it asks ``is_snapshot_due``, and for whom it waits besides those of the round before
    (``awaited``). ``before_put_at``: when the agreement of the round before was put, by the store's clock. With
    ``ignores_departures`` it waits also for whoever has said to leave.
    """

    def __init__(
        self,
        settings: BucketSettings,
        contribution: Contribution,
        before: Agreement | None,
        clock: StoreClock,
        is_snapshot_due: Callable[[], bool] = lambda: False,
        awaited: Callable[[], Collection[str]] = tuple,
        *,
        before_put_at: float = 0.0,
        ignores_departures: bool = False,
    ) -> None:
        self._settings = settings
        self._contribution = contribution
        self._clock = clock
        self._form = settings.form_of(contribution.vector.numel())
        self._facts = RoundFacts(
            *(contribution.round_index, contribution.state_digest, self._form.name, self._form.num_values),
            *(before, before_put_at),
        )
        self._departures = Departures(settings, contribution.round_index, ignores_all=ignores_departures)
        has_work = contribution.num_batches > 0
        self._wait = RoundWait(settings, self._facts, awaited, self._departures, has_work=has_work)
        self._own = OwnContribution(settings, contribution, self._form)
        self._fetched = FetchedContributions(settings, self._facts, self._form.max_payload_bytes, self._own.copy)
        self._proposals = RoundProposals(
            settings, self._facts, clock, self._fetched, is_snapshot_due, self._wait.waits_for_others, self._departures
        )
        self._tells_from_s = 0.0
        self.agreement: Agreement | None = None
        """What the round consists of, once that is known."""
        self.agreed_at = 0.0
        """When that was put, Unix time by the store's clock."""

    @property
    def has_contributed(self) -> bool:
        """Whether this node's work is in the bucket."""
        return self._own.is_put

    def run(self) -> RoundResult:
        """Goes through the round; raises RoundFailedError, and StateBehindError where others hold another state."""
        cost_before = self._settings.place.cost
        accepted = self._accepted()
        agreement, agreed_s = accepted.agreement, self._wait.waited_s
        crash_point("bucket-round-fetched")
        result = self._reduced(accepted)
        crash_point("bucket-round-reduced")
        self.agreement, self.agreed_at = agreement, accepted.put_at
        cost = self._settings.place.cost.since(cost_before)
        report = self._report(agreement, result, cost, agreed_s)
        logger.info(
            "round %d: %d member%s, closed by %s after %.1f s; %s",
            *(agreement.round_index, len(agreement.members), "s" * (len(agreement.members) != 1)),
            *(agreement.member[:8], agreed_s),
            cost.text(self._settings.place.prices),
        )
        return RoundResult(
            vector=result.vector,
            report=report,
            residual=self._own.residual(agreement, result, self._fetched.read),
            progress=progress_of(agreement),
        )

    # -- until the round is agreed -------------------------------------------------------------------------------------

    def _accepted(self) -> AcceptedAgreement:
        """Returns the agreement that counts, all of whose contributions were read."""
        pause_s = poll_s = self._settings.config.poll_interval_s
        longest_s = max(poll_s, min(_MAX_PAUSE_S, self._settings.rules.gather_timeout_s / _LOOKS))
        while True:
            num_judged = self._fetched.num_judged
            self._wait.check_time()
            try:
                listing = self._settings.place.round(self._facts.round_index)
                self._clock.observe(listing.newest_at)
                self._departures.note(listing)
                accepted = self._proposals.accepted(listing)
                if accepted is not None:
                    return accepted
                if self._proposals.is_open(listing) and self._goes_on(listing):
                    continue
                self._wait.tell({member for member, _ in self._fetched.fitting})
                pause_s = poll_s
            except GenesisError as error:
                has_read = self._fetched.num_judged > num_judged
                pause_s = poll_s if has_read else min(2 * pause_s, longest_s)
                self._tell(error, pause_s)
            self._wait.pause(pause_s)

    def _tell(self, error: GenesisError, pause_s: float) -> None:
        """Logs what a look has failed by; a bucket that stays away is told of now and then."""
        now_s = time.monotonic()
        is_told = now_s >= self._tells_from_s
        if is_told:
            self._tells_from_s = now_s + _TELL_EVERY_S
        level = logging.WARNING if is_told else logging.DEBUG
        logger.log(level, "round %d: %s; trying again in %.1f s", self._facts.round_index, error, pause_s)

    def _goes_on(self, listing: RoundListing) -> bool:
        """Contributes, fetches, closes the round; returns whether there is something new to look at now."""
        fetched, own_id = self._fetched, self._settings.own_id
        fetched.fetch([each for each in fetched.wanted(listing) if each.member == own_id])
        if self._own.put([sha256 for member, sha256 in fetched.fitting if member == own_id]):
            return True
        fetched.fetch(fetched.wanted(listing))
        return self._proposals.propose()

    # -- after that ----------------------------------------------------------------------------------------------------

    def _reduced(self, accepted: AcceptedAgreement) -> Aggregated:
        """Aggregates what the agreement lists; the same bits at every member."""
        agreement, payloads = accepted.agreement, dict[str, Payload]()
        for each in agreement.members:
            payload = self._fetched.read[each.member, each.payload_sha256].payload
            if payload is None:
                raise RoundFailedError(f"round {agreement.round_index}: the contribution of {each.member[:12]} is gone")
            payloads[each.member] = payload
        if isinstance(self._form, SlicedForm):
            return self._reduced_in_slices(self._form, accepted, payloads)
        weights = {each.member: each.weight for each in agreement.members}
        return self._form.aggregate(payloads, weights, self._settings.rule, self._contribution.reference)

    def _reduced_in_slices(
        self, form: SlicedForm, accepted: AcceptedAgreement, digests: dict[str, Payload]
    ) -> Aggregated:
        settings = self._settings
        while self._clock.now < accepted.put_at + CLOCK_SLACK_S:  # Then all that counts is there.
            self._wait.check_time()
            time.sleep(settings.config.poll_interval_s)
        return SliceReduction(
            settings.place,
            settings.identity,
            form,
            accepted.agreement,
            digests,
            settings.rule,
            self._contribution.reference,
            false_reducers=settings.false_reducers,
            agreed_at=accepted.put_at,
            wait_s=settings.config.propose_after_s,
            poll_interval_s=settings.config.poll_interval_s,
            check_time=self._wait.check_time,
        ).run()

    def _report(self, agreement: Agreement, result: Aggregated, cost: Cost, agreed_s: float) -> RoundReport:
        """Returns what is told of the round; ``agreed_s``: seconds until it was agreed."""
        seconds = self._wait.waited_s
        late = {member for member, _ in self._fetched.fitting} - set(agreement.keys)
        return RoundReport(
            round_index=agreement.round_index,
            members=agreement.keys,
            dropped=(*result.dropped, *((member, "late: not in the agreement") for member in sorted(late))),
            completeness=result.completeness,
            sent_bytes=cost.sent_bytes,
            received_bytes=cost.received_bytes,
            seconds=seconds,
            rule=result.rule,
            weights=tuple(each.weight for each in agreement.members),
            validation=result.odd,
            findings=result.findings,
            note=result.note,
            phases=(agreed_s, seconds - agreed_s, 0.0),
        )
