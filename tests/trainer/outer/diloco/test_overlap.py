"""Rounds in the background: what is merged when, and what becomes of a round whose result is not taken."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.replica_group import WAIT_S, Quadratic, Scripted, raising, same
from tests.support.waiting import wait_until
from trainer.errors import IncompatiblePeerError, RoundFailedError, TrainerUsageError
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer, OuterOptimizer
from trainer.outer.diloco.access import ModelParameters
from trainer.outer.diloco.rounds import RoundWork
from trainer.outer.diloco.state import ReplicaState
from trainer.outer.engine.collective import Contribution

CONFIG = DiLoCoConfig(inner_steps=4, outer_lr=1.0, outer_momentum=0.0, overlap_steps=2, merge_alpha=0.25)


@pytest.fixture
def held():
    collective = Scripted()
    collective.gate.clear()
    yield collective
    collective.gate.set()


def node(held: Scripted, config: DiLoCoConfig = CONFIG) -> tuple[Quadratic, DiLoCoTrainer]:
    model = Quadratic(0)
    return model, DiLoCoTrainer(model, config, held)


def step(model: Quadratic, trainer: DiLoCoTrainer, times: int = 1):
    """Inner steps of −1 for every parameter, which is 5 at the start."""
    for _ in range(times):
        with torch.no_grad():
            model.x.sub_(1.0)
        result = trainer.after_inner_step()
    return result


def contribution(held: Scripted, index: int) -> Contribution:
    """What the round's thread brings, as soon as it does."""
    wait_until(lambda: len(held.contributions) > index, "the round's thread")
    return held.contributions[index]


def test_another_thread_gives_back_what_a_round_leaves_over(held: Scripted) -> None:
    """The training thread holds the last reference to none of it: giving back 500 MB takes it some milliseconds."""
    model, trainer = node(held)
    names: list[str] = []
    step(model, trainer, 4)
    anchor = trainer._state.fragments[0].anchor
    weakref.finalize(anchor, lambda: names.append(threading.current_thread().name))
    del anchor
    held.gate.set()
    while step(model, trainer) is None:
        pass
    wait_until(lambda: bool(names), "the old anchor to be given back")
    assert names == ["release"]


def test_training_goes_on_and_the_result_is_merged_later(held: Scripted) -> None:
    model, trainer = node(held)
    assert step(model, trainer, 4) is None and held.started.wait(WAIT_S)
    assert step(model, trainer) is None and model.x[0] == 0.0, "nothing changes while the round runs"
    held.gate.set()
    result = step(model, trainer)
    assert result.committed and (result.num_batches, result.contributed_steps_ago) == (4, 2)
    assert trainer.shared_state().anchor[0] == 1.0, "5 − 4 steps: the anchor has no share of the meanwhile"
    assert model.x[0] == 0.25 * -1.0 + 0.75 * 1.0
    assert held.threads == {"diloco-round"}
    assert step(model, trainer, 2) is None
    second = contribution(held, 1)
    assert second.vector[0] == 1.0 - (0.5 - 2.0), "measured from the anchor, with what alpha kept"
    assert second.num_batches == 4
    model, trainer = node(held, replace(CONFIG, merge_alpha=0.0))
    step(model, trainer, 6)
    assert torch.equal(model.x.detach(), trainer.shared_state().anchor)


def test_a_failed_round_in_the_background_changes_nothing(held: Scripted) -> None:
    model, trainer = node(held)
    held.answer = raising(RoundFailedError("too few"))
    before = trainer.state_digest()
    held.gate.set()
    result = step(model, trainer, 6)
    assert not result.committed and "too few" in result.error and result.contributed_steps_ago is None
    assert trainer.state_digest() == before and model.x[0] == -1.0
    held.answer = same
    step(model, trainer, 2)
    second = contribution(held, 1)
    assert second.vector[0] == 8.0 and second.num_batches == 8
    trainer.drain()
    held.answer = raising(IncompatiblePeerError("another architecture"))
    with pytest.raises(IncompatiblePeerError):
        step(model, trainer, 6)
    assert trainer.drain() is None


def test_peers_that_wait_for_the_next_round_bring_the_merge_forward(held: Scripted) -> None:
    model, trainer = node(held, replace(CONFIG, inner_steps=100, overlap_steps=50))
    held.peers_wait = True
    assert step(model, trainer) is None and held.started.wait(WAIT_S)
    assert step(model, trainer, 3) is None, "the round itself is still running"
    held.gate.set()
    while (result := step(model, trainer)) is None:
        pass
    assert result.committed and result.num_batches == 1
    assert step(model, trainer) is None and contribution(held, 1).round_index == 1


def saved_in_flight(held: Scripted) -> tuple[Quadratic, DiLoCoTrainer, Scripted]:
    """A node as it comes out of a checkpoint with a round in flight, one inner step before the merge."""
    model, trainer = node(held)
    step(model, trainer, 5)
    later = Scripted()
    later.gate.clear()
    again_model, again = node(later)
    again_model.load_state_dict(model.state_dict())
    again.load_state_dict(trainer.state_dict())
    return again_model, again, later


def test_a_saved_round_is_saved_again_until_it_begins_with_the_first_step(held: Scripted) -> None:
    """Between loading and the first step the node finds the others; alone, it would commit the round alone."""
    model, trainer, later = saved_in_flight(held)
    assert not later.started.wait(0.05)
    flight = trainer.state_dict()["flight"]
    assert (flight["num_batches"], flight["steps_left"], flight["vector"][0]) == (4, 1, 4.0)
    later.gate.set()
    result = step(model, trainer)
    assert result.committed and result.num_batches == 4 and len(later.contributions) == 1
    held.gate.set()
    undisturbed_model, undisturbed = node(held)
    assert step(undisturbed_model, undisturbed, 6).committed
    assert trainer.state_digest() == undisturbed.state_digest() and torch.equal(model.x, undisturbed_model.x)


def test_adopting_drops_a_round_saved_or_in_flight(held: Scripted) -> None:
    shared = replace(DiLoCoTrainer(Quadratic(1), CONFIG, Scripted()).shared_state(), outer_step=9)
    model, trainer, later = saved_in_flight(held)
    trainer.adopt(shared)
    assert trainer.state_dict()["flight"] is None
    assert step(model, trainer) is None and not later.contributions
    model, trainer = node(held)
    step(model, trainer, 5)
    assert contribution(held, 1).round_index == 0, "the second node's, of which both have begun one"
    trainer.adopt(shared)
    assert trainer.round_index == 9 and model.x[0] == 5.0
    assert step(model, trainer, 2) is None, "the dropped round is not merged"
    refused = step(model, trainer, 2)
    assert refused is not None and "has not ended" in refused.error and len(held.contributions) == 2
    held.gate.set()
    while (result := step(model, trainer)) is None or not result.committed:
        pass
    assert [brought.round_index for brought in held.contributions] == [0, 0, 9] and trainer.round_index == 10


def test_a_round_that_does_not_come_back_is_given_up(held: Scripted) -> None:
    model, trainer = node(held, replace(CONFIG, round_timeout_s=0.2))
    result = step(model, trainer, 6)
    assert not result.committed and "not back after" in result.error and model.x[0] == -1.0


NAN = float("nan")


@pytest.mark.parametrize("spoiled", [NAN, float("inf")])
def test_parameters_that_are_not_finite_restart_from_the_anchor_one_step_later(held: Scripted, spoiled: float) -> None:
    model, trainer = node(held)
    step(model, trainer, 3)
    with torch.no_grad():
        model.x[5] = spoiled
    assert step(model, trainer) is None and held.started.wait(WAIT_S)
    brought = contribution(held, 0)
    assert (brought.num_batches, brought.progress, brought.age_s) == (0, 0.0, 0.0)
    assert not brought.vector.any()
    assert step(model, trainer) is None
    assert torch.equal(model.x.detach(), torch.full((16,), 5.0)), "the anchor, while the round still runs"
    assert trainer.unshared == (0, 0), "what was spoiled is nobody's work"
    held.gate.set()
    result = step(model, trainer)
    assert result.committed and result.num_batches == 0 and result.contributed_steps_ago is None
    assert torch.equal(model.x.detach(), torch.full((16,), 0.25 * 4.0 + 0.75 * 5.0))
    assert trainer.unshared == (2, 1)


def test_what_was_saved_spoiled_restarts_from_the_anchor_as_well(held: Scripted) -> None:
    model, trainer = node(held)
    with torch.no_grad():
        model.x.fill_(NAN)
    step(model, trainer, 4)
    again_model, again = node(Scripted())
    again_model.load_state_dict(model.state_dict())
    again.load_state_dict(trainer.state_dict())
    step(again_model, again)
    assert torch.equal(again_model.x.detach(), torch.full((16,), 5.0))


class Threads:
    """Which thread gathers, merges and computes."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.inner = ModelParameters(tensors)
        self.of: dict[str, set[str]] = {}

    def __getattr__(self, name: str):
        def noted(*arguments: Any) -> Any:
            self.of.setdefault(name, set()).add(threading.current_thread().name)
            found = getattr(self.inner, name)(*arguments)
            if name == "snapshot":
                return SimpleNamespace(subtracted_from=partial(self._subtracted, found))
            return partial(self._merged, found) if name == "prepare_merge" else found

        return noted

    def _subtracted(self, snapshot: Any, anchor: torch.Tensor) -> torch.Tensor:
        self.of.setdefault("subtract", set()).add(threading.current_thread().name)
        return snapshot.subtracted_from(anchor)

    def _merged(self, merge: Any, keep: float) -> None:
        self.of.setdefault("merge", set()).add(threading.current_thread().name)
        merge(keep)


def test_the_training_thread_takes_the_snapshot_and_merges_and_does_nothing_else(monkeypatch) -> None:
    stepped: list[str] = []
    outer_step = OuterOptimizer.stepped

    def noted(*arguments: Any) -> Any:
        stepped.append(threading.current_thread().name)
        return outer_step(*arguments)

    monkeypatch.setattr(OuterOptimizer, "stepped", noted)
    model, collective = Quadratic(0), Scripted()
    threads = Threads({"x": model.x})
    trainer = DiLoCoTrainer(model, CONFIG, collective, parameters=threads)
    threads.of.clear()
    assert step(model, trainer, 6).committed
    own = threading.current_thread().name
    assert threads.of == {
        "snapshot": {own},
        "subtract": {"diloco-round"},
        "prepare_merge": {"diloco-round"},
        "merge": {own},
    }
    assert set(stepped) == {"diloco-round"} and collective.threads == {"diloco-round"}


def test_a_digest_that_is_still_being_computed_holds_up_neither_training_nor_a_checkpoint(
    held: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of 1B takes seven seconds; here as long as the test wants."""
    slow = threading.Event()
    digest = ReplicaState.digest

    def waiting(*arguments: Any) -> str:
        assert slow.wait(WAIT_S)
        return digest(*arguments)

    monkeypatch.setattr(ReplicaState, "digest", waiting)
    model, trainer = node(held)
    told: list[str] = []
    trainer.when_digested(told.append)
    assert step(model, trainer, 5) is None and not held.started.is_set() and not told
    assert trainer.state_to_write()["flight"].result(WAIT_S)["num_batches"] == 4
    held.gate.set()
    slow.set()
    assert step(model, trainer).committed
    assert told == [held.contributions[0].state_digest] != [trainer.state_digest()]


def test_a_state_to_be_written_does_not_wait_for_what_is_being_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    measured = RoundWork.measured

    def waiting(*arguments: Any) -> Any:
        assert slow.wait(WAIT_S)
        return measured(*arguments)

    monkeypatch.setattr(RoundWork, "measured", waiting)
    model, trainer = node(Scripted())
    step(model, trainer, 4)
    flight = trainer.state_to_write()["flight"]
    assert isinstance(flight, Future) and not flight.done()
    slow.set()
    assert trainer.state_dict()["flight"].keys() == flight.result(WAIT_S).keys()
    assert (flight.result()["steps_left"], flight.result()["vector"][0]) == (2, 4.0)


def test_a_vocabulary_does_not_grow_under_a_round_or_over_a_saved_one(held: Scripted) -> None:
    model, trainer = node(held)
    step(model, trainer, 4)
    saved_model, saved, _ = saved_in_flight(held)
    for grown, under_way in ((model, trainer), (saved_model, saved)):
        with pytest.raises(TrainerUsageError, match="drain"):
            under_way.grow(grown, 8)
