from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from trainer.errors import TrainerUsageError
from trainer.model import Transformer, grow_vocabulary, preset
from trainer.model.init import init_weights
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer, FlatLayout
from trainer.outer.engine.collective import Contribution, RoundReport, RoundResult

SEED = 3


class Lossy:
    """Alone, and with something left out each time."""

    def reduce(self, contribution: Contribution) -> RoundResult:
        report = RoundReport(round_index=contribution.round_index, members=("me",))
        return RoundResult(vector=contribution.vector, report=report, residual=contribution.vector * 0.125)

    def requested(self) -> bool:
        return False

    def close(self) -> None: ...


def small_model() -> Transformer:
    config = replace(preset("tiny", 1024), dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=32)
    model = Transformer(config)
    init_weights(model, config, SEED)
    return model


def drift(model: nn.Module) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * (index + 1))


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
        drift(model)
        trainer.after_inner_step()
    drift(model)
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
    drift(models[0])
    for model, trainer in zip(models, trainers, strict=True):
        grow_vocabulary(model, 2048, SEED)
        trainer.grow(model, 2048)
    assert trainers[0].state_digest() == trainers[1].state_digest(), "drift is each node's own, the anchor is not"
    result = [trainers[0].after_inner_step() for _ in range(2)][-1]
    assert result is not None and result.committed
    shared = trainers[0].shared_state()
    assert shared.anchor.numel() == sum(parameter.numel() for parameter in models[0].parameters())
    assert torch.equal(shared.anchor, trainers[0].plan.whole().gather(dict(models[0].named_parameters())))


class Table(nn.Module):
    def __init__(self, rows: int, width: int, name: str = "table") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(rows, width)))


@pytest.mark.parametrize("grown", [Table(3, 2), Table(4, 3), Table(5, 2, "other")], ids=["fewer", "wider", "renamed"])
def test_anything_but_more_rows_is_refused(grown: nn.Module) -> None:
    trainer = DiLoCoTrainer(Table(4, 2), DiLoCoConfig(), Lossy())
    before = trainer.state_digest()
    with pytest.raises(TrainerUsageError, match="expected"):
        trainer.grow(grown, 5)
    assert trainer.state_digest() == before and trainer.plan.whole() == FlatLayout.of({"table": torch.ones(4, 2)})
