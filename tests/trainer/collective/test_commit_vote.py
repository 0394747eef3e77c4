"""Votes on a round's result: what they come to, and that no dishonest one decides for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.round_actor import agreement_of, settings_of
from trainer.collective.commit_vote import CommitVote, decide_round
from trainer.collective.messages import Commit, CommitDecision, MemberReason, Plan, TaskDigest, Vote
from trainer.collective.planning import check_commit, first_plan, next_plan
from trainer.errors import RefusedError

RIGHT, WRONG = "a" * 64, "b" * 64
AGREEMENT = agreement_of(3, 1_000_000)
PLAN = first_plan(AGREEMENT)
COORDINATOR, SUCCESSOR, LIAR = AGREEMENT.coordinator, *sorted(set(AGREEMENT.peer_ids) - {AGREEMENT.coordinator})
OF_FOUR = first_plan(agreement_of(4, 100_000))
FIRST, *OTHERS = OF_FOUR.members
THEIRS = next(task.key for task in OF_FOUR.tasks if task.reducer == FIRST)


def vote_of(plan: Plan, digests: dict[str, str | None], *, failed=(), dropped=(), own: str = "") -> Vote:
    entries = tuple(
        TaskDigest(
            key=task.key,
            digest=digests.get(task.key, RIGHT),
            num_included=4 * (task.last_part - task.first_part) if task.reducer == own else None,
        )
        for task in plan.tasks
    )
    return Vote(plan=plan, term=0, digests=entries, failed=tuple(failed), dropped=tuple(dropped))


def decide(votes: dict[str, Vote], max_passes: int = 4, plan: Plan = OF_FOUR) -> CommitDecision:
    return decide_round(plan, votes, peer_ids=plan.members, max_passes=max_passes)


def agreeing(members=OF_FOUR.members, plan: Plan = OF_FOUR, **options) -> dict[str, Vote]:
    """These members hold the right result."""
    return {member: vote_of(plan, {}, **options) for member in members}


def reducers(decision: CommitDecision) -> set[str]:
    assert decision.kind == "again" and decision.plan is not None
    return {task.reducer for task in decision.plan.fresh}


def test_what_all_hold_is_committed_and_the_report_says_what_is_missing() -> None:
    whole = decide({member: vote_of(OF_FOUR, {}, own=member) for member in OF_FOUR.members})
    assert (whole.kind, whole.commit.members, whole.commit.completeness) == ("commit", OF_FOUR.members, 1.0)
    assert decide(agreeing()).commit.completeness == 0.0
    why, made_up = (MemberReason(peer_id=peer_id, reason="not finite") for peer_id in (FIRST, "f" * 64))
    votes = {member: vote_of(OF_FOUR, {}, own=member, dropped=[why, made_up]) for member in OTHERS}
    assert decide(votes).commit.dropped == (why,), "strangers are not passed on"


def test_what_a_dead_reducer_left_is_reduced_again_by_others() -> None:
    decision = decide({member: vote_of(OF_FOUR, {THEIRS: None}, failed=[FIRST]) for member in OTHERS})
    assert reducers(decision) == set(OTHERS) and decision.plan.members == tuple(OTHERS)
    some_have_it = {member: vote_of(OF_FOUR, {THEIRS: None}, failed=[FIRST]) for member in OTHERS[1:]}
    assert decide(some_have_it | agreeing(OTHERS[:1])).kind == "again"


def test_one_who_accuses_all_others_does_not_get_their_work() -> None:
    def accused(plan: Plan) -> CommitDecision:
        lacking = {task.key: None for task in plan.fresh if task.reducer != FIRST or plan is not OF_FOUR}
        return decide(agreeing(OTHERS, plan) | {FIRST: vote_of(plan, lacking, failed=OTHERS)}, plan=plan)

    decision = accused(OF_FOUR)
    assert reducers(decision) == set(OF_FOUR.members)
    settled = accused(decision.plan)
    assert settled.kind == "commit" and settled.commit.members == tuple(OTHERS)


def test_a_reducer_that_tells_everybody_something_else_does_not_reduce_again() -> None:
    told = enumerate(OF_FOUR.members)
    decision = decide({member: vote_of(OF_FOUR, {THEIRS: str(number) * 64}) for number, member in told})
    assert FIRST not in reducers(decision) and FIRST in decision.plan.members


def test_two_halves_of_a_round_cannot_both_commit() -> None:
    halves = [OF_FOUR.members[:2], OF_FOUR.members[2:]]
    assert sorted(decide(agreeing(half)).kind for half in halves) == ["abort", "commit"]


def test_a_vote_that_names_a_task_twice_spoils_nothing() -> None:
    votes = agreeing()
    twice = (TaskDigest(key=OF_FOUR.tasks[0].key, digest=WRONG), *votes[FIRST].digests)
    votes[FIRST] = votes[FIRST].model_copy(update={"digests": twice})
    expected = [(task.key, RIGHT) for task in OF_FOUR.tasks]
    assert [(entry.key, entry.digest) for entry in decide(votes).commit.digests] == expected


@pytest.mark.parametrize(("num_others", "kind"), [(1, "commit"), (2, "abort")])
@pytest.mark.parametrize("found", [dict.fromkeys([task.key for task in OF_FOUR.tasks], WRONG), {THEIRS: None}])
def test_after_the_last_pass_most_may_commit_without_the_others_but_half_may_not(num_others, kind, found) -> None:
    others = OF_FOUR.members[-num_others:]
    decision = decide(agreeing() | {member: vote_of(OF_FOUR, found) for member in others}, max_passes=1)
    assert decision.kind == kind
    assert decision.commit is None or decision.commit.members == OF_FOUR.members[:-num_others]


@given(st.integers(2, 6), st.data())
def test_only_what_every_voter_holds_is_ever_committed(num_members, data):
    plan = first_plan(agreement_of(num_members, 100_000))
    voters = data.draw(st.lists(st.sampled_from(plan.members), min_size=1, unique=True))
    digest = st.sampled_from([RIGHT, RIGHT, RIGHT, WRONG, None])
    votes = {member: vote_of(plan, {task.key: data.draw(digest) for task in plan.tasks}) for member in voters}
    max_passes = data.draw(st.integers(1, 3))
    decision = decide(votes, max_passes, plan)
    assert decision == decide(dict(reversed(votes.items())), max_passes, plan)
    if decision.kind == "commit":
        committed = {entry.key: entry.digest for entry in decision.commit.digests}
        assert set(committed) == {task.key for task in plan.tasks}
        for member in decision.commit.members:
            assert {entry.key: entry.digest for entry in votes[member].digests} == committed
        assert 2 * len(decision.commit.members) > len(votes)
        assert 2 * len(decision.commit.members) >= num_members
    if decision.kind == "again":
        assert set(decision.plan.members) == set(voters)


RIGHT_DIGESTS = vote_of(PLAN, {}).digests
WRONG_DIGESTS = vote_of(PLAN, dict.fromkeys([task.key for task in PLAN.tasks], WRONG)).digests


def commit(**changes: object) -> Commit:
    facts = {"plan": PLAN, "members": AGREEMENT.peer_ids, "digests": RIGHT_DIGESTS}
    return Commit(**facts, dropped=(), completeness=1.0, findings=()).model_copy(update=changes)


def commit_vote(own_id: str, outcome_at: Callable[[str], CommitDecision | None], timeout_s: float = 5.0) -> CommitVote:
    async def probe(peer_id: str) -> tuple[bool, CommitDecision | None]:
        return True, outcome_at(peer_id)

    return CommitVote(AGREEMENT, settings_of(own_id, stall_timeout_s=timeout_s / 4), probe)


@pytest.mark.parametrize(
    "changes",
    [
        {"digests": RIGHT_DIGESTS[1:]},
        {"digests": (*RIGHT_DIGESTS, *RIGHT_DIGESTS[:1])},
        {"digests": (*RIGHT_DIGESTS[1:], TaskDigest(key=PLAN.tasks[0].key, digest=None))},
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
    ("claimed", "believed"),
    [(commit(), True), (commit(digests=WRONG_DIGESTS), False), (commit(digests=(), members=(LIAR,)), False)],
)
def test_what_a_member_says_was_committed_is_believed_if_the_voters_hold_it(claimed: Commit, believed: bool) -> None:
    outcome = CommitDecision(kind="commit", commit=claimed)

    async def decided() -> CommitDecision:
        votes = commit_vote(SUCCESSOR, lambda peer: outcome if peer == LIAR else None, timeout_s=2.0)
        async with asyncio.timeout(10.0):
            decision, _ = await asyncio.gather(
                votes.vote(SUCCESSOR, vote_of(PLAN, {}), None), votes.vote(COORDINATOR, vote_of(PLAN, {}), None)
            )
        votes.close()
        return decision

    decision = asyncio.run(decided())
    assert decision.commit is not None
    assert (decision.commit == claimed) == believed
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
def test_one_vote_puts_no_plan_of_its_own_in_place_of_the_coordinator_s(own_id, members, taken_over) -> None:
    following = next_plan(PLAN, {PLAN.tasks[0].key}, sorted(members), sorted(members))

    async def decided() -> CommitDecision:
        votes = commit_vote(own_id, lambda _peer: None)
        liar = asyncio.create_task(votes.vote(LIAR, vote_of(following, {following.tasks[0].key: WRONG}), None))
        await asyncio.sleep(0)
        others = [asyncio.create_task(votes.vote(peer, vote_of(PLAN, {}), None)) for peer in (COORDINATOR, SUCCESSOR)]
        async with asyncio.timeout(10.0):
            if not taken_over:
                assert await liar == CommitDecision(kind="again", plan=PLAN)
                await votes.vote(LIAR, vote_of(PLAN, {}), None)
            decision = await others[0]
        for task in (liar, *others):
            task.cancel()
        votes.close()
        return decision

    decision = asyncio.run(decided())
    assert decision == CommitDecision(kind="again", plan=following) if taken_over else decision.kind == "commit"
