"""What the votes at the end of a pass come to: a pure function, so that every coordinator decides alike.

The rule: a round commits only what every voter holds with one digest. A task that somebody lacks, or holds with another
digest, is lost and reduced again by others. Whoever does not vote is gone: its contribution stays in what was reduced
before it went, and it has to fetch the state when it comes back.

That is also what makes it safe to lose the coordinator. Before it can have told anybody to commit, everybody who was
left held all of it; the next coordinator hears the same digests from them and can only decide the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trainer.collective.messages import Commit, Decision, Plan, TaskDigest, Vote, Why
from trainer.collective.planning import next_plan

__all__ = ["decide_round"]


def decide_round(
    plan: Plan,
    votes: Mapping[str, Vote],
    *,
    num_members: int,
    max_passes: int,
    findings: Sequence[Why] = (),
) -> Decision:
    """Commit, another pass, or the end of the round.

    Args:
        plan: the pass the votes are of.
        votes: of the members that are left; at least one.
        num_members: how many the round was agreed among.
        max_passes: give up after so many.
        findings: what gradient validation says, for the report.
    """
    held = {peer_id: {entry.key: entry.digest for entry in vote.digests} for peer_id, vote in votes.items()}
    lost = {task.key for task in plan.tasks if not _agreed(task.key, held)}
    if not lost:
        return _commit(plan, votes, tuple(sorted(votes)), num_members, findings)
    if plan.pass_index + 1 < max_passes:
        reducers = _reliable(plan, votes, held)
        return Decision(kind="again", plan=next_plan(plan, lost, sorted(votes), reducers))
    return _last_resort(plan, votes, held, num_members, findings)


def _agreed(key: str, held: Mapping[str, Mapping[str, str | None]]) -> bool:
    digests = {digests.get(key) for digests in held.values()}
    return len(digests) == 1 and None not in digests


def _reliable(plan: Plan, votes: Mapping[str, Vote], held: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """Voters whom nobody missed a result of, and who told everybody the same; all voters, if there is none."""
    blamed = {peer_id for vote in votes.values() for peer_id in vote.failed}
    for task in plan.tasks:
        if len({digests.get(task.key) for digests in held.values()} - {None}) > 1:
            blamed.add(task.reducer)
    return [peer_id for peer_id in votes if peer_id not in blamed] or list(votes)


def _last_resort(
    plan: Plan,
    votes: Mapping[str, Vote],
    held: Mapping[str, Mapping[str, str | None]],
    num_members: int,
    findings: Sequence[Why],
) -> Decision:
    """No more passes: most of the voters may hold the same all the same; the others fetch the state afterwards."""
    whole = {
        peer_id: tuple(digests.get(task.key) for task in plan.tasks)
        for peer_id, digests in held.items()
        if all(digests.get(task.key) for task in plan.tasks)
    }
    if whole:
        counts = Counter(whole.values())
        most = min(counts, key=lambda result: (-counts[result], str(result)))
        members = tuple(sorted(peer_id for peer_id, result in whole.items() if result == most))
        if 2 * len(members) > len(votes):
            return _commit(plan, votes, members, num_members, findings)
    return Decision(
        kind="abort",
        reason=f"after {plan.pass_index + 1} passes the {len(votes)} members left do not hold one result",
    )


def _commit(
    plan: Plan, votes: Mapping[str, Vote], members: tuple[str, ...], num_members: int, findings: Sequence[Why]
) -> Decision:
    keys = {task.key for task in plan.tasks}
    return Decision(
        kind="commit",
        commit=Commit(
            plan=plan,
            members=members,
            digests=tuple(
                TaskDigest(key=entry.key, digest=entry.digest)
                for entry in votes[members[0]].digests
                if entry.key in keys
            ),
            dropped=_dropped(votes),
            completeness=_completeness(plan, votes, num_members),
            findings=tuple(findings),
        ),
    )


def _completeness(plan: Plan, votes: Mapping[str, Vote], num_members: int) -> float:
    """Share of all members' parts that went into the result; of a reducer that is gone, all are supposed to have."""
    included = total = 0
    for task in plan.tasks:
        most = num_members * (task.last_part - task.first_part)
        vote = votes.get(task.reducer)
        said = {entry.key: entry.num_included for entry in vote.digests}.get(task.key) if vote else most
        total += most
        included += min(most, said or 0)
    return included / total if total else 1.0


def _dropped(votes: Mapping[str, Vote]) -> tuple[Why, ...]:
    """One reason for each member that anything was left out of, in the order of their ids."""
    reasons: dict[str, str] = {}
    for peer_id in sorted(votes):
        for why in votes[peer_id].dropped:
            reasons.setdefault(why.peer_id, why.reason)
    return tuple(Why(peer_id=peer_id, reason=reasons[peer_id]) for peer_id in sorted(reasons))
