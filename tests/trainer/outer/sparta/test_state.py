"""A replica's state: what joiners get, and stopping anywhere and going on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.replica_group import Frontier, Quadratic, Replica, Scripted, parameter_bits, restore, to_bytes
from trainer.errors import CheckpointMismatchError, IncompatiblePeerError, StateTransferError
from trainer.network.transfer import load_snapshot, write_snapshot
from trainer.outer.engine.collective import LocalCollective
from trainer.outer.sparta import SpartaConfig, SpartaFit, SpartaTrainer
from trainer.outer.sparta.state import check_meta

CONFIG = SpartaConfig(every_steps=2, num_slices=4, background=False)
TENSORS = ("parameters", "exp_avg", "exp_avg_sq", "steps")


def trained(num_steps: int = 9) -> Replica:
    replica = Replica(CONFIG)
    replica.train(0, num_steps)
    return replica


@pytest.mark.parametrize("num_steps", [0, 9])
def test_a_joiner_becomes_its_donors_twin(num_steps: int) -> None:
    donor, frontier, projected = trained(num_steps), Frontier(), []
    joiner = Replica(CONFIG, number=3, others=frontier, after_average=lambda model: projected.append(model))
    joiner.train(0, 5)
    shared = donor.trainer.shared_state()
    before = {name: getattr(shared, name).clone() for name in TENSORS}
    joiner.trainer.adopt(shared)
    assert parameter_bits(joiner.model) == parameter_bits(donor.model)
    assert joiner.trainer.round_index == donor.trainer.round_index and joiner.trainer.inner_step == 0
    assert frontier.moved_to[-1] == donor.trainer.round_index and projected[-1] is joiner.model
    joiner.model.replica = donor.model.replica  # The same data from now on.
    for index in range(num_steps, num_steps + 6):
        donor.step(index)
        joiner.step(index)
    assert parameter_bits(joiner.model) == parameter_bits(donor.model), "moments and step counts are the donor's"
    assert all(torch.equal(value, donor.moments()[name]) for name, value in joiner.moments().items())
    assert all(torch.equal(getattr(shared, name), tensor) for name, tensor in before.items()), "it does not change"


def test_a_round_in_flight_is_dropped_with_the_old_state() -> None:
    collective = Scripted(lambda contribution: contribution.vector + 1)
    collective.gate.clear()
    joiner, donor = Replica(SpartaConfig(every_steps=1, num_slices=4), collective), trained()
    joiner.turn()
    joiner.trainer.adopt(donor.trainer.shared_state())
    collective.gate.set()
    assert joiner.drain() is None and parameter_bits(joiner.model) == parameter_bits(donor.model)


@pytest.mark.parametrize(
    ("name", "spoiled"),
    [
        ("exp_avg_sq", -1e-12),
        ("parameters", torch.nan),
        ("exp_avg", torch.inf),
        ("steps", 1.5),
        ("steps", -1.0),
        ("exp_avg", lambda vector: vector[1:]),
        ("parameters", lambda vector: vector.double()),
        ("round_index", lambda _: -1),
        ("vocab_rows", lambda _: 64),
        ("layout_digest", lambda _: "0" * 64),
    ],
)
def test_what_is_not_sound_is_refused_whole(name, spoiled) -> None:
    shared, joiner = trained().trainer.shared_state(), trained(4)
    before, moments = parameter_bits(joiner.model), joiner.moments()
    value = getattr(shared, name)
    value = spoiled(value) if callable(spoiled) else torch.cat([value[:-1], torch.tensor([spoiled])])
    with pytest.raises(IncompatiblePeerError, match="state to adopt"):
        joiner.trainer.adopt(replace(shared, **{name: value}))
    assert parameter_bits(joiner.model) == before and joiner.trainer.round_index == 2
    assert all(torch.equal(value, moments[name]) for name, value in joiner.moments().items())


def test_through_a_snapshot_on_disk(tmp_path: Path) -> None:
    donor = trained()
    fit = SpartaFit(donor.trainer.layout)
    packed = fit.pack(donor.trainer.shared_state())
    assert packed is not None
    descriptor = write_snapshot(tmp_path, *packed)
    fit.expectation(descriptor).check(descriptor)
    assert descriptor.size_bytes == fit.expectation(descriptor).max_bytes
    snapshot = load_snapshot(tmp_path, descriptor.digest)
    joiner = Replica(CONFIG, number=2)
    joiner.trainer.adopt(fit.unpack(snapshot.meta, snapshot.tensors))
    assert parameter_bits(joiner.model) == parameter_bits(donor.model)
    assert fit.outer_step(joiner.trainer.shared_state()) == donor.trainer.round_index
    again = write_snapshot(tmp_path, *(fit.pack(joiner.trainer.shared_state()) or ({}, {})))
    assert again.digest == descriptor.digest, "a twin hands on the very same state: one more donor of it"
    assert fit.pack(Replica(CONFIG).trainer.shared_state()) is None, "first weights are handed to nobody"


def test_a_descriptor_that_does_not_fit_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    donor, other = trained(), Replica(CONFIG, model=Quadratic(0))
    packed = SpartaFit(donor.trainer.layout).pack(donor.trainer.shared_state())
    assert packed is not None
    descriptor = write_snapshot(tmp_path, *packed)
    with pytest.raises(IncompatiblePeerError, match="layout"):
        SpartaFit(other.trainer.layout).expectation(descriptor)
    with pytest.raises(IncompatiblePeerError, match="rows of vocabulary"):
        SpartaFit(donor.trainer.layout, vocab_rows=64).expectation(descriptor)
    meta, tensors = packed
    short = write_snapshot(tmp_path, meta, {**tensors, "steps": tensors["steps"][1:]})
    with pytest.raises(IncompatiblePeerError, match="other tensors or shapes"):
        SpartaFit(donor.trainer.layout).expectation(short)
    with pytest.raises(StateTransferError):
        SpartaFit(donor.trainer.layout).expectation(descriptor).check(short)
    for change in ({"kind": "diloco"}, {"version": 2}, {"round_index": -1}, {"num_inner_steps": 2**60}, {"anchor": 1}):
        with pytest.raises(IncompatiblePeerError, match="SPARTA state of version 1"):
            check_meta({**meta, **change})
    with pytest.raises(IncompatiblePeerError, match="expected a snapshot of"):
        SpartaFit(donor.trainer.layout).unpack(meta, {"parameters": tensors["parameters"]})


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("trains_on", "joins_on"),
    [("cpu", "cpu"), pytest.param("cuda", "cuda", marks=ON_GPU), pytest.param("cuda", "cpu", marks=ON_GPU)],
)
def test_a_state_moves_between_devices_and_into_a_fused_adamw(trains_on: str, joins_on: str) -> None:
    donor, joiner = (Replica(CONFIG, model=Quadratic(0).to(device)) for device in (trains_on, joins_on))
    joiner.optimizer = torch.optim.AdamW(joiner.model.parameters(), lr=0.01, fused=True)
    joiner.trainer = SpartaTrainer(joiner.model, CONFIG, LocalCollective(), optimizer=joiner.optimizer)
    donor.train(0, 9)
    joiner.trainer.adopt(donor.trainer.shared_state())
    states = donor.trainer.shared_state(), joiner.trainer.shared_state()
    assert all(torch.equal(*(getattr(state, name) for state in states)) for name in TENSORS)
    donor.step(9)
    joiner.step(9)
    states = donor.trainer.shared_state(), joiner.trainer.shared_state()
    assert torch.allclose(states[0].parameters, states[1].parameters, atol=1e-5)


CONFIGS = {
    "waiting": SpartaConfig(every_steps=3, num_slices=4, background=False),
    "background": SpartaConfig(every_steps=3, num_slices=4),
}
NUM_STEPS = 14


def parts(replica: Replica) -> dict[str, Any]:
    return {"model": replica.model, "optimizer": replica.optimizer, "sparta": replica.trainer}


def restored(contents: bytes, config: SpartaConfig) -> Replica:
    replica = Replica(config, number=5)
    replica.model.replica = 0
    restore(contents, **parts(replica))
    return replica


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_restart_at_any_step_goes_on_bit_for_bit(config: SpartaConfig) -> None:
    undisturbed = Replica(config)
    at = [to_bytes(**parts(undisturbed))]
    for step in range(NUM_STEPS):
        undisturbed.train(step, step + 1)
        at.append(to_bytes(**parts(undisturbed)))
    undisturbed.drain()
    for step in range(NUM_STEPS + 1):
        again = restored(at[step], config)
        again.train(step, NUM_STEPS)
        again.drain()
        assert parameter_bits(again.model) == parameter_bits(undisturbed.model), f"from step {step}"


def test_a_round_in_flight_begins_again_with_the_next_step() -> None:
    collective = Scripted()
    collective.gate.clear()
    replica = Replica(SpartaConfig(every_steps=3, num_slices=4), collective)
    replica.train(0, 4)
    state = replica.trainer.state_dict()
    collective.gate.set()
    second = Scripted()
    again = Replica(SpartaConfig(every_steps=3, num_slices=4), second)
    again.model.load_state_dict(replica.model.state_dict())
    again.trainer.load_state_dict(state)
    again.turn()
    assert again.drain() is not None and second.contributions[0].round_index == 0
    assert second.contributions[0].num_batches == 5, "those of before the stop count"
    assert not again.trainer.state_dict()["begin_again"]
    ghost, donor = (Replica(CONFIGS["waiting"]) for _ in range(2))
    donor.train(0, 8)
    ghost.trainer.adopt(donor.trainer.shared_state())
    ghost.train(8, 13)
    again = restored(to_bytes(**parts(ghost)), CONFIGS["waiting"])
    assert again.trainer.state_dict() == ghost.trainer.state_dict() and not again.trainer.standing.counts
    assert again.trainer.round_index == 3 and again.trainer.shared_state().num_inner_steps == 13


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"reached": None},
        {"round_index": -1},
        {"progress": [{"num_batches": 1, "since_s": float("nan")}] * 4},
        {"schedule_digest": "0" * 64},
        {"reached": 9},
    ],
)
def test_states_of_something_else_are_refused_and_change_nothing(change) -> None:
    replica = Replica(CONFIGS["waiting"])
    replica.train(0, 7)
    before = replica.trainer.state_dict()
    changed = {name: value for name, value in {**before, **change}.items() if value is not None}
    with pytest.raises(CheckpointMismatchError, match="SPARTA state"):
        replica.trainer.load_state_dict(changed)
    assert replica.trainer.state_dict() == before
