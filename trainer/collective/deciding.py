"""What the votes at the end of a pass come to: a pure function, so that every coordinator decides alike.

The rule: a round commits only what every voter holds with one digest (after further passes: what most of them hold),
and only with a majority of the agreed members. A task that somebody lacks, or holds with another digest, is lost and
reduced again by others. Whoever does not vote is gone: its contribution stays in what was reduced before it went, and
it has to fetch the state when it comes back.

That is also what makes it safe to lose the coordinator. Before it can have told anybody to commit, everybody who was
left held all of it; the next coordinator hears the same digests from them and can only decide the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from trainer.collective.messages import Commit, Decision, Plan, TaskDigest, Vote, Why
from trainer.collective.planning import next_plan

__all__ = ["decide_round", "is_majority"]


def decide_round(
    plan: Plan,
    votes: Mapping[str, Vote],
    *,
    peer_ids: Sequence[str],
    max_passes: int,
    findings: Sequence[Why] = (),
) -> Decision:
    """Commit, another pass, or the end of the round.

    Args:
        plan: the pass the votes are of.
        votes: of the members that are left; at least one.
        peer_ids: the members the round was agreed among.
        max_passes: give up after so many.
        findings: what gradient validation says, for the report.
    """
    held = {peer_id: {entry.key: entry.digest for entry in vote.digests} for peer_id, vote in votes.items()}
    lost = {task.key for task in plan.tasks if not _agreed(task.key, held)}
    if not lost and not is_majority(votes, peer_ids):
        return Decision(kind="abort", reason=f"only {len(votes)} of {len(peer_ids)} members are left: no majority")
    if not lost:
        return _commit(plan, votes, tuple(sorted(votes)), peer_ids, findings)
    if plan.pass_index + 1 >= max_passes or (plan.pass_index > 0 and _few_lack_it(plan, held)):
        return _last_resort(plan, votes, held, peer_ids, findings)
    reducers = _reliable(plan, votes, held)
    return Decision(kind="again", plan=next_plan(plan, lost, sorted(votes), reducers))


def is_majority(members: Collection[str], peer_ids: Sequence[str]) -> bool:
    """Whether these may commit: more than half of the agreed members, or half of them with the lowest id.

    Two parts of a round that cannot see each other are never both a majority, so they cannot commit two results.
    """
    return 2 * len(members) > len(peer_ids) or (2 * len(members) == len(peer_ids) and min(peer_ids) in members)


def _agreed(key: str, held: Mapping[str, Mapping[str, str | None]]) -> bool:
    digests = {digests.get(key) for digests in held.values()}
    return len(digests) == 1 and None not in digests


def _few_lack_it(plan: Plan, held: Mapping[str, Mapping[str, str | None]]) -> bool:
    """Whether more than half hold all of it alike: then it is the others who cannot, or will not, get it."""
    return 2 * len(_largest_party(plan, held)) > len(held)


def _largest_party(plan: Plan, held: Mapping[str, Mapping[str, str | None]]) -> tuple[str, ...]:
    """The most voters who hold one whole result."""
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


def _reliable(plan: Plan, votes: Mapping[str, Vote], held: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """Voters whom no majority missed a result of, and who told a majority one thing; all voters, if there is none.

    One accuser is not enough: whoever names all others would be left to reduce everything himself.
    """
    accusers = Counter(peer_id for vote in votes.values() for peer_id in set(vote.failed))
    blamed = {peer_id for peer_id, count in accusers.items() if 2 * count > len(votes)}
    for task in plan.tasks:
        said = Counter(digest for digests in held.values() if (digest := digests.get(task.key)) is not None)
        if len(said) > 1 and 2 * max(said.values()) <= len(votes):
            blamed.add(task.reducer)
    return [peer_id for peer_id in votes if peer_id not in blamed] or list(votes)


def _last_resort(
    plan: Plan,
    votes: Mapping[str, Vote],
    held: Mapping[str, Mapping[str, str | None]],
    peer_ids: Sequence[str],
    findings: Sequence[Why],
) -> Decision:
    """No more passes: most of the voters may hold the same all the same; the others fetch the state afterwards."""
    members = _largest_party(plan, held)
    if 2 * len(members) > len(votes) and is_majority(members, peer_ids):
        return _commit(plan, votes, members, peer_ids, findings)
    return Decision(
        kind="abort",
        reason=f"after {plan.pass_index + 1} passes the {len(votes)} members left do not hold one result",
    )


def _commit(
    plan: Plan,
    votes: Mapping[str, Vote],
    members: tuple[str, ...],
    peer_ids: Sequence[str],
    findings: Sequence[Why],
) -> Decision:
    held = {entry.key: entry.digest for entry in votes[members[0]].digests}
    return Decision(
        kind="commit",
        commit=Commit(
            plan=plan,
            members=members,
            digests=tuple(TaskDigest(key=task.key, digest=held[task.key]) for task in plan.tasks),
            dropped=_dropped(votes, peer_ids),
            completeness=_completeness(plan, votes, len(peer_ids)),
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


def _dropped(votes: Mapping[str, Vote], peer_ids: Sequence[str]) -> tuple[Why, ...]:
    """One reason for each member that anything was left out of, in the order of their ids."""
    reasons: dict[str, str] = {}
    for peer_id in sorted(votes):
        for why in votes[peer_id].dropped:
            reasons.setdefault(why.peer_id, why.reason)
    return tuple(Why(peer_id=peer_id, reason=reasons[peer_id]) for peer_id in sorted(peer_ids) if peer_id in reasons)
