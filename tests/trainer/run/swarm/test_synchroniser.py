"""When a replica takes itself for lost, and when it refuses the average of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.replica_group import MeetingCollective, Quadratic, Regression, ReplicaGroup, Scripted, run_replicas
from trainer.aggregation import RuleConfig
from trainer.aggregation.config import Averaging
from trainer.aggregation.sparse import aggregate_sparse
from trainer.compression.sparse import SparseCodec
from trainer.errors import RoundFailedError
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import Collective, Contribution, RoundResult
from trainer.outer.engine.strategy import OuterResult
from trainer.outer.sparta import SpartaConfig, SpartaTrainer
from trainer.run.config import RunConfig
from trainer.run.swarm.synchroniser import JudgedCollective, ReplicaSynchroniser, contradiction_of

CONFIG = RunConfig(diloco=DiLoCoConfig(inner_steps=2, outer_lr=1.0, outer_momentum=0.0))


@dataclass
class Others:
    """What a replica knows of the stage's others."""

    reached: int = 0
    behind: bool = False

    def frontier(self) -> int:
        return self.reached

    def move_to(self, round_index: int) -> None: ...


Train = Callable[[int], list[OuterResult]]


def diloco_replica(group: ReplicaGroup, rank: int, others: Others) -> tuple[ReplicaSynchroniser, Train]:
    """One, and what trains it."""
    model, collective = Quadratic(0), MeetingCollective(group, rank)
    built: Any = SimpleNamespace(module=model, replica=None)
    synchroniser = ReplicaSynchroniser(CONFIG, built, collective, others, lambda: others.behind, 0)

    def train(num_steps: int) -> list[OuterResult]:
        results = []
        for _ in range(num_steps):
            with torch.no_grad():
                model.x.sub_(1.0 + rank)
            results.append(synchroniser.after_inner_step(3))
        return [result for result in results if result is not None]

    return synchroniser, train


def test_rounds_that_fail_for_all_send_nobody_away_and_their_work_goes_into_the_next() -> None:
    group = ReplicaGroup(2, failing_rounds=(0, 1))
    replicas = [diloco_replica(group, rank, Others()) for rank in range(2)]
    results = run_replicas([lambda train=train: train(6) for _, train in replicas])
    for (synchroniser, _), told in zip(replicas, results, strict=True):
        assert [result.committed for result in told] == [False, False, True]
        assert not any(synchroniser.has_lost_touch(result) for result in told)
    assert [brought.num_batches for brought in group.history[2]] == [18, 18], "of all three rounds"
    assert [brought.vector[0].item() for brought in group.history[2]] == [6.0, 12.0]


def test_rounds_that_the_others_made_without_it_do_and_so_does_one_if_they_hold_another_state() -> None:
    others = Others()
    synchroniser, train = diloco_replica(ReplicaGroup(1, failing_rounds=range(5)), 0, others)
    failed = train(10)
    assert not any(synchroniser.has_lost_touch(result) for result in failed[:3])
    others.reached = 1
    assert synchroniser.has_lost_touch(failed[3]), "they went on, and it has failed often enough before"
    synchroniser.adopt(synchroniser.trainer.shared_state())
    assert not synchroniser.has_lost_touch(failed[4]), "counted from the state that was taken up"
    others = Others(reached=1)
    synchroniser, train = diloco_replica(ReplicaGroup(1, failing_rounds=(0, 2, 3)), 0, others)
    first, made, second, third = train(8)
    assert made.committed
    assert not synchroniser.has_lost_touch(first)
    others.reached = 2
    assert not any(map(synchroniser.has_lost_touch, (made, second))), "one in a row"
    others.reached, others.behind = 0, True
    assert synchroniser.has_lost_touch(third)
    assert not synchroniser.has_lost_touch(made)


SLICES = 4
Change = Callable[[Tensor], Tensor]
LIES: dict[str, Change] = {"-3 times": lambda work: -3 * work, "1,000 times": lambda work: 1000 * work}
HARMLESS: dict[str, Change] = {
    "the truth": lambda work: work,
    "nothing": torch.zeros_like,
    "twice": lambda work: 2 * work,
    "noise": lambda work: torch.randn(work.shape, generator=torch.Generator().manual_seed(0)) * work.norm() / 9,
}


class Lying(MeetingCollective):
    """Contributes what a lie makes of its work; of slices (SPARTA), from the second round of each on."""

    def __init__(self, group: ReplicaGroup, lie: Change, num_slices: int) -> None:
        super().__init__(group, 1)
        self._lie = lie
        self._num_slices = num_slices
        self._averages: dict[int, Tensor] = {}

    def reduce(self, contribution: Contribution) -> RoundResult:
        vector, index = contribution.vector, contribution.round_index % max(1, self._num_slices)
        base = self._averages.get(index, vector if self._num_slices else torch.zeros_like(vector))
        result = super().reduce(replace(contribution, vector=base + self._lie(vector - base)))
        if self._num_slices:
            self._averages[index] = result.vector
        return result


def trained(strategy: str, lie: Change, num_rounds: int) -> tuple[list[OuterResult], list[str], list[bytes]]:
    """An honest replica's rounds with one that lies, whom it distrusts, and its parameters around each round."""
    group, distrusted = ReplicaGroup(2), list[str]()
    num_slices = SLICES if strategy == "sparta" else 0
    results, weights = list[OuterResult](), list[bytes]()

    def replica(number: int) -> Callable[[], None]:
        collective: Collective = Lying(group, lie, num_slices)
        if not number:
            inner, distrust = MeetingCollective(group, 0), lambda key, _: distrusted.append(key)
            collective = JudgedCollective(inner, "replica-0", distrust, num_slices=num_slices)
        model = Regression(number)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer: DiLoCoTrainer | SpartaTrainer
        if strategy == "sparta":
            config = SpartaConfig(num_slices=SLICES, every_steps=2, background=False)
            trainer = SpartaTrainer(model, config, collective, optimizer=optimizer)
        else:
            trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=4), collective)

        def train() -> None:
            step = 0
            for _ in range(num_rounds):
                result = None
                while result is None:
                    optimizer.zero_grad()
                    model(step).backward()
                    optimizer.step()
                    step += 1
                    before = bits(model)
                    result = trainer.after_inner_step()
                if not number:
                    results.append(result)
                    weights.extend((before, bits(model)))

        return train

    run_replicas([replica(number) for number in range(2)])
    return results, distrusted, weights


def bits(model: nn.Module) -> bytes:
    return b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())


@pytest.mark.parametrize("strategy", ["diloco", "sparta"])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_not_taken_and_its_teller_distrusted(lie: str, strategy: str) -> None:
    # Of the first SPARTA average of a slice nothing is known: a cycle passes before the first lie.
    num_rounds = SLICES + 1 if strategy == "sparta" else 1
    results, distrusted, weights = trained(strategy, LIES[lie], num_rounds)
    assert distrusted == ["replica-1"]
    assert not results[-1].committed
    assert "contradicts this worker's own work" in results[-1].error
    assert weights[-1] == weights[-2]
    assert all(result.committed for result in results[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["diloco", "sparta"])
@pytest.mark.parametrize("brought", HARMLESS)
def test_what_an_honest_replica_may_bring_is_averaged(brought: str, strategy: str) -> None:
    results, distrusted, weights = trained(strategy, HARMLESS[brought], 24)
    assert not distrusted
    assert len(results) == 24
    assert all(result.committed for result in results)
    assert all(before != after for before, after in list(pairwise(weights))[::2])


@pytest.mark.parametrize(
    ("other", "is_wrong"), [(1.0, False), (0.0, False), (9.0, False), (11.0, True), (-0.1, True), (-3.0, True)]
)
def test_a_contradiction_is_direction_or_size_of_the_other_s_part(other: float, is_wrong: bool) -> None:
    own = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert bool(contradiction_of(own, other * own)) is is_wrong
    assert contradiction_of(torch.zeros(100), own) is None


@pytest.mark.parametrize("weights", [(1.0, 9.0), (0.0, 1.0), (1.0, 0.0)])
def test_who_has_done_little_itself_or_was_alone_does_not_judge(weights: tuple[float, float]) -> None:
    class Weighted(MeetingCollective):
        def reduce(self, contribution: Contribution) -> RoundResult:
            found = super().reduce(contribution)
            return replace(found, report=replace(found.report, weights=weights))

    group = ReplicaGroup(2)
    distrusted = list[str]()
    judged = JudgedCollective(Weighted(group, 0), "replica-0", lambda key, _: distrusted.append(key))

    def bring(collective: Collective, value: float) -> Callable[[], RoundResult]:
        brought = {"vector": torch.full((8,), value), "reference": torch.zeros(8), "age_s": 0.0, "state_digest": ""}
        return lambda: collective.reduce(Contribution(round_index=0, num_batches=1, **brought))

    run_replicas([bring(judged, 1.0), bring(MeetingCollective(group, 1), -3.0)])
    assert not distrusted


@pytest.mark.parametrize("averaging", ["replicas", "senders"])
@pytest.mark.parametrize(("direction", "is_wrong"), [(1.0, False), (0.0, False), (-1.0, True)])
@pytest.mark.parametrize("share", [0.4, 0.8])
def test_of_sparse_contributions_the_others_is_compared_where_it_alone_sent(
    averaging: Averaging, direction: float, is_wrong: bool, share: float
) -> None:
    """Two that learn the same, or each its own, send other values of 4,096; one is clipped to the other's norm."""
    generator = torch.Generator().manual_seed(3)
    codec = SparseCodec()
    common, noise = (torch.randn(1 << 16, generator=generator) for _ in range(2))
    vector, residual = 4 * common, 0.1 * torch.randn(1 << 16, generator=generator)
    own, other = vector + residual, direction * common + noise
    sent = [codec.decode_sparse(codec.encode(each), each.numel()) for each in (own, other)]
    left = own.clone()
    sent[0].subtract_from(left)
    outcome = aggregate_sparse(sent, (share, 1 - share), RuleConfig(rule="mean", validation="off"), averaging)
    assert outcome.clipped.keys() == {0}

    class Answering(Scripted):
        def reduce(self, contribution: Contribution) -> RoundResult:
            found = super().reduce(contribution)
            return replace(found, report=replace(found.report, weights=(share, 1 - share)))

    inner = Answering(lambda _: outcome.vector)
    inner.residual = left
    distrusted = list[str]()
    judged = JudgedCollective(inner, "a", lambda key, _: distrusted.append(key), is_sparse=True)  # type: ignore[arg-type]
    brought = {"reference": torch.zeros(1), "age_s": 0.0, "state_digest": "", "residual": residual}
    contribution = Contribution(round_index=0, num_batches=1, vector=vector, **brought)
    if is_wrong:
        with pytest.raises(RoundFailedError, match="contradicts this worker's own work"):
            judged.reduce(contribution)
    else:
        judged.reduce(contribution)
    assert distrusted == (["b"] if is_wrong else [])
