"""Rounds in the background: what is merged when, and what becomes of a round whose result is not taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.replica_group import WAIT_S, Quadratic, Scripted, raising, same
from trainer.errors import IncompatiblePeerError, RoundFailedError, TrainerUsageError
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer

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
    assert step(model, trainer, 2) is None and len(held.contributions) == 2
    assert held.contributions[1].vector[0] == 1.0 - (0.5 - 2.0), "measured from the anchor, with what alpha kept"
    assert held.contributions[1].num_batches == 4
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
    assert held.contributions[1].vector[0] == 8.0 and held.contributions[1].num_batches == 8
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
    assert step(model, trainer) is None and held.contributions[-1].round_index == 1


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
    num_before = len(held.contributions)
    trainer.adopt(shared)
    assert trainer.round_index == 9 and model.x[0] == 5.0
    assert step(model, trainer, 2) is None, "the dropped round is not merged"
    refused = step(model, trainer, 2)
    assert refused is not None and "has not ended" in refused.error and len(held.contributions) == num_before
    held.gate.set()
    while len(held.contributions) == num_before:
        result = step(model, trainer)
    trainer.drain()
    assert held.contributions[-1].round_index == 9 and trainer.round_index == 10
    assert result is None or not result.committed


def test_a_round_that_does_not_come_back_is_given_up(held: Scripted) -> None:
    model, trainer = node(held, replace(CONFIG, round_timeout_s=0.2))
    result = step(model, trainer, 6)
    assert not result.committed and "not back after" in result.error and model.x[0] == -1.0


def test_a_vocabulary_does_not_grow_under_a_round_or_over_a_saved_one(held: Scripted) -> None:
    model, trainer = node(held)
    step(model, trainer, 4)
    saved_model, saved, _ = saved_in_flight(held)
    for grown, under_way in ((model, trainer), (saved_model, saved)):
        with pytest.raises(TrainerUsageError, match="drain"):
            under_way.grow(grown, 8)
