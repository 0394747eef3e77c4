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


def vote_of(plan: Plan, digests: dict[str, str | None], *, failed=(), dropped=(), own: str = "") -> Vote:
    return Vote(
        plan=plan,
        term=0,
        digests=tuple(
            TaskDigest(
                key=task.key,
                digest=digests.get(task.key, RIGHT),
                num_included=4 * (task.last_part - task.first_part) if task.reducer == own else None,
            )
            for task in plan.tasks
        ),
        failed=tuple(failed),
        dropped=tuple(dropped),
    )


OF_FOUR = first_plan(agreement_of(4, 100_000))


def decide(plan, votes, max_passes=4):
    return decide_round(plan, votes, peer_ids=plan.members, max_passes=max_passes)


def agreeing(plan: Plan, **options) -> dict[str, Vote]:
    """All members hold the right result."""
    return {member: vote_of(plan, {}, **options) for member in plan.members}


def test_what_all_hold_is_committed():
    plan = OF_FOUR
    decision = decide(plan, {member: vote_of(plan, {}, own=member) for member in plan.members})
    assert decision.kind == "commit"
    assert decision.commit.members == plan.members
    assert decision.commit.completeness == 1.0


def test_what_a_dead_reducer_left_is_reduced_again_by_others():
    plan = OF_FOUR
    dead, *alive = plan.members
    lost = [task.key for task in plan.tasks if task.reducer == dead]
    decision = decide(plan, {member: vote_of(plan, dict.fromkeys(lost), failed=[dead]) for member in alive})
    assert decision.kind == "again"
    assert decision.plan.members == tuple(alive)
    assert {task.reducer for task in decision.plan.fresh} == set(alive)


def test_a_result_that_only_some_have_is_lost_too():
    plan = OF_FOUR
    dead, first, *others = plan.members
    lost = next(task.key for task in plan.tasks if task.reducer == dead)
    votes = {member: vote_of(plan, {lost: None}, failed=[dead]) for member in others} | {first: vote_of(plan, {})}
    assert decide(plan, votes).kind == "again"


def test_one_who_accuses_all_others_does_not_get_their_work():
    plan = OF_FOUR
    liar, *honest = plan.members
    votes = {member: vote_of(plan, {}) for member in honest}
    votes[liar] = vote_of(plan, {task.key: None for task in plan.tasks if task.reducer != liar}, failed=honest)
    decision = decide(plan, votes)
    assert decision.kind == "again"
    assert {task.reducer for task in decision.plan.fresh} == set(plan.members)
    following = decision.plan
    again = {member: vote_of(following, {}) for member in honest}
    again[liar] = vote_of(following, {task.key: None for task in following.fresh}, failed=honest)
    settled = decide(following, again)
    assert settled.kind == "commit"
    assert settled.commit.members == tuple(honest)


def test_a_reducer_that_tells_everybody_something_else_does_not_reduce_again():
    plan = OF_FOUR
    liar = plan.members[0]
    key = next(task.key for task in plan.tasks if task.reducer == liar)
    votes = {member: vote_of(plan, {key: str(number) * 64}) for number, member in enumerate(plan.members)}
    decision = decide(plan, votes)
    assert decision.kind == "again"
    assert liar not in {task.reducer for task in decision.plan.fresh}
    assert liar in decision.plan.members


def test_two_halves_of_a_round_cannot_both_commit():
    plan = OF_FOUR
    halves = [plan.members[:2], plan.members[2:]]
    kinds = [decide(plan, {member: vote_of(plan, {}) for member in half}).kind for half in halves]
    assert sorted(kinds) == ["abort", "commit"]


def test_a_vote_that_names_a_task_twice_spoils_nothing():
    plan = OF_FOUR
    votes = agreeing(plan)
    first = votes[plan.members[0]]
    twice = (TaskDigest(key=plan.tasks[0].key, digest=WRONG), *first.digests)
    votes[plan.members[0]] = first.model_copy(update={"digests": twice})
    commit = decide(plan, votes).commit
    assert [entry.key for entry in commit.digests] == [task.key for task in plan.tasks]
    assert {entry.digest for entry in commit.digests} == {RIGHT}


def test_accusations_of_strangers_are_not_passed_on():
    plan = OF_FOUR
    stranger = MemberReason(peer_id="f" * 64, reason="made up")
    assert decide(plan, agreeing(plan, dropped=[stranger])).commit.dropped == ()


@pytest.mark.parametrize(("num_others", "kind"), [(1, "commit"), (2, "abort")])
def test_after_the_last_pass_most_may_commit_without_the_others_but_half_may_not(num_others, kind):
    plan = OF_FOUR
    others = plan.members[-num_others:]
    votes = agreeing(plan) | {member: vote_of(plan, {task.key: WRONG for task in plan.tasks}) for member in others}
    decision = decide(plan, votes, max_passes=1)
    assert decision.kind == kind
    assert decision.commit is None or decision.commit.members == plan.members[:-num_others]
    lacking = agreeing(plan) | {member: vote_of(plan, {plan.tasks[0].key: None}) for member in others}
    assert decide(plan, lacking, max_passes=1).kind == kind


def test_the_report_says_who_was_left_out_and_how_much_is_missing():
    plan = OF_FOUR
    votes = {member: vote_of(plan, {}, own=member) for member in plan.members[1:]}
    why = MemberReason(peer_id=plan.members[0], reason="not finite")
    votes[plan.members[1]] = vote_of(plan, {}, own=plan.members[1], dropped=[why])
    commit = decide(plan, votes).commit
    assert commit.dropped == (why,)
    assert decide(plan, agreeing(plan)).commit.completeness == 0.0


@given(st.integers(2, 6), st.data())
def test_only_what_every_voter_holds_is_ever_committed(num_members, data):
    plan = first_plan(agreement_of(num_members, 100_000))
    voters = data.draw(st.lists(st.sampled_from(plan.members), min_size=1, unique=True))
    digest = st.sampled_from([RIGHT, RIGHT, RIGHT, WRONG, None])
    votes = {
        member: vote_of(plan, {task.key: data.draw(digest) for task in plan.tasks}, own=member) for member in voters
    }
    max_passes = data.draw(st.integers(1, 3))
    decision = decide(plan, votes, max_passes=max_passes)
    assert decision == decide(plan, dict(reversed(votes.items())), max_passes=max_passes)
    if decision.kind == "commit":
        committed = {entry.key: entry.digest for entry in decision.commit.digests}
        assert set(committed) == {task.key for task in plan.tasks}
        for member in decision.commit.members:
            assert {entry.key: entry.digest for entry in votes[member].digests} == committed
        assert 2 * len(decision.commit.members) > len(votes)
        assert 2 * len(decision.commit.members) >= num_members
    if decision.kind == "again":
        assert set(decision.plan.members) == set(voters)


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


def commit_vote(own_id: str, outcome_at: Callable[[str], CommitDecision | None], timeout_s: float = 5.0) -> CommitVote:
    async def probe(peer_id: str) -> tuple[bool, CommitDecision | None]:
        return True, outcome_at(peer_id)

    return CommitVote(AGREEMENT, settings_of(own_id, stall_timeout_s=timeout_s / 4), probe)


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
    ("claimed", "believed"),
    [(commit(), True), (commit(digests=digests("b")), False), (commit(digests=(), members=(LIAR,)), False)],
)
def test_what_a_member_says_was_committed_is_believed_if_the_voters_hold_it(claimed: Commit, believed: bool) -> None:
    outcome = CommitDecision(kind="commit", commit=claimed)

    async def decided() -> CommitDecision:
        votes = commit_vote(SUCCESSOR, lambda peer: outcome if peer == LIAR else None, timeout_s=2.0)
        async with asyncio.timeout(10.0):
            decision, _ = await asyncio.gather(
                votes.vote(SUCCESSOR, vote(), None), votes.vote(COORDINATOR, vote(), None)
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
def test_one_vote_puts_no_plan_of_its_own_in_place_of_the_coordinator_s(
    own_id: str, members: tuple[str, ...], taken_over: bool
) -> None:
    following = next_plan(PLAN, {PLAN.tasks[0].key}, sorted(members), sorted(members))

    async def decided() -> CommitDecision:
        votes = commit_vote(own_id, lambda _peer: None)
        liar = asyncio.create_task(votes.vote(LIAR, vote(following, "b"), None))
        await asyncio.sleep(0)
        others = [asyncio.create_task(votes.vote(peer, vote(), None)) for peer in (COORDINATOR, SUCCESSOR)]
        async with asyncio.timeout(10.0):
            if not taken_over:
                assert await liar == CommitDecision(kind="again", plan=PLAN)
                await votes.vote(LIAR, vote(), None)
            decision = await others[0]
        for task in (liar, *others):
            task.cancel()
        votes.close()
        return decision

    decision = asyncio.run(decided())
    assert decision == CommitDecision(kind="again", plan=following) if taken_over else decision.kind == "commit"
