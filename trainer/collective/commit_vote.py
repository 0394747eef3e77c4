"""The coordinator's second half: the commit vote, and the decision that goes out to all who voted.

A round commits only what every voter holds with one digest (after further passes: what most of them hold), and only
with a majority of the agreed members; what a member lacks is reduced again by others. `decide_round` is pure, and
before a member can have been told to commit, all who are left held all of it: so the next coordinator can only decide
the same. A member that does not answer is not waited for, and one that already knows the outcome settles it for all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from trainer.aggregation import Moments
from trainer.collective.arithmetic import measured_of
from trainer.collective.config import Changes, RoundSettings
from trainer.collective.messages import Agreement, Commit, CommitDecision, MemberReason, Plan, TaskDigest, Vote, short
from trainer.collective.planning import check_commit, check_plan, first_plan, is_majority, may_follow, next_plan
from trainer.errors import RefusedError

logger = logging.getLogger(__name__)

Probe = Callable[[str], Awaitable[tuple[bool, CommitDecision | None]]]
"""Asks a member whether it is there, and for the outcome it knows."""

_Held = Mapping[str, Mapping[str, str | None]]  # Digests by task, by voter.

_PROBE_INTERVAL_S = 0.5
_LOOK_EVERY_S = 0.25


class CommitVote:
    """One round's votes on the node that coordinates it, or has taken over.

    The agreed coordinator knows all plans there are, and accepts none from voters.
    """

    def __init__(self, agreement: Agreement, settings: RoundSettings, probe: Probe) -> None:
        self._agreement = agreement
        self._settings = settings
        self._max_passes = settings.config.max_passes
        self._probe = probe
        self._plan = first_plan(agreement)
        self._votes: dict[str, Vote] = {}
        self._sums: dict[str, Moments] = {}
        self._absent: set[str] = set()
        self._decisions: dict[str, CommitDecision] = {}
        self._outcome: CommitDecision | None = None
        self._changes = Changes()
        self._running: asyncio.Task[None] | None = None

    async def vote(self, peer_id: str, vote: Vote, sums: Moments | None) -> CommitDecision:
        """Takes a vote and waits for the decision on all of them.

        Raises:
            RefusedError: ``unknown``: not a member, or a plan of another agreement; ``plan``: an invalid one.
        """
        if peer_id not in self._agreement.peer_ids or vote.plan.agreement != self._agreement.fingerprint():
            raise RefusedError("unknown", f"round {self._agreement.round_index} has no such member or agreement")
        if sums is not None:
            self._sums[peer_id] = sums
        check_plan(vote.plan, self._agreement, max_passes=self._max_passes)
        is_backed = is_majority(vote.plan.members, self._agreement.peer_ids)
        is_successor = self._settings.own_id != self._agreement.coordinator
        if is_successor and is_backed and may_follow(vote.plan, self._plan):
            # The coordinator that is gone had gone further than this one knows: its plan is adopted.
            self._plan, self._votes = vote.plan, {}
        plan = self._plan
        if vote.plan != plan:
            return CommitDecision(kind="again", plan=plan) if self._outcome is None else self._outcome
        self._absent.discard(peer_id)
        self._votes[peer_id] = vote
        self._changes.notify()
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        digest = plan.fingerprint()
        await self._changes.wait_for(lambda: digest in self._decisions or self._outcome is not None)
        return self._outcome or self._decisions[digest]

    def close(self) -> None:
        """Ends the vote."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        probing = asyncio.create_task(self._probe_missing())
        try:
            while self._outcome is None:
                plan = self._plan
                await self._wait_for_votes(plan)
                self._decide(plan)
        except Exception as error:  # Whatever it is, no voter may be left waiting.
            logger.exception("round %d cannot be decided", self._agreement.round_index)
            self._outcome = CommitDecision(kind="abort", reason=short(f"cannot be decided: {type(error).__name__}"))
            self._changes.notify()
        finally:
            probing.cancel()
            with suppress(asyncio.CancelledError):
                await probing

    async def _wait_for_votes(self, plan: Plan) -> None:
        """Waits until all present members have voted; limits the wait once more than half have."""
        config, began_s = self._settings.config, time.monotonic()
        half_s: float | None = None
        while self._outcome is None and self._plan is plan and set(plan.members) - self._votes.keys() - self._absent:
            waited_s = time.monotonic() - began_s
            if half_s is None and 2 * len(self._votes) > len(plan.members):
                half_s = waited_s
            longest_s = config.round_timeout_s / 2
            if half_s is not None:
                longest_s = min(longest_s, half_s + max(4 * config.stall_timeout_s, 3 * half_s))
            if waited_s > longest_s:
                return
            await self._changes.wait(_LOOK_EVERY_S)

    def _decide(self, plan: Plan) -> None:
        if self._outcome is not None or self._plan is not plan:
            return
        decision = decide_round(
            plan, self._votes, peer_ids=self._agreement.peer_ids, max_passes=self._max_passes, findings=self._findings()
        )
        self._decisions[plan.fingerprint()] = decision
        if decision.plan is not None:
            self._plan, self._votes, self._absent = decision.plan, {}, set()
        else:
            self._outcome = decision
        self._changes.notify()

    def _findings(self) -> tuple[MemberReason, ...]:
        """The members that gradient validation finds odd, from the sums that members sent."""
        sums = [self._sums[peer_id] for peer_id in sorted(self._sums)]
        usable = [one for one in sums if one.num_members == len(self._agreement.members)]
        return tuple(
            MemberReason(peer_id=finding.member, reason=short(finding.reason))
            for finding in measured_of(self._agreement, usable, self._settings.rule)
            if finding.reason
        )

    async def _probe_missing(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            missing = set(self._plan.members) - self._votes.keys() - self._absent
            await asyncio.gather(*(self._probe_one(peer_id) for peer_id in sorted(missing)))

    async def _probe_one(self, peer_id: str) -> None:
        present, outcome = await self._probe(peer_id)
        if outcome is not None and outcome.commit is not None and self._is_confirmed(outcome.commit):
            self._outcome = self._outcome or outcome
        if not present:
            self._absent.add(peer_id)
        self._changes.notify()

    def _is_confirmed(self, commit: Commit) -> bool:
        """Whether more than half of those who voted here hold what a member says was committed.

        If it was committed, they had said before that they hold it; one member's word alone proves nothing.
        """
        try:
            check_commit(commit, self._agreement, max_passes=self._max_passes)
        except RefusedError as error:
            logger.info("not believed: %s", error)
            return False
        committed = {entry.key: entry.digest for entry in commit.digests}
        held = _digests_of(self._votes)
        return 2 * sum(digests == committed for digests in held.values()) > len(held)


def decide_round(
    plan: Plan,
    votes: Mapping[str, Vote],
    *,
    peer_ids: Sequence[str],
    max_passes: int,
    findings: Sequence[MemberReason] = (),
) -> CommitDecision:
    """Decides on commit, another pass, or the end of the round.

    The votes are of this plan, by the members that are left, at least one; ``peer_ids`` are those agreed on.
    """
    held = _digests_of(votes)
    digests = {task.key: {found.get(task.key) for found in held.values()} for task in plan.tasks}
    lost = {key for key, found in digests.items() if len(found) != 1 or None in found}
    if not lost:
        if is_majority(votes, peer_ids):
            return _commit(plan, votes, tuple(sorted(votes)), peer_ids, findings)
        reason = f"only {len(votes)} of {len(peer_ids)} members are left: no majority"
        return CommitDecision(kind="abort", reason=reason)
    party = _largest_party(plan, held)
    is_last = plan.pass_index + 1 >= max_passes
    # After a second pass, if most members hold all of it alike: the others cannot get it, or do not want to.
    if not is_last and (plan.pass_index == 0 or 2 * len(party) <= len(held)):
        reducers = _reliable(plan, votes, held)
        return CommitDecision(kind="again", plan=next_plan(plan, lost, sorted(votes), reducers))
    if 2 * len(party) > len(votes) and is_majority(party, peer_ids):
        return _commit(plan, votes, party, peer_ids, findings)  # The others fetch the state afterwards.
    return CommitDecision(
        kind="abort", reason=f"after {plan.pass_index + 1} passes the {len(votes)} members left do not hold one result"
    )


def _digests_of(votes: Mapping[str, Vote]) -> _Held:
    return {peer_id: {entry.key: entry.digest for entry in vote.digests} for peer_id, vote in votes.items()}


def _largest_party(plan: Plan, held: _Held) -> tuple[str, ...]:
    """The largest group of voters who hold one whole result."""
    whole = {
        peer_id: tuple(digests.get(task.key) for task in plan.tasks)
        for peer_id, digests in held.items()
        if all(digests.get(task.key) for task in plan.tasks)
    }
    if not whole:
        return ()
    counts = Counter(whole.values())
    most = min(counts, key=lambda result: (-counts[result], str(result)))
    return tuple(sorted(peer_id for peer_id, result in whole.items() if result == most))


def _reliable(plan: Plan, votes: Mapping[str, Vote], held: _Held) -> list[str]:
    """Voters of whom no majority missed a result, and who told a majority one thing; all voters, if there is none.

    One accuser is not enough: otherwise a member that accuses all others would get to reduce everything.
    """
    accusers = Counter(peer_id for vote in votes.values() for peer_id in set(vote.failed))
    blamed = {peer_id for peer_id, count in accusers.items() if 2 * count > len(votes)}
    for task in plan.tasks:
        results = Counter(digest for digests in held.values() if (digest := digests.get(task.key)) is not None)
        if len(results) > 1 and 2 * max(results.values()) <= len(votes):
            blamed.add(task.reducer)
    return [peer_id for peer_id in votes if peer_id not in blamed] or list(votes)


def _commit(
    plan: Plan,
    votes: Mapping[str, Vote],
    members: tuple[str, ...],
    peer_ids: Sequence[str],
    findings: Sequence[MemberReason],
) -> CommitDecision:
    held = {entry.key: entry.digest for entry in votes[members[0]].digests}
    reasons: dict[str, str] = {}
    for peer_id in sorted(votes):
        for dropped in votes[peer_id].dropped:
            reasons.setdefault(dropped.peer_id, dropped.reason)
    return CommitDecision(
        kind="commit",
        commit=Commit(
            plan=plan,
            members=members,
            digests=tuple(TaskDigest(key=task.key, digest=held[task.key]) for task in plan.tasks),
            dropped=tuple(
                MemberReason(peer_id=peer_id, reason=reasons[peer_id])
                for peer_id in sorted(peer_ids)
                if peer_id in reasons
            ),
            completeness=_completeness(plan, votes, len(peer_ids)),
            findings=tuple(findings),
        ),
    )


def _completeness(plan: Plan, votes: Mapping[str, Vote], num_members: int) -> float:
    """Share of all members' parts that are in the result; of a reducer that is gone, all are assumed to be."""
    included = total = 0
    for task in plan.tasks:
        most = num_members * (task.last_part - task.first_part)
        vote = votes.get(task.reducer)
        counted = {entry.key: entry.num_included for entry in vote.digests}.get(task.key) if vote else most
        total += most
        included += min(most, counted or 0)
    return included / total if total else 1.0
