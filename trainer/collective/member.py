"""One round as one node goes through it: join (`trainer.collective.joining`), reduce, vote, and commit or not.

A round may have a second phase, whose vector depends on the first one's result. It has the same members, an agreement
that each of them makes of the first and its commit, and otherwise everything a first phase has. The first one's commit
then changes nothing at anybody: only both together are a result.

If a coordinator is lost, the next in order takes its place at every point: before the agreement as `joining` says;
after it, votes go to the next member of it. None of this changes the result.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial

import torch

from manifests import canonical_json, sha256_hex
from trainer.aggregation import Moments, RuleConfig, RuleDecision, common_progress, decide, effective_rule
from trainer.aggregation.sparse import SPARSE_RULE
from trainer.collective import messages
from trainer.collective.arithmetic import Arithmetic, TaskResult, add_sums, measured_of, split_sums
from trainer.collective.config import CollectiveConfig
from trainer.collective.gathering import GatheringArithmetic
from trainer.collective.joining import Joining
from trainer.collective.levels import GroupedAgreement, GroupedRound
from trainer.collective.levels.columns import MakeArithmetic
from trainer.collective.levels.messages import LevelAgreement
from trainer.collective.messages import (
    Agreement,
    Commit,
    CommitDecision,
    Plan,
    Task,
    Vote,
    short,
)
from trainer.collective.planning import (
    check_commit,
    check_plan,
    cut_values,
    first_plan,
    following_agreement,
    most_part_values,
)
from trainer.collective.reduction import Reduction, ReductionPass
from trainer.collective.service import KnownRound, RoundService
from trainer.compression.sparse import SparseCodec
from trainer.errors import CodecError, RefusedError, RoundFailedError, RpcError, StateBehindError
from trainer.network.rpc import Peer
from trainer.outer.engine.collective import (
    Contribution,
    FollowingPhase,
    RoundReport,
    RoundResult,
    member_findings,
    report_on_both,
)

logger = logging.getLogger(__name__)

_RETRY_S = 0.3
_VOTES_AT_ONE = 3
_SLOWER = 3.0  # So many times as long as this node another may take to make its part in a second phase.


class RoundMember:
    """One node in one round, after which it could have at most ``vocabulary_rows`` rows of vocabulary.

    ``follows`` is the agreement of a second phase, or of a level, whose members need not come together any more.
    """

    def __init__(
        self,
        service: RoundService,
        contribution: Contribution,
        vocabulary_rows: int,
        follows: Agreement | None = None,
    ) -> None:
        self.agreement: Agreement | None = None
        self._follows = follows
        self._expects_phase = False
        self._prepared_s = 0.0  # Seconds that this node's part in a second phase took to make.
        self._commit: Commit | None = None
        self._service = service
        self._joining = Joining(service, contribution, vocabulary_rows)
        self._settings = self._joining.settings
        self._own_id = service.settings.own_id
        self._contribution = contribution
        self._vector = contribution.vector
        if contribution.filled is None:  # Added up by the training thread.
            self._vector = _with_residual(contribution)
        self._vocabulary_rows = vocabulary_rows
        self._phase: KnownRound | None = None  # Of a second phase or a level, which nobody joins.
        self._make_arithmetic: MakeArithmetic | None = None  # Of a level of a round in groups.
        self._offered: list[str] = []  # Digests of the plans this node reduces by.
        self._reductions: list[Reduction] = []
        self._results: dict[str, TaskResult] = {}
        self._rule_decision: RuleDecision | None = None
        self._residual: torch.Tensor | None = None
        self._values = torch.empty(0)
        self._sums_of_all: list[Moments] = []
        self._reduce_s = self._vote_s = 0.0

    @property
    def is_agreed(self) -> bool:
        """Whether it has acknowledged an agreement, so that others count on it."""
        return self._known is not None

    @property
    def _known(self) -> KnownRound | None:
        return self._phase or self._joining.known

    @property
    def _config(self) -> CollectiveConfig:
        return self._settings.config

    @property
    def timeout_s(self) -> float:
        """Seconds that the round may take."""
        return self._config.round_timeout_s

    async def run(self) -> RoundResult:
        """Goes through the round.

        Raises:
            StateBehindError: the others hold another state, or have gone on without this node.
            RoundFailedError: there is no result; nothing happened.
        """
        began_s, is_over = time.monotonic(), False
        counters = self._service.traffic
        sent_bytes, received_bytes = counters.sent_bytes, counters.received_bytes
        try:
            async with asyncio.timeout(self._config.round_timeout_s):
                agreement = self._follows or await self._join()
                self.agreement = agreement
                agree_s = time.monotonic() - began_s
                # Before the vector is there: fresh memory costs a tenth of a round's processor time.
                await asyncio.to_thread(self._allocate, agreement)
                if self._contribution.filled is not None:
                    # Shielded: the future is the training thread's, also when this round is broken off.
                    await asyncio.shield(asyncio.wrap_future(self._contribution.filled))
                    self._vector = await asyncio.to_thread(_with_residual, self._contribution)
                if isinstance(agreement, GroupedAgreement):
                    report, values = await self._in_groups(agreement)
                else:
                    self._commit, values = await self._carry_out(agreement)
                    report = self._report(agreement, self._commit)
                is_over = True
        except TimeoutError as error:
            raise RoundFailedError(
                f"round {self._contribution.round_index}: not over within {self._config.round_timeout_s:.0f} s"
            ) from error
        finally:
            self._service.end_round(self._known if self.agreement is not None else None, self._offered)
            if self.agreement is not None and not is_over and self._make_arithmetic is None:
                self._service.note_failed(self.agreement)
            # They know this member, which decides their rule: vectors in a cycle would stay until a collection, and
            # each round take fresh memory (a quarter more processor time among four).
            self._reductions.clear()
        report = replace(
            report,
            sent_bytes=counters.sent_bytes - sent_bytes,
            received_bytes=counters.received_bytes - received_bytes,
            seconds=time.monotonic() - began_s,
            phases=(agree_s, self._reduce_s, self._vote_s),
        )
        progress = common_progress([member.progress for member in agreement.members], agreement.weights)
        return RoundResult(
            vector=values, report=report, residual=self._residual, progress=progress, change=agreement.change
        )

    async def run_in_phases(self, following: FollowingPhase) -> RoundResult:
        """Goes through a round of two phases; see `trainer.outer.engine.collective.PhasedCollective`.

        Raises:
            StateBehindError, RoundFailedError: as `run`, and either phase may be what failed.
        """
        self._expects_phase = True
        have_result = False
        try:
            async with asyncio.timeout(self._config.round_timeout_s):
                first = await self.run()
                began_s = time.monotonic()
                contribution = await asyncio.to_thread(following, first)
                second = await self._second_phase(contribution, time.monotonic() - began_s).run()
            have_result = True
        except TimeoutError as error:
            raise RoundFailedError(
                f"round {self._contribution.round_index}: not over within {self._config.round_timeout_s:.0f} s"
            ) from error
        finally:
            self._service.end_phases(self._known, have_result=have_result)
        return replace(second, report=report_on_both(first.report, second.report))

    async def _join(self) -> Agreement:
        self._joining.expects_phase = self._expects_phase
        agreement = await self._joining.run()
        self._settings = self._joining.settings
        return agreement

    async def _in_groups(self, agreement: GroupedAgreement) -> tuple[RoundReport, torch.Tensor]:
        """Goes through a round of more members than a group holds; see `trainer.collective.levels`."""
        contribution = replace(self._contribution, filled=None)
        known = self._known
        levels = GroupedRound(agreement, contribution, self._settings, self._service.levels, self._go_through_level)
        outcome = await levels.run()
        if known is not None:
            self._service.settle_grouped(known, outcome.report.members)
            known.expects_phase = self._expects_phase
        self._residual = outcome.residual
        self._reduce_s, self._vote_s = outcome.report.phases[1:]
        return outcome.report, outcome.values

    async def _go_through_level(
        self, agreement: LevelAgreement, contribution: Contribution, make: MakeArithmetic | None, rule: RuleConfig
    ) -> tuple[RoundResult, Commit]:
        level = RoundMember(self._service, contribution, self._vocabulary_rows, agreement)
        level._settings = replace(self._settings, rule=rule)
        level._make_arithmetic, level._expects_phase = make, True
        level._phase = self._service.begin_phase(agreement, None)
        result = await level.run()
        if level._commit is None:
            raise RoundFailedError(f"round {agreement.round_index}: a level has no result")
        return result, level._commit

    def _second_phase(self, contribution: Contribution, prepared_s: float) -> RoundMember:
        if isinstance(self.agreement, GroupedAgreement):
            return self._second_in_groups(self.agreement, contribution)
        if self.agreement is None or self._commit is None:
            raise RoundFailedError(f"round {contribution.round_index}: its first phase has no result")
        agreement = following_agreement(
            self.agreement,
            self._commit,
            contribution.vector.numel(),
            contribution.state_digest,
            self._settings.values_per_part,
            self._settings.codec.block_values,
        )
        second = RoundMember(self._service, contribution, self._vocabulary_rows, agreement)
        second._phase = self._service.begin_phase(agreement, self._known)
        second._prepared_s = prepared_s
        return second

    def _second_in_groups(self, first: GroupedAgreement, contribution: Contribution) -> RoundMember:
        num_values, settings = contribution.vector.numel(), self._settings
        most_values = most_part_values(first, settings.values_per_part)
        part_values = cut_values(num_values, len(first.members), most_values, settings.codec.block_values)
        agreement = first.second(num_values, contribution.state_digest, part_values)
        second = RoundMember(self._service, contribution, self._vocabulary_rows, agreement)
        second._phase = self._service.begin_phase(agreement, self._known)
        return second

    async def _carry_out(self, agreement: Agreement) -> tuple[Commit, torch.Tensor]:
        settings = self._settings
        if self._residual is not None:
            self._residual.copy_(self._vector)
        arithmetic, values = self._arithmetic(agreement), self._values
        plan = first_plan(agreement)
        deadline_s = time.monotonic() + self._config.round_timeout_s / 2
        while True:
            own = {
                task.key: Reduction(
                    task,
                    plan.members,
                    arithmetic,
                    self._own_id,
                    decide_rule=partial(self._decide_rule, agreement),
                    # Members of other speeds come to a second phase later; those that are gone are noticed sooner.
                    stall_timeout_s=self._config.stall_timeout_s + _SLOWER * self._prepared_s,
                    deadline_s=deadline_s,
                )
                for task in plan.fresh
                if task.reducer == self._own_id
            }
            self._reductions += own.values()
            self._results |= {task.key: TaskResult(task, arithmetic, values) for task in plan.fresh}
            plan_digest = plan.fingerprint()
            self._service.offer(plan_digest, list(own.values()))
            self._offered.append(plan_digest)
            reduce_from_s = time.monotonic()
            failed = await ReductionPass(
                plan=plan,
                plan_digest=plan_digest,
                endpoint=settings.endpoint,
                arithmetic=arithmetic,
                results=self._results,
                reductions=own,
                stall_timeout_s=self._config.stall_timeout_s,
                timeout_s=max(1.0, deadline_s - time.monotonic() + self._config.stall_timeout_s),
            ).run()
            vote_from_s = time.monotonic()
            decision = await self._vote(agreement, plan, failed)
            self._reduce_s += vote_from_s - reduce_from_s
            self._vote_s += time.monotonic() - vote_from_s
            if decision.plan is None:
                commit = self._settle(agreement, decision)
                if isinstance(arithmetic, GatheringArithmetic):
                    values = await asyncio.to_thread(self._aggregated, arithmetic, values)
                return commit, values
            following = decision.plan
            check_plan(following, agreement, max_passes=self._config.max_passes)
            if following.pass_index <= plan.pass_index or not set(following.members) <= set(plan.members):
                raise RoundFailedError(f"round {agreement.round_index}: the coordinator's plan goes backwards")
            plan = following
            if self._own_id not in plan.members:
                raise self._outvoted(f"round {agreement.round_index}: the others have gone on without this node")

    def _allocate(self, agreement: Agreement) -> None:
        self._values = torch.zeros(agreement.num_values)
        if self._settings.codec.name != "fp32":
            self._residual = torch.zeros(agreement.num_values)

    def _arithmetic(self, agreement: Agreement) -> Arithmetic:
        settings, reference = self._settings, self._contribution.reference
        if self._make_arithmetic is not None:
            return self._make_arithmetic(agreement, self._vector, self._residual)
        if not isinstance(settings.codec, SparseCodec):
            return Arithmetic(agreement, settings.codec, settings.rule, self._vector, reference, self._residual)
        return GatheringArithmetic(
            agreement,
            settings.codec,
            replace(settings.rule, rule="mean"),
            self._vector,
            reference,
            self._residual,
            sparse=settings.codec,
            own_id=self._own_id,
            averaging=settings.averaging,
        )

    def _aggregated(self, arithmetic: GatheringArithmetic, nothing: torch.Tensor) -> torch.Tensor:
        """Returns the result of sparse contributions that all members hold; zeros if they came to nothing."""
        outcome = arithmetic.outcome()
        self._residual = arithmetic.carried_over(outcome, self._contribution.residual)
        if outcome is None:
            return nothing
        self._rule_decision = outcome.decision
        return outcome.vector

    async def _decide_rule(self, agreement: Agreement, task: Task, sums: Moments) -> RuleDecision:
        """Decides from all reducers' sums; the decision holds for later passes too."""
        if self._rule_decision is None:
            self._sums_of_all = await self._all_reduced(agreement, task, sums)
            self._rule_decision = decide(add_sums(self._sums_of_all), agreement.weights, self._settings.rule)
        return self._rule_decision

    async def _all_reduced(self, agreement: Agreement, task: Task, sums: Moments) -> list[Moments]:
        """All reducers' sums, from the first member in succession that answers; if none does, only this node's."""
        body, payload = messages.MomentsOpen(agreement=agreement.fingerprint(), task=task.key), sums.to_bytes()
        timeout_s = self._config.round_timeout_s
        for member in agreement.succession():
            try:
                reply = await self._service.ask(
                    member.peer, "round/moments", body, messages.MomentsReply, timeout_s, payload
                )
                pieces = split_sums(reply.body, bytes(reply.payload))
                if not pieces:
                    raise CodecError("expected the sums of one reducer or more, found none")
                return [Moments.from_bytes(piece, len(agreement.members)) for piece in pieces]
            except (RpcError, CodecError, ValueError) as error:
                logger.info("round %d: no sums from %s: %s", agreement.round_index, member.peer_id[:8], error)
        return [sums]

    async def _vote(self, agreement: Agreement, plan: Plan, failed: dict[str, str]) -> CommitDecision:
        own = {reduction.task.key: reduction for reduction in self._reductions}
        dropped: dict[str, str] = {}
        for reduction in self._reductions:
            dropped |= reduction.odd | reduction.dropped
        sums = self._own_sums()
        payload = add_sums(sums).to_bytes() if sums else b""
        vote = Vote(
            plan=plan,
            term=0,
            digests=tuple(
                messages.TaskDigest(
                    key=task.key,
                    digest=self._digest(task.key),
                    num_included=own[task.key].num_included if task.key in own else None,
                )
                for task in plan.tasks
            ),
            failed=tuple(sorted(failed)),
            dropped=tuple(
                messages.MemberReason(peer_id=peer_id, reason=short(reason))
                for peer_id, reason in sorted(dropped.items())
            ),
        )
        for term, coordinator in enumerate(agreement.succession()):
            vote = vote.model_copy(update={"term": term})
            decision = await self._vote_at(coordinator.peer, agreement, vote, payload)
            if decision is not None:
                return decision
        raise RoundFailedError(f"round {agreement.round_index}: no member left to decide it")

    async def _vote_at(self, peer: Peer, agreement: Agreement, vote: Vote, payload: bytes) -> CommitDecision | None:
        """Returns a coordinator's decision; None if it is gone. One that is present is asked again: others vote too."""
        config, ask = self._config, self._service.ask
        for _ in range(_VOTES_AT_ONE):
            try:
                reply = await ask(peer, "round/vote", vote, CommitDecision, config.round_timeout_s, payload)
                if reply.body.commit is not None:
                    check_commit(reply.body.commit, agreement, max_passes=config.max_passes)
                return reply.body
            except RefusedError as error:
                logger.info("no decision: %s", error)
                return None
            except RpcError as error:
                logger.info("no decision: %s", error)
                try:
                    status = messages.StatusRequest(agreement=vote.plan.agreement)
                    await ask(peer, "round/status", status, messages.StatusReply, config.stall_timeout_s)
                except RpcError:
                    return None
            await asyncio.sleep(_RETRY_S)
        return None

    def _settle(self, agreement: Agreement, decision: CommitDecision) -> Commit:
        if self._known is not None:
            self._service.settle(self._known, decision)
        commit = decision.commit
        if commit is None:
            raise RoundFailedError(f"round {agreement.round_index}: {decision.reason}")
        holds_all = all(entry.digest == self._digest(entry.key) for entry in commit.digests)
        if self._own_id not in commit.members or not holds_all:
            raise self._outvoted(
                f"round {agreement.round_index}: the others have committed a result that this node does not hold whole"
            )
        return commit

    def _outvoted(self, text: str) -> RoundFailedError:
        """The others' state is another only after the last phase; after the first, nobody has applied anything."""
        return RoundFailedError(text) if self._expects_phase else StateBehindError(text)

    def _digest(self, key: str) -> str | None:
        return self._results[key].digest if key in self._results else None

    def _own_sums(self) -> list[Moments]:
        return [reduction.sums for reduction in self._reductions if reduction.sums is not None]

    def _report(self, agreement: Agreement, commit: Commit) -> RoundReport:
        decision = self._rule_decision
        effective = effective_rule(len(agreement.members), self._settings.rule)
        left_out = {dropped.peer_id: dropped.reason for dropped in commit.dropped}
        if self._joining.is_late:
            left_out.setdefault(self._own_id, "its work was done by other settings than those in force")
        for peer_id in agreement.peer_ids:
            if peer_id not in commit.members:
                left_out.setdefault(peer_id, "gone before the end of the round")
        if decision is not None:
            for position, reason in decision.excluded.items():
                left_out.setdefault(agreement.peer_ids[position], reason)
        findings = measured_of(agreement, self._sums_of_all or self._own_sums(), self._settings.rule)
        validation = tuple((finding.peer_id, finding.reason) for finding in commit.findings)
        rule: str = decision.rule_used if decision is not None else effective.rule
        note = decision.note if decision is not None else effective.note
        if isinstance(self._settings.codec, SparseCodec):
            judged = () if decision is None else decision.findings
            findings = member_findings(judged, agreement.peer_ids)
            validation = tuple((finding.member, finding.reason) for finding in findings if finding.reason)
            rule, note = SPARSE_RULE, "" if decision is None else note
        return RoundReport(
            round_index=agreement.round_index,
            members=commit.members,
            dropped=tuple(sorted(left_out.items())),
            completeness=commit.completeness,
            rule=rule,
            num_passes=commit.plan.pass_index + 1,
            weights=tuple(member.weight for member in agreement.members if member.peer_id in commit.members),
            validation=validation,
            findings=findings,
            note=note,
            num_values=agreement.num_values,
            result_digest=_digest_of(commit),
        )


def _with_residual(contribution: Contribution) -> torch.Tensor:
    """The vector with what earlier encodings left out."""
    residual = contribution.residual
    return contribution.vector if residual is None else contribution.vector + residual


def _digest_of(commit: Commit) -> str:
    """Of the whole result, from its tasks' digests, which all members hold alike."""
    return sha256_hex(canonical_json(sorted((entry.key, entry.digest or "") for entry in commit.digests)))
