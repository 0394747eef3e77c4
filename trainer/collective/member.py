"""One round as one node goes through it: gather, agree, reduce, vote, and commit or not.

If a coordinator is lost, the next in order takes its place at every point: before the agreement the node asks the next
one; after it, votes go to the next member of the agreement. None of this changes the result.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import torch

from trainer.aggregation import (
    Moments,
    RuleDecision,
    common_progress,
    contribution_weight,
    decide,
    effective_rule,
    needs_moments,
)
from trainer.collective.arithmetic import Arithmetic, HeldResults
from trainer.collective.coordinator_client import CoordinatorClient
from trainer.collective.messages import (
    MAX_ROUND_MEMBERS,
    Agreement,
    Commit,
    CommitDecision,
    JoinRequest,
    MemberReason,
    Plan,
    Task,
    TaskDigest,
    Vote,
    short,
)
from trainer.collective.moments import add_sums, measured_of, weights_of
from trainer.collective.planning import check_agreement, check_commit, check_plan, coordinator_order, first_plan
from trainer.collective.reduction import Reduction, ReductionPass
from trainer.collective.service import RoundService, RoundSettings
from trainer.errors import RefusedError, RoundFailedError, RpcError, StateBehindError
from trainer.network.rpc import Peer
from trainer.outer.engine.collective import Contribution, RoundReport, RoundResult

__all__ = ["RoundMember"]

logger = logging.getLogger(__name__)

_RETRY_S = 0.3
_VOTES_AT_ONE = 3


class RoundMember:
    """One node in one round.

    Args:
        settings: of the run.
        service: this node's answering side.
        contribution: the node's part.
        vector: its values, with what earlier encodings left out.
        vocabulary_rows: the most rows of vocabulary the node could have after this round.
    """

    def __init__(
        self,
        settings: RoundSettings,
        service: RoundService,
        contribution: Contribution,
        vector: torch.Tensor,
        vocabulary_rows: int,
    ) -> None:
        self.agreement: Agreement | None = None
        self._settings = settings
        self._service = service
        self._config = settings.config
        self._own_id = settings.endpoint.peer_id
        self._contribution = contribution
        self._vector = vector
        self._vocabulary_rows = vocabulary_rows
        self._client = CoordinatorClient(settings, service)
        self._reductions: list[Reduction] = []
        self._rule_decision: RuleDecision | None = None
        self._residual: torch.Tensor | None = None
        self._sums_of_all: list[Moments] = []

    async def run(self) -> RoundResult:
        """Goes through the round.

        Raises:
            StateBehindError: the others hold another state, or have gone on without this node.
            RoundFailedError: there is no result; nothing happened.
        """
        began_s = time.monotonic()
        counters = self._settings.endpoint.counters
        sent_bytes, received_bytes = counters.sent_bytes, counters.received_bytes
        try:
            async with asyncio.timeout(self._config.round_timeout_s):
                agreement = await self._come_together()
                self.agreement = agreement
                commit, values = await self._carry_out(agreement)
        except TimeoutError as error:
            raise RoundFailedError(
                f"round {self._contribution.round_index}: not over within {self._config.round_timeout_s:.0f} s"
            ) from error
        finally:
            self._service.end_round(self.agreement)
        report = replace(
            self._report(agreement, commit),
            sent_bytes=counters.sent_bytes - sent_bytes,
            received_bytes=counters.received_bytes - received_bytes,
            seconds=time.monotonic() - began_s,
        )
        progress = common_progress([member.progress for member in agreement.members], weights_of(agreement))
        return RoundResult(vector=values, report=report, residual=self._residual, progress=progress)

    # -- coming together -----------------------------------------------------------------------------------------------

    async def _come_together(self) -> Agreement:
        """Finds the coordinator and agrees; tries the next one wherever one is lost."""
        tried: set[str] = set()
        ahead: set[str] = set()
        while True:
            for coordinator in self._coordinators(tried):
                try:
                    agreement = await self._agree_with(coordinator, tried)
                except RefusedError as error:
                    if error.reason == "behind":
                        ahead.add(coordinator)
                    if self._is_final(error, ahead):
                        is_failure = error.reason in {"few", "full"}
                        raise (RoundFailedError if is_failure else StateBehindError)(str(error)) from error
                    if error.reason == "not_coordinator":
                        tried.clear()
                        break
                    tried.add(coordinator)
                except RpcError as error:
                    logger.info("round %d: %s", self._contribution.round_index, error)
                    tried.add(coordinator)
                else:
                    if agreement is not None:
                        return agreement
            await asyncio.sleep(_RETRY_S)

    def _coordinators(self, tried: set[str]) -> list[str]:
        peer_ids = {self._own_id, *self._settings.directory.peers()}
        order = coordinator_order(self._settings.run_id, self._contribution.round_index, peer_ids)
        reachable = [peer_id for peer_id in order if peer_id not in tried or peer_id == self._own_id]
        return reachable[: reachable.index(self._own_id) + 1]

    async def _agree_with(self, coordinator: str, tried: set[str]) -> Agreement | None:
        """Returns the agreement that all have acknowledged; None if the coordinator is not known any more."""
        peer = None if coordinator == self._own_id else self._settings.directory.peers().get(coordinator)
        if peer is None and coordinator != self._own_id:
            return None
        agreement = await self._client.join(peer, self._join_request(tried))
        while True:
            self._check(agreement)
            begun = self._service.acknowledged(agreement)
            other = await self._wait_until_begun(peer, agreement, begun)
            if other is None:
                return agreement
            self._service.abandon(agreement)
            agreement = other

    async def _wait_until_begun(
        self, coordinator: Peer | None, agreement: Agreement, begun: asyncio.Event
    ) -> Agreement | None:
        """Returns None once the round has begun, or the agreement that replaces this one.

        If a coordinator is lost after it told some members, but not all, that the round has begun, some of those open
        streams to this node, which says as much. A moment is left for that.
        """
        asking = asyncio.create_task(self._client.acknowledge(coordinator, agreement))
        waiting = asyncio.create_task(begun.wait())
        try:
            await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and asking.exception() is not None and not begun.is_set():
                await asyncio.wait({waiting}, timeout=min(1.0, self._config.stall_timeout_s / 4))
            if begun.is_set():
                return None
            if asking.exception() is not None:
                self._service.abandon(agreement)
            return asking.result()
        finally:
            for task in (asking, waiting):
                task.cancel()
            await asyncio.gather(asking, waiting, return_exceptions=True)

    def _join_request(self, tried: set[str]) -> JoinRequest:
        endpoint, contribution = self._settings.endpoint, self._contribution
        return JoinRequest(
            round_index=contribution.round_index,
            terms=self._settings.terms,
            state_digest=contribution.state_digest,
            num_values=contribution.vector.numel(),
            num_batches=contribution.num_batches,
            age_s=max(0.0, contribution.age_s),
            progress=contribution.progress,
            vocabulary_rows=self._vocabulary_rows,
            address=endpoint.address,
            certificate=endpoint.certificate.decode() if endpoint.certificate else None,
            tried=tuple(sorted(tried)[:MAX_ROUND_MEMBERS]),
        )

    def _check(self, agreement: Agreement) -> None:
        contribution = self._contribution
        check_agreement(
            agreement,
            own_id=self._own_id,
            round_index=contribution.round_index,
            state_digest=contribution.state_digest,
            num_values=contribution.vector.numel(),
            own_weight=contribution_weight(contribution.num_batches, max(0.0, contribution.age_s)),
            own_progress=contribution.progress,
            vocabulary_rows=self._vocabulary_rows,
            values_per_part=self._settings.values_per_part,
            max_weight_ratio=self._config.max_weight_ratio,
        )

    def _is_final(self, error: RefusedError, ahead: set[str]) -> bool:
        """Whether asking another coordinator is no use."""
        if error.reason == "behind":
            directory = self._settings.directory
            return 2 * len(ahead) > len(directory.peers()) or not directory.holds_most_held_state()
        return error.reason in {"state", "late", "few", "full"}

    # -- carrying it out -----------------------------------------------------------------------------------------------

    async def _carry_out(self, agreement: Agreement) -> tuple[Commit, torch.Tensor]:
        settings = self._settings
        self._residual = None if settings.codec.name == "fp32" else self._vector.clone()
        arithmetic = Arithmetic(
            agreement, settings.codec, settings.rule, self._vector, self._contribution.reference, self._residual
        )
        results = HeldResults(arithmetic)
        peers = {member.peer_id: member.peer for member in agreement.members}
        plan = first_plan(agreement)
        deadline_s = time.monotonic() + self._config.round_timeout_s / 2
        while True:
            tasks = [task for task in plan.fresh if task.reducer == self._own_id]
            own = [self._reduction(task, plan, arithmetic, deadline_s) for task in tasks]
            self._reductions += own
            await self._service.offer(plan.fingerprint(), own)
            failed = await ReductionPass(
                plan=plan,
                arithmetic=arithmetic,
                endpoint=settings.endpoint,
                peers=peers,
                results=results,
                reductions={reduction.task.key: reduction for reduction in own},
                stall_timeout_s=self._config.stall_timeout_s,
                timeout_s=max(1.0, deadline_s - time.monotonic() + self._config.stall_timeout_s),
            ).run()
            decision = await self._vote(agreement, plan, results, failed)
            if decision.plan is None:
                return self._settle(agreement, decision, results)
            following = decision.plan
            check_plan(following, agreement, max_passes=self._config.max_passes)
            if following.pass_index <= plan.pass_index or not set(following.members) <= set(plan.members):
                raise RoundFailedError(f"round {agreement.round_index}: the coordinator's plan goes backwards")
            plan = following
            if self._own_id not in plan.members:
                raise StateBehindError(f"round {agreement.round_index}: the others have gone on without this node")

    def _reduction(self, task: Task, plan: Plan, arithmetic: Arithmetic, deadline_s: float) -> Reduction:
        over_whole_vectors = needs_moments(self._settings.rule)

        async def decide_rule(task: Task, sums: Moments) -> RuleDecision:
            """Decides from all reducers' sums; the decision holds for later passes too."""
            if self._rule_decision is None:
                agreement = arithmetic.agreement
                self._sums_of_all = await self._client.moments(agreement, task, sums)
                self._rule_decision = decide(add_sums(self._sums_of_all), weights_of(agreement), self._settings.rule)
            return self._rule_decision

        return Reduction(
            task,
            plan.members,
            arithmetic,
            self._own_id,
            decide_rule=decide_rule if over_whole_vectors else None,
            measured=self._settings.rule.validation != "off" and not over_whole_vectors,
            stall_timeout_s=self._config.stall_timeout_s,
            deadline_s=deadline_s,
        )

    async def _vote(
        self, agreement: Agreement, plan: Plan, results: HeldResults, failed: dict[str, str]
    ) -> CommitDecision:
        own = {reduction.task.key: reduction for reduction in self._reductions}
        dropped: dict[str, str] = {}
        for reduction in self._reductions:
            dropped |= reduction.odd | reduction.dropped
        sums = self._own_sums()
        vote = Vote(
            plan=plan,
            term=0,
            digests=tuple(
                TaskDigest(
                    key=task.key,
                    digest=results.digest(task.key),
                    num_included=own[task.key].num_included if task.key in own else None,
                )
                for task in plan.tasks
            ),
            failed=tuple(sorted(failed)),
            dropped=tuple(
                MemberReason(peer_id=peer_id, reason=short(reason)) for peer_id, reason in sorted(dropped.items())
            ),
        )
        for term, coordinator in enumerate(agreement.succession()):
            peer = None if coordinator.peer_id == self._own_id else coordinator.peer
            vote = vote.model_copy(update={"term": term})
            decision = await self._vote_at(peer, vote, add_sums(sums) if sums else None)
            if decision is not None:
                return decision
        raise RoundFailedError(f"round {agreement.round_index}: no member left to decide it")

    async def _vote_at(self, peer: Peer | None, vote: Vote, sums: Moments | None) -> CommitDecision | None:
        """Returns a coordinator's decision; None if it is gone. One that is present is asked again: others vote too."""
        for _ in range(_VOTES_AT_ONE):
            try:
                decision = await self._client.vote(peer, vote, sums)
                if decision.commit is not None and self.agreement is not None:
                    check_commit(decision.commit, self.agreement, max_passes=self._config.max_passes)
                return decision
            except RefusedError as error:
                logger.info("no decision: %s", error)
                return None
            except RpcError as error:
                logger.info("no decision: %s", error)
                if not await self._client.is_present(peer, vote.plan.agreement):
                    return None
            await asyncio.sleep(_RETRY_S)
        return None

    def _settle(
        self, agreement: Agreement, decision: CommitDecision, results: HeldResults
    ) -> tuple[Commit, torch.Tensor]:
        self._service.settle(agreement, decision)
        commit = decision.commit
        if commit is None:
            raise RoundFailedError(f"round {agreement.round_index}: {decision.reason}")
        if self._own_id not in commit.members or not results.holds(commit.digests):
            raise StateBehindError(
                f"round {agreement.round_index}: the others have committed a result that this node does not hold whole"
            )
        return commit, results.values

    def _own_sums(self) -> list[Moments]:
        return [reduction.sums for reduction in self._reductions if reduction.sums is not None]

    def _report(self, agreement: Agreement, commit: Commit) -> RoundReport:
        decision = self._rule_decision
        effective = effective_rule(len(agreement.members), self._settings.rule)
        left_out = {dropped.peer_id: dropped.reason for dropped in commit.dropped}
        for peer_id in agreement.peer_ids:
            if peer_id not in commit.members:
                left_out.setdefault(peer_id, "gone before the end of the round")
        if decision is not None:
            for position, reason in decision.excluded.items():
                left_out.setdefault(agreement.peer_ids[position], reason)
        return RoundReport(
            round_index=agreement.round_index,
            members=commit.members,
            dropped=tuple(sorted(left_out.items())),
            completeness=commit.completeness,
            rule=decision.rule_used if decision is not None else effective.rule,
            num_passes=commit.plan.pass_index + 1,
            weights=tuple(member.weight for member in agreement.members if member.peer_id in commit.members),
            validation=tuple((finding.peer_id, finding.reason) for finding in commit.findings),
            findings=measured_of(agreement, self._sums_of_all or self._own_sums(), self._settings.rule),
            note=decision.note if decision is not None else effective.note,
        )
