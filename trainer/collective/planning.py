"""Who reduces which parts: pure arithmetic that every member does alike.

A vector is cut into parts of equal length (the last may be shorter), small enough that each slice has some parts to
overlap: sending, reducing and sending back. A slice is a run of parts; pass 0 gives each member one, and a later pass
gives what was lost to those who are left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from trainer.collective.messages import Agreement, Plan, Task

__all__ = ["coordinator_order", "cut_values", "first_plan", "next_plan"]

_PARTS_PER_SLICE = 4
_ALIGNMENT = 1024
"""Values; the block of the int8 codec."""


def cut_values(num_values: int, num_members: int, most_values: int) -> int:
    """Length of a part: some parts for each slice, none longer than a message, whole blocks.

    Args:
        num_values: length of the vector.
        num_members: how many share the work.
        most_values: as many as fit a message in the codec used.
    """
    wanted = -(-num_values // (num_members * _PARTS_PER_SLICE))
    aligned = -(-wanted // _ALIGNMENT) * _ALIGNMENT
    return max(_ALIGNMENT, min(aligned, most_values // _ALIGNMENT * _ALIGNMENT))


def coordinator_order(run_id: str, round_index: int, peer_ids: Collection[str]) -> list[str]:
    """Who is to coordinate a round, and who after that: another order each round, known to all, in nobody's hands."""

    def rank(peer_id: str) -> bytes:
        return hashlib.sha256(f"{run_id}\0{round_index}\0{peer_id}".encode()).digest()

    return sorted(peer_ids, key=rank)


def first_plan(agreement: Agreement) -> Plan:
    """Pass 0: each member reduces one slice."""
    return Plan(
        agreement=agreement.fingerprint(),
        pass_index=0,
        members=agreement.peer_ids,
        tasks=tuple(_share(0, range(agreement.num_parts), agreement.peer_ids)),
    )


def next_plan(plan: Plan, lost: Collection[str], members: Sequence[str], reducers: Sequence[str]) -> Plan:
    """The pass after this one: what was lost, shared among reducers.

    Args:
        plan: the last one.
        lost: keys of its tasks that not all have the result of.
        members: who is left.
        reducers: those of them who can be relied upon.
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
    """Consecutive parts for each reducer; where parts are not consecutive, a task for each run of them."""
    tasks: list[Task] = []
    for number, reducer in enumerate(reducers):
        share = parts[number * len(parts) // len(reducers) : (number + 1) * len(parts) // len(reducers)]
        for first, last in _runs(share):
            tasks.append(Task(key=f"{pass_index}.{len(tasks)}", reducer=reducer, first_part=first, last_part=last))
    return tasks


def _runs(parts: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for part in parts:
        if runs and runs[-1][1] == part:
            runs[-1] = (runs[-1][0], part + 1)
        else:
            runs.append((part, part + 1))
    return runs
