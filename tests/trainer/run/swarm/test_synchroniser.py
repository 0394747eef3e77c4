"""When a replica under DiLoCo takes itself for lost: never for rounds that fail for all of its stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.support.replica_group import MeetingCollective, ReplicaGroup, run_replicas
from tests.support.toy_models import Quadratic
from trainer.outer.diloco import DiLoCoConfig
from trainer.outer.engine.strategy import OuterResult
from trainer.run.config import RunConfig
from trainer.run.swarm.synchroniser import DilocoSynchroniser

CONFIG = RunConfig(diloco=DiLoCoConfig(inner_steps=2, outer_lr=1.0, outer_momentum=0.0))


@dataclass
class Others:
    """What a replica knows of the stage's others."""

    frontier: int = 0
    behind: bool = False
    moved_to: list[int] = field(default_factory=list)


def replica(
    group: ReplicaGroup, rank: int, others: Others
) -> tuple[DilocoSynchroniser, Callable[[int], list[OuterResult]]]:
    """One, and what trains it."""
    model = Quadratic(0)
    keeping = DilocoSynchroniser(
        CONFIG,
        model,
        MeetingCollective(group, rank),
        lambda: others.behind,
        others.moved_to.append,
        0,
        frontier=lambda: others.frontier,
    )

    def train(num_steps: int) -> list[OuterResult]:
        results = []
        for _ in range(num_steps):
            with torch.no_grad():
                model.x.sub_(1.0 + rank)
            results.append(keeping.after_inner_step(3))
        return [result for result in results if result is not None]

    return keeping, train


def test_rounds_that_fail_for_all_send_nobody_away_and_their_work_goes_into_the_next() -> None:
    group = ReplicaGroup(2, failing_rounds=(0, 1))
    replicas = [replica(group, rank, Others()) for rank in range(2)]
    results = run_replicas([lambda train=train: train(6) for _, train in replicas])
    for (keeping, _), told in zip(replicas, results, strict=True):
        assert [result.committed for result in told] == [False, False, True]
        assert not any(keeping.has_lost_touch(result) for result in told)
    assert [brought.num_batches for brought in group.history[2]] == [18, 18], "of all three rounds"
    assert [brought.vector[0].item() for brought in group.history[2]] == [6.0, 12.0]


def test_rounds_that_the_others_made_without_it_do() -> None:
    others = Others()
    keeping, train = replica(ReplicaGroup(1, failing_rounds=range(5)), 0, others)
    failed = train(10)
    assert not any(keeping.has_lost_touch(result) for result in failed[:3])
    others.frontier = 1
    assert keeping.has_lost_touch(failed[3]), "they went on, and it has failed often enough before"
    keeping.adopt(keeping.shared_state())
    assert not keeping.has_lost_touch(failed[4]), "counted from the state that was taken up"


def test_one_failed_round_does_not_unless_the_others_hold_another_state() -> None:
    others = Others(frontier=1)
    keeping, train = replica(ReplicaGroup(1, failing_rounds=(0, 2, 3)), 0, others)
    first, made, second, third = train(8)
    assert made.committed
    assert not keeping.has_lost_touch(first)
    others.frontier = 2
    assert not keeping.has_lost_touch(made)
    assert not keeping.has_lost_touch(second), "one in a row"
    others.frontier, others.behind = 0, True
    assert keeping.has_lost_touch(third)
    assert not keeping.has_lost_touch(made)
