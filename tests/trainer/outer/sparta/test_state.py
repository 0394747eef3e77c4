"""What joiners get of a replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.sparta_replicas import Frontier, Replica
from tests.support.toy_models import Quadratic, parameter_bits
from trainer.errors import IncompatiblePeerError, StateTransferError
from trainer.network.transfer import load_snapshot, write_snapshot
from trainer.outer.sparta import SpartaConfig, SpartaFit, SpartaState
from trainer.outer.sparta.snapshot import check_meta, from_snapshot, snapshot_meta, snapshot_tensors

CONFIG = SpartaConfig(every_steps=2, num_slices=4, background=False)


def trained(num_steps: int = 9) -> Replica:
    replica = Replica(CONFIG)
    replica.train(0, num_steps)
    return replica


@pytest.mark.parametrize("num_steps", [0, 9])
def test_a_joiner_becomes_its_donors_twin(num_steps: int) -> None:
    donor, frontier, projected = trained(num_steps), Frontier(), []
    joiner = Replica(CONFIG, number=3, others=frontier, after_average=lambda model: projected.append(model))
    joiner.train(0, 5)
    joiner.trainer.adopt(donor.trainer.shared_state())
    assert parameter_bits(joiner.model) == parameter_bits(donor.model)
    assert joiner.trainer.round_index == donor.trainer.round_index and joiner.trainer.inner_step == 0
    assert frontier.moved_to[-1] == donor.trainer.round_index and projected[-1] is joiner.model
    joiner.model.replica = donor.model.replica  # The same data from now on.
    for index in range(num_steps, num_steps + 6):
        donor.step(index)
        joiner.step(index)
    assert parameter_bits(joiner.model) == parameter_bits(donor.model), "moments and step counts are the donor's"
    assert all(torch.equal(value, donor.moments()[name]) for name, value in joiner.moments().items())


@pytest.mark.parametrize("fused", [True, False])
def test_moments_fit_both_kinds_of_adamw(fused: bool) -> None:
    from trainer.outer.engine.collective import LocalCollective
    from trainer.outer.sparta import SpartaTrainer

    donor = trained()
    joiner = Replica(CONFIG)
    optimizer = torch.optim.AdamW(joiner.model.parameters(), lr=0.01, fused=fused)
    SpartaTrainer(joiner.model, CONFIG, LocalCollective(), optimizer=optimizer).adopt(donor.trainer.shared_state())
    joiner.optimizer = optimizer
    donor.step(9)
    joiner.step(9)
    assert torch.allclose(joiner.vector(), donor.vector(), atol=1e-6)


def test_a_state_does_not_change_afterwards() -> None:
    donor = trained()
    shared = donor.trainer.shared_state()
    before = {name: tensor.clone() for name, tensor in snapshot_tensors(shared).items()}
    donor.train(9, 15)
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot_tensors(shared).items())
    joiner = Replica(CONFIG)
    joiner.trainer.adopt(shared)
    joiner.train(9, 15)
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot_tensors(shared).items())


def test_a_round_in_flight_is_dropped_with_the_old_state() -> None:
    from tests.support.sparta_replicas import Scripted

    collective = Scripted(lambda contribution: contribution.vector + 1)
    collective.gate.clear()
    joiner, donor = Replica(SpartaConfig(every_steps=1, num_slices=4), collective), trained()
    joiner.turn()
    joiner.trainer.adopt(donor.trainer.shared_state())
    collective.gate.set()
    assert joiner.drain() is None and parameter_bits(joiner.model) == parameter_bits(donor.model)


def spoiled(shared: SpartaState, kind: str) -> SpartaState:
    def changed(name: str, value: float) -> SpartaState:
        tensor = getattr(shared, name).clone()
        tensor[-1] = value
        return replace(shared, **{name: tensor})

    match kind:
        case "negative second moment":
            return changed("exp_avg_sq", -1e-12)
        case "nan":
            return changed("parameters", torch.nan)
        case "infinite moment":
            return changed("exp_avg", torch.inf)
        case "half a step":
            return changed("steps", 1.5)
        case "negative step":
            return changed("steps", -1.0)
        case "short":
            return replace(shared, exp_avg=shared.exp_avg[1:])
        case "double":
            return replace(shared, parameters=shared.parameters.double())
        case "round":
            return replace(shared, round_index=-1)
        case "rows":
            return replace(shared, vocab_rows=64)
        case _:
            return replace(shared, layout_digest="0" * 64)


KINDS = [
    "negative second moment", "nan", "infinite moment", "half a step", "negative step", "short", "double", "round",
    "rows", "layout",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_sound_is_refused_whole(kind: str) -> None:
    shared, joiner = trained().trainer.shared_state(), trained(4)
    before, moments = parameter_bits(joiner.model), joiner.moments()
    with pytest.raises(IncompatiblePeerError, match="state to adopt"):
        joiner.trainer.adopt(spoiled(shared, kind))
    assert parameter_bits(joiner.model) == before and joiner.trainer.round_index == 2
    assert all(torch.equal(value, moments[name]) for name, value in joiner.moments().items())


def test_through_a_snapshot_on_disk(tmp_path: Path) -> None:
    donor = trained()
    fit = SpartaFit(donor.trainer.layout)
    packed = fit.pack(donor.trainer.shared_state())
    assert packed is not None
    descriptor = write_snapshot(tmp_path, *packed)
    fit.expectation(descriptor).check(descriptor)
    assert descriptor.size_bytes == fit.max_bytes
    snapshot = load_snapshot(tmp_path, descriptor.digest)
    joiner = Replica(CONFIG, number=2)
    joiner.trainer.adopt(fit.unpack(snapshot.meta, snapshot.tensors))
    assert parameter_bits(joiner.model) == parameter_bits(donor.model)
    assert fit.outer_step(joiner.trainer.shared_state()) == donor.trainer.round_index
    again = write_snapshot(tmp_path, *(fit.pack(joiner.trainer.shared_state()) or ({}, {})))
    assert again.digest == descriptor.digest, "a twin hands on the very same state: one more donor of it"


def test_first_weights_are_handed_to_nobody() -> None:
    replica = Replica(CONFIG)
    assert SpartaFit(replica.trainer.layout).pack(replica.trainer.shared_state()) is None


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


META_CHANGES = {
    "kind": {"kind": "diloco"},
    "version": {"version": 2},
    "negative": {"round_index": -1},
    "huge": {"num_inner_steps": 2**60},
    "bool": {"vocab_rows": True},
    "text": {"round_index": "4"},
    "digest": {"layout_digest": "x"},
    "extra": {"anchor": 1},
}


@pytest.mark.parametrize("change", META_CHANGES.values(), ids=META_CHANGES)
def test_descriptors_of_something_else(change) -> None:
    shared = trained().trainer.shared_state()
    with pytest.raises(IncompatiblePeerError, match="SPARTA state of version 1"):
        check_meta({**snapshot_meta(shared), **change})
    with pytest.raises(IncompatiblePeerError, match="expected a snapshot of"):
        from_snapshot(snapshot_meta(shared), {"parameters": shared.parameters})
