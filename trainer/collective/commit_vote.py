"""The coordinator's second half: the commit vote, and the decision that goes out to all who voted.

A member whose vote is missing is asked whether it is there. One that does not answer is not waited for, and one that
already knows the outcome (from a coordinator that is gone) settles it for all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from trainer.aggregation import Moments
from trainer.collective.checking import check_commit, check_plan, may_follow
from trainer.collective.deciding import decide_round, is_majority
from trainer.collective.messages import Agreement, Commit, Decision, Plan, Vote, Why, short
from trainer.collective.planning import first_plan
from trainer.errors import RefusedError

__all__ = ["CommitVote", "Probe"]

logger = logging.getLogger(__name__)

Probe = Callable[[str], Awaitable[tuple[bool, Decision | None]]]
"""Asks a member whether it is there, and for the outcome it knows."""

Examine = Callable[[Sequence[Moments]], tuple[Why, ...]]
"""Makes findings of everybody's sums (gradient validation)."""

_PROBE_INTERVAL_S = 0.5
_LOOK_EVERY_S = 0.25


class CommitVote:
    """One round's votes on the node that coordinates it, or has taken over.

    Args:
        agreement: of the round.
        own_id: this node; whoever coordinates from the start knows all plans there are and takes none over.
        probe: asks a member whether it is there.
        examine: findings for the report.
        max_passes: of the run.
        timeout_s: seconds after which a vote is no longer waited for.
        patience_s: the same, at least, once more than half have voted.
    """

    def __init__(
        self,
        agreement: Agreement,
        own_id: str,
        probe: Probe,
        examine: Examine,
        *,
        max_passes: int,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        self._agreement = agreement
        self._is_successor = own_id != agreement.coordinator
        self._probe = probe
        self._examine = examine
        self._max_passes = max_passes
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._plan = first_plan(agreement)
        self._votes: dict[str, Vote] = {}
        self._sums: dict[str, Moments] = {}
        self._absent: set[str] = set()
        self._decisions: dict[str, Decision] = {}
        self._outcome: Decision | None = None
        self._changed = asyncio.Condition()
        self._running: asyncio.Task[None] | None = None

    async def vote(self, peer_id: str, vote: Vote, sums: Moments | None) -> Decision:
        """Takes a vote and waits for what comes of all of them.

        Raises:
            RefusedError: ``unknown``: no member, or a plan of another agreement; ``plan``: one that is none.
        """
        if peer_id not in self._agreement.peer_ids or vote.plan.agreement != self._agreement.fingerprint():
            raise RefusedError("unknown", f"round {self._agreement.round_index} has no such member or agreement")
        if sums is not None:
            self._sums[peer_id] = sums
        check_plan(vote.plan, self._agreement, max_passes=self._max_passes)
        if self._is_successor and self._may_take_over(vote.plan):
            # A coordinator that is gone had gone further than this one knows: its plan is taken over.
            self._plan, self._votes = vote.plan, {}
        plan = self._plan
        if vote.plan != plan:
            return Decision(kind="again", plan=plan) if self._outcome is None else self._outcome
        async with self._changed:
            self._absent.discard(peer_id)
            self._votes[peer_id] = vote
            self._changed.notify_all()
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        digest = plan.fingerprint()
        async with self._changed:
            await self._changed.wait_for(lambda: digest in self._decisions or self._outcome is not None)
        return self._outcome or self._decisions[digest]

    def _may_take_over(self, plan: Plan) -> bool:
        return is_majority(plan.members, self._agreement.peer_ids) and may_follow(plan, self._plan)

    def close(self) -> None:
        """Ends it."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        probing = asyncio.create_task(self._probe_missing())
        try:
            while self._outcome is None:
                plan = self._plan
                await self._wait_for_votes(plan)
                await self._decide(plan)
        except Exception as error:  # whatever it is: nobody may be left waiting
            logger.exception("round %d cannot be decided", self._agreement.round_index)
            async with self._changed:
                self._outcome = Decision(kind="abort", reason=short(f"cannot be decided: {type(error).__name__}"))
                self._changed.notify_all()
        finally:
            probing.cancel()
            with suppress(asyncio.CancelledError):
                await probing

    async def _wait_for_votes(self, plan: Plan) -> None:
        """Until all have voted who are there; who lets more than half of the members wait is waited for no longer."""
        began_s = time.monotonic()
        half_s: float | None = None
        while self._outcome is None and self._plan is plan and set(plan.members) - self._votes.keys() - self._absent:
            now_s = time.monotonic()
            if half_s is None and 2 * len(self._votes) > len(plan.members):
                half_s = now_s
            patience_s = self._timeout_s
            if half_s is not None:
                patience_s = min(patience_s, half_s - began_s + max(self._patience_s, 3 * (half_s - began_s)))
            if now_s > began_s + patience_s:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S), self._changed:
                    await self._changed.wait()

    async def _decide(self, plan: Plan) -> None:
        async with self._changed:
            if self._outcome is not None or self._plan is not plan:
                return
            decision = decide_round(
                plan,
                self._votes,
                peer_ids=self._agreement.peer_ids,
                max_passes=self._max_passes,
                findings=self._examine([self._sums[peer_id] for peer_id in sorted(self._sums)]),
            )
            self._decisions[plan.fingerprint()] = decision
            if decision.plan is not None:
                self._plan, self._votes, self._absent = decision.plan, {}, set()
            else:
                self._outcome = decision
            self._changed.notify_all()

    async def _probe_missing(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            missing = set(self._plan.members) - self._votes.keys() - self._absent
            await asyncio.gather(*(self._probe_one(peer_id) for peer_id in sorted(missing)))

    async def _probe_one(self, peer_id: str) -> None:
        there, outcome = await self._probe(peer_id)
        async with self._changed:
            if outcome is not None and outcome.commit is not None and self._is_borne_out(outcome.commit):
                self._outcome = self._outcome or outcome
            if not there:
                self._absent.add(peer_id)
            self._changed.notify_all()

    def _is_borne_out(self, commit: Commit) -> bool:
        """Whether more than half of those who voted here hold what a member says was committed.

        It was, if ever, after they had told that they hold it; of one member's word nobody can tell.
        """
        try:
            check_commit(commit, self._agreement, max_passes=self._max_passes)
        except RefusedError as error:
            logger.info("not believed: %s", error)
            return False
        committed = {entry.key: entry.digest for entry in commit.digests}
        votes = [{entry.key: entry.digest for entry in vote.digests} for vote in self._votes.values()]
        return 2 * sum(held == committed for held in votes) > len(votes)
