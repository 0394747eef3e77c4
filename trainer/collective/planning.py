"""Who coordinates a round, who reduces which parts, and what a member accepts from a coordinator: pure functions.

A slice is a run of parts of equal length, some for each slice to overlap sending and reducing; pass 0 gives each member
one, and a later pass gives what was lost to the members left. Every member makes the same plan from the same facts and
refuses what it would not have made itself: a coordinator can exclude and delay, but neither take over the others' work
nor count for more than it may.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import groupby
from statistics import median_low

from manifests import canonical_json, sha256_hex
from trainer.aggregation import Weighing, contribution_weight
from trainer.collective.levels.messages import GROUPED_PART_VALUES, GroupedAgreement
from trainer.collective.messages import Agreement, Commit, JoinRequest, PhaseAgreement, Plan, Task
from trainer.collective.quorum import freshness, unaged_weights
from trainer.errors import RefusedError

_PARTS_PER_SLICE = 4
_ALIGNMENT = 1024  # Values; the block of the int8 codec.
_ROUNDING = 1e-9


def cut_values(num_values: int, num_members: int, most_values: int, block_values: int = _ALIGNMENT) -> int:
    """Returns the length of a part: some parts for each slice, whole blocks, none longer than ``most_values``."""
    wanted = -(-num_values // (num_members * _PARTS_PER_SLICE))
    step = max(_ALIGNMENT, block_values)
    return max(step, min(-(-wanted // step) * step, most_values // step * step))


def most_part_values(agreement: Agreement | type[Agreement], values_per_part: int) -> int:
    """Returns the most values of a part; in a round in groups, parts also travel as fp32, 1 MiB at most."""
    kind = agreement if isinstance(agreement, type) else type(agreement)
    return min(values_per_part, GROUPED_PART_VALUES) if issubclass(kind, GroupedAgreement) else values_per_part


def coordinator_order(run_id: str, round_index: int, peer_ids: Collection[str]) -> list[str]:
    """Returns the coordinator of a round and its successors: a new order each round that no node can influence."""

    def rank(peer_id: str) -> bytes:
        return hashlib.sha256(f"{run_id}\0{round_index}\0{peer_id}".encode()).digest()

    return sorted(peer_ids, key=rank)


def precedes(run_id: str, round_index: int, peer_id: str, own_id: str) -> bool:
    """Returns whether another node precedes this one among a round's coordinators."""
    return coordinator_order(run_id, round_index, {peer_id, own_id})[0] == peer_id != own_id


def first_plan(agreement: Agreement) -> Plan:
    """Returns pass 0: each member reduces one slice."""
    return Plan(
        agreement=agreement.fingerprint(),
        pass_index=0,
        members=agreement.taking_part,
        tasks=tuple(_share(0, range(agreement.num_parts), agreement.reducers)),
    )


def following_agreement(
    agreement: Agreement,
    commit: Commit,
    num_values: int,
    state_digest: str,
    most_values: int,
    block_values: int = _ALIGNMENT,
) -> PhaseAgreement:
    """Returns what the second phase of a round goes by, after the first was committed: members and weights stay.

    ``num_values`` are those of the second vector, ``state_digest`` is of what it was made from; ``most_values`` fit a
    message.
    """
    held = sorted((entry.key, entry.digest) for entry in commit.digests)
    return PhaseAgreement(
        **{name: getattr(agreement, name) for name in ("round_index", "attempt", "coordinator", "vocabulary_rows")},
        state_digest=state_digest,
        num_values=num_values,
        part_values=cut_values(num_values, len(commit.members), most_values, block_values),
        members=agreement.members,
        follows=sha256_hex(canonical_json([agreement.fingerprint(), held])),
        remaining=commit.members,
    )


def next_plan(plan: Plan, lost: Collection[str], members: Sequence[str], reducers: Sequence[str]) -> Plan:
    """Returns the pass after this one, in which the lost tasks (keys) are shared among the reducers.

    Members are those who are left, reducers the reliable ones of them.
    """
    kept = [task for task in plan.tasks if task.key not in lost]
    parts = [part for task in plan.tasks if task.key in lost for part in range(task.first_part, task.last_part)]
    return Plan(
        agreement=plan.agreement,
        pass_index=plan.pass_index + 1,
        members=tuple(sorted(members)),
        tasks=(*kept, *_share(plan.pass_index + 1, parts, sorted(reducers))),
    )


def _share(pass_index: int, parts: Sequence[int], reducers: Sequence[str]) -> list[Task]:
    """Consecutive parts for each reducer; if its parts are not consecutive, a task for each run of them."""
    tasks: list[Task] = []
    for number, reducer in enumerate(reducers):
        share = parts[number * len(parts) // len(reducers) : (number + 1) * len(parts) // len(reducers)]
        for _, run in groupby(enumerate(share), lambda numbered: numbered[1] - numbered[0]):
            numbers = [part for _, part in run]
            key = f"{pass_index}.{len(tasks)}"
            tasks.append(Task(key=key, reducer=reducer, first_part=numbers[0], last_part=numbers[-1] + 1))
    return tasks


def is_majority(members: Collection[str], peer_ids: Sequence[str]) -> bool:
    """Returns whether these may commit: more than half of the agreed members, or half of them with the lowest id.

    Two parts of a round that cannot see each other are never both a majority, so they cannot commit two results.
    """
    return 2 * len(members) > len(peer_ids) or (2 * len(members) == len(peer_ids) and min(peer_ids) in members)


def check_agreement(
    agreement: Agreement,
    request: JoinRequest,
    *,
    own_id: str,
    values_per_part: int,
    max_weight_ratio: float,
    weighing: Weighing = "root",
    block_values: int = _ALIGNMENT,
) -> None:
    """Raises RefusedError (``agreement``) for one that is not about the state this node joined with, or not fair."""
    round_index = request.round_index
    peer_ids = list(agreement.peer_ids)
    facts = ("round_index", "state_digest", "num_values")
    if any(getattr(agreement, fact) != getattr(request, fact) for fact in facts):
        raise _refused(round_index, "it is not about this node's state")
    if agreement.change != request.change:
        raise _refused(round_index, f"change {agreement.change} is not in force here, but {request.change}")
    if agreement.change_digest != request.change_digest:
        raise _refused(round_index, f"another change {agreement.change} is in force here; the owner has signed two")
    if own_id not in peer_ids or peer_ids != sorted(set(peer_ids)):
        raise _refused(round_index, "its members are not a sorted list with this node in it")
    if agreement.part_values != cut_values(request.num_values, len(peer_ids), values_per_part, block_values):
        raise _refused(round_index, f"parts of {agreement.part_values} values do not follow from its members")
    if agreement.vocabulary_rows > request.vocabulary_rows:
        raise _refused(round_index, f"{agreement.vocabulary_rows} rows of vocabulary are more than this node knows of")
    weights = unaged_weights(agreement)
    positive = [weight for weight in weights if weight > 0]
    if positive and max(positive) > max_weight_ratio * median_low(positive) * (1 + _ROUNDING):
        raise _refused(round_index, "a member weighs more than it may")
    own = agreement.members[peer_ids.index(own_id)]
    own_weight = contribution_weight(request.num_batches, request.age_s, weighing, request.num_steps)
    if own.weight < min(own_weight, max(weights)) * freshness(own.lag) * (1 - _ROUNDING):
        raise _refused(round_index, "this node weighs less than its batches")
    if own.progress != request.progress:
        raise _refused(round_index, "this node's progress is not what it claimed")


def check_plan(plan: Plan, agreement: Agreement, *, max_passes: int) -> None:
    """Raises RefusedError (``plan``) for a plan that does not give every part to one member."""
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
    """Raises RefusedError (``commit``, ``plan``) for a commit that cannot have been made from the members' votes."""
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
    """Returns whether `next_plan` makes this plan of the one before, with half of the members or more as reducers."""
    keys = {task.key for task in plan.tasks}
    lost = {task.key for task in before.tasks} - keys
    reducers = {task.reducer for task in plan.fresh}
    num_parts = sum(task.last_part - task.first_part for task in plan.fresh)
    return (
        plan.pass_index == before.pass_index + 1
        and set(plan.members) <= set(before.members)
        and bool(reducers)
        and (2 * len(reducers) >= len(plan.members) or len(reducers) == num_parts)
        and plan == next_plan(before, lost, plan.members, sorted(reducers))
    )


def _refused(round_index: int, why: str) -> RefusedError:
    return RefusedError("agreement", f"round {round_index}: the coordinator's agreement is refused: {why}")
