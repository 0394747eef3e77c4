"""Votes and outcomes that no honest member sends: none of them decides a round for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.trainer.collective.test_planning import agreement_of
from trainer.collective.checking import check_commit
from trainer.collective.commit_vote import CommitVote
from trainer.collective.messages import Commit, Decision, Plan, TaskDigest, Vote
from trainer.collective.planning import first_plan, next_plan
from trainer.errors import RefusedError

AGREEMENT = agreement_of(3, 1_000_000)
PLAN = first_plan(AGREEMENT)
COORDINATOR, SUCCESSOR, LIAR = AGREEMENT.coordinator, *sorted(set(AGREEMENT.peer_ids) - {AGREEMENT.coordinator})


def digests(letter: str, plan: Plan = PLAN) -> tuple[TaskDigest, ...]:
    return tuple(TaskDigest(key=task.key, digest=letter * 64, num_included=1) for task in plan.tasks)


def vote(plan: Plan = PLAN, letter: str = "a") -> Vote:
    return Vote(plan=plan, term=0, digests=digests(letter, plan), failed=(), dropped=())


def commit(**changes: object) -> Commit:
    honest = Commit(
        plan=PLAN, members=AGREEMENT.peer_ids, digests=digests("a"), dropped=(), completeness=1.0, findings=()
    )
    return honest.model_copy(update=changes)


def ballot(own_id: str, said: Callable[[str], Decision | None], timeout_s: float = 5.0) -> CommitVote:
    async def probe(peer_id: str) -> tuple[bool, Decision | None]:
        return True, said(peer_id)

    return CommitVote(
        AGREEMENT, own_id, probe, lambda _sums: (), max_passes=4, timeout_s=timeout_s, patience_s=timeout_s
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"digests": ()},
        {"digests": digests("a")[1:]},
        {"digests": (*digests("a"), *digests("a")[:1])},
        {"digests": (*digests("a")[1:], TaskDigest(key=PLAN.tasks[0].key, digest=None))},
        {"members": ()},
        {"members": (LIAR,)},
        {"members": AGREEMENT.peer_ids[::-1]},
        {"members": ("f" * 64, LIAR, SUCCESSOR)},
        {"plan": PLAN.model_copy(update={"tasks": ()})},
        {"plan": PLAN.model_copy(update={"agreement": "f" * 64})},
    ],
)
def test_a_commit_that_no_votes_can_have_made_is_refused(changes: dict[str, object]) -> None:
    check_commit(commit(), AGREEMENT, max_passes=4)
    with pytest.raises(RefusedError):
        check_commit(commit(**changes), AGREEMENT, max_passes=4)


@pytest.mark.parametrize(
    ("told", "believed"),
    [(commit(), True), (commit(digests=digests("b")), False), (commit(digests=(), members=(LIAR,)), False)],
)
def test_what_a_member_says_was_committed_is_believed_if_the_voters_hold_it(told: Commit, believed: bool) -> None:
    outcome = Decision(kind="commit", commit=told)

    async def decided() -> Decision:
        votes = ballot(SUCCESSOR, lambda peer: outcome if peer == LIAR else None, timeout_s=2.0)
        async with asyncio.timeout(10.0):
            decision, _ = await asyncio.gather(
                votes.vote(SUCCESSOR, vote(), None), votes.vote(COORDINATOR, vote(), None)
            )
        votes.close()
        return decision

    decision = asyncio.run(decided())
    assert decision.commit is not None
    assert (decision.commit == told) == believed
    if not believed:
        assert decision.commit.members == tuple(sorted((COORDINATOR, SUCCESSOR)))


@pytest.mark.parametrize(
    ("own_id", "members", "taken_over"),
    [
        (COORDINATOR, PLAN.members, False),
        (COORDINATOR, (LIAR, SUCCESSOR), False),
        (SUCCESSOR, (LIAR,), False),
        (SUCCESSOR, PLAN.members, True),
    ],
)
def test_one_vote_puts_no_plan_of_its_own_in_place_of_the_coordinator_s(
    own_id: str, members: tuple[str, ...], taken_over: bool
) -> None:
    following = next_plan(PLAN, {PLAN.tasks[0].key}, sorted(members), sorted(members))

    async def decided() -> Decision:
        votes = ballot(own_id, lambda _peer: None)
        liar = asyncio.create_task(votes.vote(LIAR, vote(following, "b"), None))
        await asyncio.sleep(0)
        others = [asyncio.create_task(votes.vote(peer, vote(), None)) for peer in (COORDINATOR, SUCCESSOR)]
        async with asyncio.timeout(10.0):
            if not taken_over:
                assert await liar == Decision(kind="again", plan=PLAN)
                await votes.vote(LIAR, vote(), None)
            decision = await others[0]
        for task in (liar, *others):
            task.cancel()
        votes.close()
        return decision

    decision = asyncio.run(decided())
    assert decision == Decision(kind="again", plan=following) if taken_over else decision.kind == "commit"
