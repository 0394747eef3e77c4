"""DiLoCo's state: stopping anywhere and going on bit for bit, and growing with the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.replica_group import Quadratic, Regression, Scripted, drift, parameter_bits, restore, to_bytes
from trainer.errors import CheckpointMismatchError
from trainer.model import Transformer, grow_vocabulary, preset
from trainer.model.init import init_weights
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import Contribution, LocalCollective, RoundResult

CONFIGS = {
    "whole": DiLoCoConfig(inner_steps=5),
    "fragments": DiLoCoConfig(inner_steps=7, num_fragments=3),
    "overlapped": DiLoCoConfig(inner_steps=6, num_fragments=2, overlap_steps=2),
}
NUM_STEPS = 16


class Run:
    """A node from its own parts."""

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

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "diloco": self.trainer}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_restart_at_any_step_goes_on_bit_for_bit(config: DiLoCoConfig) -> None:
    undisturbed = Run(config)
    saved = [to_bytes(**undisturbed.parts())]
    for step in range(NUM_STEPS):
        undisturbed.train(step, step + 1)
        saved.append(to_bytes(**undisturbed.parts()))
    for step in range(NUM_STEPS + 1):
        restarted = Run(config)
        restore(saved[step], **restarted.parts())
        restarted.train(step, NUM_STEPS)
        assert parameter_bits(restarted.model) == parameter_bits(undisturbed.model), f"from step {step}"
        assert restarted.trainer.state_digest() == undisturbed.trainer.state_digest()
        assert restarted.committed == [at for at in undisturbed.committed if at >= step]


def test_neither_saved_nor_loaded_tensors_change_with_the_others() -> None:
    run, other = Run(CONFIGS["whole"]), Run(CONFIGS["whole"])
    run.train(0, 3)
    state = run.trainer.state_dict()
    other.trainer.load_state_dict(state)
    anchor, loaded = state["fragments"][0]["anchor"], other.trainer.shared_state().digest()
    before = anchor.clone()
    run.train(3, 12)
    assert torch.equal(anchor, before), "a background writer may still read it"
    assert not torch.equal(run.trainer.shared_state().anchor, before)
    anchor.zero_()
    assert other.trainer.shared_state().digest() == loaded


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.update(version=2),
        lambda state: state.pop("fragments"),
        lambda state: state.update(round_index=-1),
        lambda state: state["fragments"].append(state["fragments"][0]),
        lambda state: state["fragments"][0].update(anchor=torch.zeros(3)),
        lambda state: state.update(flight={"vector": torch.zeros(2)}),
        lambda state: state.update(DiLoCoTrainer(Quadratic(0), DiLoCoConfig(), LocalCollective()).state_dict()),
        lambda state: state.update(Run(CONFIGS["fragments"]).trainer.state_dict()),
    ],
)
def test_anothers_state_is_refused_and_changes_nothing(spoil) -> None:
    run, state = Run(CONFIGS["whole"]), Run(CONFIGS["whole"]).trainer.state_dict()
    spoil(state)
    run.train(0, 7)
    before, at = run.trainer.state_digest(), run.trainer.inner_step
    with pytest.raises(CheckpointMismatchError, match="expected"):
        run.trainer.load_state_dict(state)
    assert (run.trainer.state_digest(), run.trainer.inner_step) == (before, at)


SEED = 3


class Lossy(Scripted):
    """Leaves something out each time."""

    def reduce(self, contribution: Contribution) -> RoundResult:
        return replace(super().reduce(contribution), residual=contribution.vector * 0.125)


def small_model() -> Transformer:
    config = replace(preset("tiny", 1024), dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=32)
    model = Transformer(config)
    init_weights(model, config, SEED)
    return model


def vectors(trainer: DiLoCoTrainer, name: str) -> dict[str, torch.Tensor]:
    """One kind of the state's vectors, cut back into named tensors."""
    named = {}
    for layout, fragment in zip(trainer.plan.layouts, trainer.state_dict()["fragments"], strict=True):
        named |= {tensor: fragment[name][place].view(shape) for tensor, shape, place in layout.slices()}
    return named


@pytest.mark.parametrize("num_fragments", [1, 3])
def test_old_rows_stay_and_new_rows_are_the_models_or_zero(num_fragments: int) -> None:
    model = small_model()
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=3, num_fragments=num_fragments), Lossy(), vocab_rows=1024)
    for _ in range(3):
        drift(model, 0.01)
        trainer.after_inner_step()
    drift(model, 0.01)
    kinds = ("anchor", "momentum", "reference", "residual")
    before = {kind: {name: tensor.clone() for name, tensor in vectors(trainer, kind).items()} for kind in kinds}
    old_digest = trainer.state_digest()
    grow_vocabulary(model, 2048, SEED)
    trainer.grow(model, 2048)
    parameters = dict(model.named_parameters())
    for kind in kinds:
        for name, tensor in vectors(trainer, kind).items():
            rows = before[kind][name].shape[0]
            assert torch.equal(tensor[:rows], before[kind][name])
            new = parameters[name][rows:] if kind == "anchor" else torch.zeros_like(tensor[rows:])
            assert torch.equal(tensor[rows:], new)
            assert before[kind][name].any(), "or the test says nothing"
    assert vectors(trainer, "anchor")["embedding.weight"].shape == (2048, 32)
    assert trainer.state_digest() != old_digest and trainer.shared_state().vocab_rows == 2048


def test_training_goes_on_and_members_that_grew_apart_agree() -> None:
    config = DiLoCoConfig(inner_steps=2, outer_lr=1.0, outer_momentum=0.0)
    models = [small_model(), small_model()]
    trainers = [DiLoCoTrainer(model, config, Lossy(), vocab_rows=1024) for model in models]
    drift(models[0], 0.01)
    for model, trainer in zip(models, trainers, strict=True):
        grow_vocabulary(model, 2048, SEED)
        trainer.grow(model, 2048)
    assert trainers[0].state_digest() == trainers[1].state_digest(), "drift is each node's own, the anchor is not"
    assert trainers[0].after_inner_step() is None and trainers[0].after_inner_step().committed
    anchor = trainers[0].shared_state().anchor
    assert torch.equal(anchor, trainers[0].plan.whole().gather(dict(models[0].named_parameters())))
