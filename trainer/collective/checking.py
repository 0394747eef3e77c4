"""What a member accepts from others: coordinators and voters are nobody special.

An agreement or a plan that this node would not have made from the same facts is refused: whoever coordinates, or
takes over, can exclude and delay, but neither hand himself the work of the others nor count for more than he may.
"""

from __future__ import annotations

from trainer.collective.deciding import is_majority
from trainer.collective.messages import Agreement, Commit, Plan
from trainer.collective.planning import cut_values, next_plan
from trainer.errors import RefusedError

__all__ = ["check_agreement", "check_commit", "check_plan", "may_follow"]

_ROUNDING = 1e-9


def check_agreement(
    agreement: Agreement,
    *,
    own_id: str,
    round_index: int,
    state_digest: str,
    num_values: int,
    own_weight: float,
    own_progress: float,
    vocabulary_rows: int,
    values_per_part: int,
    max_weight_ratio: float,
) -> None:
    """Refuses an agreement that is not about this node's state, or not fair.

    Args:
        agreement: as the coordinator gave it.
        own_id: this node.
        round_index: the round it goes to.
        state_digest: of its state.
        num_values: of its vector.
        own_weight: what its own contribution weighs before weights are capped.
        own_progress: share of the round's intended work that is in its contribution.
        vocabulary_rows: the most rows it could have.
        values_per_part: as many as fit a message.
        max_weight_ratio: of the run.

    Raises:
        RefusedError: ``agreement``, and what is wrong with it.
    """
    peer_ids = list(agreement.peer_ids)
    if (agreement.round_index, agreement.state_digest, agreement.num_values) != (round_index, state_digest, num_values):
        raise _refused(round_index, "it is not about this node's state")
    if own_id not in peer_ids or peer_ids != sorted(set(peer_ids)):
        raise _refused(round_index, "its members are not a sorted list with this node in it")
    if agreement.part_values != cut_values(num_values, len(peer_ids), values_per_part):
        raise _refused(round_index, f"parts of {agreement.part_values} values are not what so many members make")
    if agreement.vocabulary_rows > vocabulary_rows:
        raise _refused(round_index, f"{agreement.vocabulary_rows} rows of vocabulary are more than this node knows of")
    weights = [member.weight for member in agreement.members]
    positive = sorted(weight for weight in weights if weight > 0)
    if positive and positive[-1] > max_weight_ratio * positive[(len(positive) - 1) // 2] * (1 + _ROUNDING):
        raise _refused(round_index, "a member weighs more than it may")
    if weights[peer_ids.index(own_id)] < min(own_weight, max(weights)) * (1 - _ROUNDING):
        raise _refused(round_index, "this node weighs less than its batches")
    if agreement.members[peer_ids.index(own_id)].progress != own_progress:
        raise _refused(round_index, "it says another progress of this node than this node did")


def check_plan(plan: Plan, agreement: Agreement, *, max_passes: int) -> None:
    """Refuses a plan that does not give every part to one member.

    Raises:
        RefusedError: ``plan``, and what is wrong with it.
    """
    members = set(agreement.peer_ids)
    parts = sorted((task.first_part, task.last_part) for task in plan.tasks)
    ends = [0, *(last for _, last in parts)]
    whole = all(first == before < last for (first, last), before in zip(parts, ends, strict=False))
    if (
        plan.agreement != agreement.fingerprint()
        or plan.pass_index >= max_passes
        or not set(plan.members) | {task.reducer for task in plan.tasks} <= members
        or len({task.key for task in plan.tasks}) != len(plan.tasks)
        or not whole
        or ends[-1] != agreement.num_parts
    ):
        raise RefusedError("plan", f"round {agreement.round_index}: a plan that does not give each part to one member")


def check_commit(commit: Commit, agreement: Agreement, *, max_passes: int) -> None:
    """Refuses a commit that no coordinator can have made of the members' votes.

    Raises:
        RefusedError: ``commit`` or ``plan``, and what is wrong with it.
    """
    check_plan(commit.plan, agreement, max_passes=max_passes)
    keys = [entry.key for entry in commit.digests if entry.digest is not None]
    members = list(commit.members)
    if (
        members != sorted(set(members))
        or not set(members) <= set(agreement.peer_ids)
        or not is_majority(members, agreement.peer_ids)
        or len(keys) != len(commit.digests)
        or sorted(keys) != sorted(task.key for task in commit.plan.tasks)
    ):
        raise RefusedError(
            "commit", f"round {agreement.round_index}: a commit without a majority, or without a digest of each task"
        )


def may_follow(plan: Plan, before: Plan) -> bool:
    """Whether a plan is what `next_plan` makes of the one before, for at least half of the members as reducers."""
    keys = {task.key for task in plan.tasks}
    lost = {task.key for task in before.tasks} - keys
    reducers = {task.reducer for task in plan.fresh}
    return (
        plan.pass_index == before.pass_index + 1
        and set(plan.members) <= set(before.members)
        and bool(reducers)
        and (2 * len(reducers) >= len(plan.members) or len(reducers) == _num_parts(plan))
        and plan == next_plan(before, lost, plan.members, sorted(reducers))
    )


def _num_parts(plan: Plan) -> int:
    return sum(task.last_part - task.first_part for task in plan.fresh)


def _refused(round_index: int, why: str) -> RefusedError:
    return RefusedError("agreement", f"round {round_index}: the coordinator's agreement is refused: {why}")
