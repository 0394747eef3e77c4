"""Stopping anywhere, also with a round in flight, and going on."""

from __future__ import annotations

import io

import pytest
import torch

from tests.support.sparta_replicas import Replica, Scripted
from tests.support.toy_models import parameter_bits
from trainer.errors import CheckpointMismatchError
from trainer.outer.sparta import SpartaConfig

CONFIGS = {
    "waiting": SpartaConfig(every_steps=3, num_slices=4, background=False),
    "background": SpartaConfig(every_steps=3, num_slices=4),
}
NUM_STEPS = 14


def saved(replica: Replica) -> bytes:
    buffer = io.BytesIO()
    parts = {"model": replica.model, "optimizer": replica.optimizer, "sparta": replica.trainer}
    torch.save({name: part.state_dict() for name, part in parts.items()}, buffer)
    return buffer.getvalue()


def restored(contents: bytes, config: SpartaConfig) -> Replica:
    replica = Replica(config, number=5)
    replica.model.replica = 0
    parts = torch.load(io.BytesIO(contents), weights_only=True)
    replica.model.load_state_dict(parts["model"])
    replica.optimizer.load_state_dict(parts["optimizer"])
    replica.trainer.load_state_dict(parts["sparta"])
    return replica


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_restart_at_any_step_goes_on_bit_for_bit(config: SpartaConfig) -> None:
    undisturbed = Replica(config)
    at = [saved(undisturbed)]
    for step in range(NUM_STEPS):
        undisturbed.train(step, step + 1)
        at.append(saved(undisturbed))
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


def test_where_it_stood_is_where_it_stands() -> None:
    replica = Replica(CONFIGS["waiting"])
    donor = Replica(CONFIGS["waiting"])
    donor.train(0, 8)
    replica.trainer.adopt(donor.trainer.shared_state())
    replica.train(8, 13)
    again = restored(saved(replica), CONFIGS["waiting"])
    assert again.trainer.state_dict() == replica.trainer.state_dict()
    assert again.trainer.is_ghost and again.trainer.round_index == 3 and again.trainer.inner_step == 2
    assert again.trainer.shared_state().num_inner_steps == 13


def broken(state: dict, change: dict) -> dict:
    return {name: value for name, value in {**state, **change}.items() if value is not None}


CHANGES = {
    "version": {"version": 2},
    "no version": {"version": None},
    "missing": {"reached": None},
    "more": {"anchor": 1},
    "negative": {"round_index": -1},
    "bool": {"failed_in_a_row": True},
    "tensor": {"progress": torch.zeros(3)},
    "few": {"progress": []},
    "nan": {"progress": [{"num_batches": 1, "since_s": float("nan")}] * 4},
    "other model": {"schedule_digest": "0" * 64},
    "ahead of itself": {"reached": 9},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_states_of_something_else_are_refused_and_change_nothing(change) -> None:
    replica = Replica(CONFIGS["waiting"])
    replica.train(0, 7)
    before = replica.trainer.state_dict()
    with pytest.raises(CheckpointMismatchError, match="SPARTA state"):
        replica.trainer.load_state_dict(broken(before, change))
    assert replica.trainer.state_dict() == before
