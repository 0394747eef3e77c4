"""Parts of one model with rounds of their own: what they average, how they fail, and that nobody waits in a circle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.support.model_configs import small_config
from tests.support.replica_group import (
    WAIT_S,
    MeetingCollective,
    ReplicaGroup,
    Scripted,
    fail,
    run_replicas,
)
from trainer.errors import CheckpointMismatchError, TrainerError
from trainer.model import build_model, split
from trainer.model.stages import stage_ranges
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.diloco.parts import PartsTrainer
from trainer.outer.engine.collective import Collective, Contribution, RoundResult

NAMES = ("head", "body-1", "tail")
CONFIG = DiLoCoConfig(inner_steps=2)


def stages_of(model: nn.Module, num_stages: int) -> dict[str, nn.Module]:
    names = (*NAMES[: num_stages - 1], "tail")
    return dict(zip(names, split(model, num_stages), strict=True))  # type: ignore[arg-type]


def parts_trainer(stages: dict[str, nn.Module], collectives: Sequence[Collective], **options: object) -> PartsTrainer:
    config = DiLoCoConfig(**{"inner_steps": 2, **options})  # type: ignore[arg-type]
    pairs = zip(stages.items(), collectives, strict=True)
    return PartsTrainer({name: DiLoCoTrainer(stage, config, each) for (name, stage), each in pairs})


@torch.no_grad()
def disturb(parameters: Iterator[tuple[str, Tensor]], replica: int, step: int) -> None:
    """An inner step of a replica: by name, so that it is the same for a model and for its stages."""
    for name, parameter in parameters:
        generator = torch.Generator().manual_seed(hash_of(name) + 1000 * replica + step)
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def hash_of(name: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**31


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num_fragments", [1, 2])
def test_rounds_over_the_parts_are_the_rounds_of_the_whole_bit_for_bit(num_stages: int, num_fragments: int) -> None:
    num_replicas, num_steps = 3, 4
    config = DiLoCoConfig(inner_steps=2, num_fragments=num_fragments)
    fragments_of_parts = 1  # A stage of one layer has no two.

    def whole(group: ReplicaGroup, replica: int) -> dict[str, Tensor]:
        model = build_model(small_config(), seed=0)
        trainer = DiLoCoTrainer(model, config, MeetingCollective(group, replica))
        for step in range(num_steps):
            disturb(model.named_parameters(), replica, step)
            trainer.after_inner_step()
        return dict(model.state_dict())

    def in_parts(groups: Sequence[ReplicaGroup], replica: int) -> dict[str, Tensor]:
        """The last replica is a swarm: its stages know nothing of each other."""
        model = build_model(small_config(), seed=0)
        stages = stages_of(model, num_stages)
        collectives = [MeetingCollective(group, replica) for group in groups]
        trainer = parts_trainer(stages, collectives, num_fragments=fragments_of_parts)
        if replica < num_replicas - 1:
            for step in range(num_steps):
                disturb(model.named_parameters(), replica, step)
                ended = trainer.after_inner_step()
                assert [result.part for result in ended] == (list(stages) if step % 2 else [])
            return dict(model.state_dict())

        def stage_alone(name: str) -> None:
            for step in range(num_steps):
                disturb(stages[name].named_parameters(), replica, step)
                trainer.trainers[name].after_inner_step()

        run_replicas([lambda name=name: stage_alone(name) for name in stages])  # type: ignore[misc]
        return dict(model.state_dict())

    groups = [ReplicaGroup(num_replicas) for _ in range(num_stages)]
    cut = run_replicas([lambda replica=replica: in_parts(groups, replica) for replica in range(num_replicas)])  # type: ignore[misc]
    for other in cut[1:]:
        assert all(torch.equal(value, other[name]) for name, value in cut[0].items())
    if num_fragments > 1:  # Of a whole in fragments the rounds come at other steps.
        return
    group = ReplicaGroup(num_replicas)
    alike = run_replicas([lambda replica=replica: whole(group, replica) for replica in range(num_replicas)])  # type: ignore[misc]
    assert all(torch.equal(value, cut[0][name]) for name, value in alike[0].items())
    assert sum(brought.vector.numel() for brought in (each.history[0][0] for each in groups)) == (
        group.history[0][0].vector.numel()
    )


class Meeting(MeetingCollective):
    """One that asks the other replica to come, as peers do, once somebody is there."""

    def __init__(self, group: ReplicaGroup, rank: int, waiting: set[int], begins: threading.Event) -> None:
        super().__init__(group, rank)
        self._own, self._waiting, self._begins = rank, waiting, begins

    def reduce(self, contribution: Contribution) -> RoundResult:
        self._waiting.add(self._own)
        result = super().reduce(contribution)
        self._waiting.clear()
        return result

    def requested(self) -> bool:
        return self._begins.is_set() or bool(self._waiting - {self._own})


def test_two_that_begin_with_different_parts_do_not_wait_for_each_other() -> None:
    groups, waiting = {name: ReplicaGroup(2) for name in ("head", "tail")}, {"head": set[int](), "tail": set[int]()}
    both_wait = threading.Barrier(2)

    def replica(rank: int, first: str) -> list[str]:
        begins = threading.Event()
        begins.set()
        never = threading.Event()
        model = build_model(small_config(), seed=0)
        stages = stages_of(model, 2)
        collectives = [
            Meeting(groups[name], rank, waiting[name], begins if name == first else never) for name in groups
        ]
        trainer = parts_trainer(stages, collectives, inner_steps=100)
        assert [name for name, each in trainer.trainers.items() if each.is_due] == [first]
        both_wait.wait(WAIT_S)
        ended = list(trainer.after_inner_step())
        begins.clear()
        # One whose own round is over before the other asks for the second answers behind a later step.
        ends_s = time.monotonic() + WAIT_S
        while len(ended) < 2 and time.monotonic() < ends_s:
            time.sleep(0.1)
            ended += trainer.after_inner_step()
        assert all(result.committed for result in ended)
        return sorted(result.part for result in ended)

    found = run_replicas([lambda: replica(0, "head"), lambda: replica(1, "tail")])
    assert found == [["head", "tail"], ["head", "tail"]]


def test_a_part_whose_round_fails_keeps_its_work_and_holds_no_other_up() -> None:
    model = build_model(small_config(), seed=0)
    head, tail = Scripted(), Scripted(fail)
    trainer = parts_trainer(stages_of(model, 2), [head, tail])
    results = [result for _ in range(4) for result in trainer.after_inner_step(3)]
    assert [(it.part, it.committed, it.num_batches) for it in results] == [
        ("head", True, 6),
        ("tail", False, 6),
        ("head", True, 6),
        ("tail", False, 12),
    ]
    assert (trainer.round_index, trainer.outer_step, trainer.unshared) == (2, 0, (4, 12))
    # What is taken up of the tail leaves the head alone.
    other = parts_trainer(stages_of(build_model(small_config(), seed=0), 2), [Scripted(), Scripted()])
    for _ in range(4):
        other.after_inner_step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    head_digest = trainer.trainers["head"].state_digest()
    trainer.adopt({"tail": other.shared_state()["tail"]})
    assert (trainer.outer_step, trainer.trainers["tail"].inner_step) == (2, 0)
    assert trainer.trainers["head"].state_digest() == head_digest
    assert trainer.trainers["tail"].state_digest() == other.trainers["tail"].state_digest()
    in_head = dict(stages_of(model, 2)["head"].named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in in_head.items())


def test_an_error_of_one_part_comes_out_once_no_part_is_in_a_round() -> None:
    head, tail = Scripted(), Scripted()

    def broken(_: Contribution) -> Tensor:
        raise TrainerError("the engine cannot go on")

    tail.answer = broken
    head.gate.clear()
    threading.Timer(0.3, head.gate.set).start()
    trainer = parts_trainer(stages_of(build_model(small_config(), seed=0), 2), [head, tail])
    trainer.after_inner_step()
    with pytest.raises(TrainerError, match="cannot go on"):
        trainer.after_inner_step()
    assert trainer.trainers["head"].round_index == 1


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_a_saved_state_goes_on_to_the_same_bits(overlap_steps: int) -> None:
    def begun() -> tuple[nn.Module, PartsTrainer]:
        model = build_model(small_config(), seed=0)
        return model, parts_trainer(stages_of(model, 2), [Scripted(), Scripted()], overlap_steps=overlap_steps)

    def step(model: nn.Module, trainer: PartsTrainer, number: int) -> None:
        disturb(model.named_parameters(), 0, number)
        trainer.after_inner_step()

    model, trainer = begun()
    for number in range(2):
        step(model, trainer, number)
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    saved = {name: each.state_dict() for name, each in trainer.trainers.items()}
    again, other = begun()
    again.load_state_dict(parameters)
    other.load_state_dict({"version": 1, "parts": saved})
    for number in range(2, 7):
        step(model, trainer, number)
        step(again, other, number)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert trainer.state_digest() == other.state_digest()


@pytest.mark.parametrize(
    "state", [{}, {"version": 2, "parts": {}}, {"version": 1, "parts": {"head": {}}}, {"version": 1, "round_index": 3}]
)
def test_states_of_other_parts_are_refused(state: dict[str, object]) -> None:
    trainer = parts_trainer(stages_of(build_model(small_config(), seed=0), 2), [Scripted(), Scripted()])
    with pytest.raises(CheckpointMismatchError, match="expected the parts head, tail, of version 1"):
        trainer.load_state_dict(state)


def test_names_of_parts_are_those_of_a_cut() -> None:
    model = build_model(small_config(), seed=0)
    names = [name for stage in stages_of(model, 3).values() for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert [len(each) for each in stage_ranges(4, 3)] == [2, 1, 1]
