"""Stopping anywhere, in the middle of an inner loop or of a round, and going on bit for bit."""

from __future__ import annotations

import io

import pytest
import torch

from tests.support.toy_models import Quadratic, Regression, parameter_bits
from trainer.errors import CheckpointMismatchError
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import LocalCollective

CONFIGS = {
    "whole": DiLoCoConfig(inner_steps=5),
    "fragments": DiLoCoConfig(inner_steps=7, num_fragments=3),
    "overlapped": DiLoCoConfig(inner_steps=6, num_fragments=2, overlap_steps=2),
}
NUM_STEPS = 16


class Run:
    """A node from its own parts, and back from bytes."""

    def __init__(self, config: DiLoCoConfig) -> None:
        self.model = Regression(0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.trainer = DiLoCoTrainer(self.model, config, LocalCollective(), vocab_rows=7)
        self.committed: list[int] = []

    def train(self, first: int, stop: int) -> None:
        for step in range(first, stop):
            self.optimizer.zero_grad()
            self.model(step).backward()
            self.optimizer.step()
            if (result := self.trainer.after_inner_step()) is not None:
                self.committed.append(step)
                assert result.committed

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "diloco": self.trainer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, buffer)
        return buffer.getvalue()

    def restore(self, saved: bytes) -> None:
        contents = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(contents["model"])
        self.optimizer.load_state_dict(contents["optimizer"])
        self.trainer.load_state_dict(contents["diloco"])


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_restart_at_any_step_goes_on_bit_for_bit(config: DiLoCoConfig) -> None:
    undisturbed = Run(config)
    saved = [undisturbed.to_bytes()]
    for step in range(NUM_STEPS):
        undisturbed.train(step, step + 1)
        saved.append(undisturbed.to_bytes())
    for step in range(NUM_STEPS + 1):
        restarted = Run(config)
        restarted.restore(saved[step])
        restarted.train(step, NUM_STEPS)
        assert parameter_bits(restarted.model) == parameter_bits(undisturbed.model), f"from step {step}"
        assert restarted.trainer.state_digest() == undisturbed.trainer.state_digest()
        assert restarted.committed == [at for at in undisturbed.committed if at >= step]


def test_what_is_restored_is_what_was_saved() -> None:
    run = Run(CONFIGS["whole"])
    run.train(0, 8)
    state = run.trainer.state_dict()
    again = Run(CONFIGS["whole"])
    again.restore(run.to_bytes())
    assert (again.trainer.inner_step, again.trainer.outer_step, again.trainer.shared_state().vocab_rows) == (3, 1, 7)
    assert again.trainer.state_dict()["fragments"][0]["num_batches"] == 3
    assert again.trainer.state_dict()["fragments"][0]["since_s"] == state["fragments"][0]["since_s"]


def test_saved_tensors_do_not_change_under_a_background_writer() -> None:
    run = Run(CONFIGS["whole"])
    run.train(0, 3)
    state = run.trainer.state_dict()
    anchor = state["fragments"][0]["anchor"]
    before = anchor.clone()
    run.train(3, 12)
    assert torch.equal(anchor, before)
    assert not torch.equal(run.trainer.shared_state().anchor, before)


def test_loading_copies() -> None:
    run = Run(CONFIGS["whole"])
    state = run.trainer.state_dict()
    other = Run(CONFIGS["whole"])
    other.trainer.load_state_dict(state)
    before = other.trainer.shared_state().digest()
    state["fragments"][0]["anchor"].zero_()
    assert other.trainer.shared_state().digest() == before


def spoiled(change):
    def make() -> dict:
        state = Run(CONFIGS["whole"]).trainer.state_dict()
        change(state)
        return state

    return make


@pytest.mark.parametrize(
    "make",
    [
        dict,
        spoiled(lambda state: state.update(version=2)),
        spoiled(lambda state: state.pop("fragments")),
        spoiled(lambda state: state.update(round_index=-1)),
        spoiled(lambda state: state.update(inner_step="3")),
        spoiled(lambda state: state["fragments"].append(state["fragments"][0])),
        spoiled(lambda state: state["fragments"][0].pop("momentum")),
        spoiled(lambda state: state["fragments"][0].update(anchor=torch.zeros(3))),
        spoiled(lambda state: state["fragments"][0].update(residual=torch.zeros(3))),
        spoiled(lambda state: state["fragments"][0].update(num_batches=1.5)),
        spoiled(lambda state: state.update(flight={"vector": torch.zeros(2)})),
        lambda: DiLoCoTrainer(Quadratic(0), CONFIGS["whole"], LocalCollective()).state_dict(),
        lambda: Run(CONFIGS["fragments"]).trainer.state_dict(),
    ],
)
def test_anothers_state_is_refused_and_changes_nothing(make) -> None:
    run = Run(CONFIGS["whole"])
    run.train(0, 7)
    before, at = run.trainer.state_digest(), run.trainer.inner_step
    with pytest.raises(CheckpointMismatchError, match="expected"):
        run.trainer.load_state_dict(make())
    assert (run.trainer.state_digest(), run.trainer.inner_step) == (before, at)
