"""Muon for matrices beside AdamW: who moves what, by how much, resumed bit for bit, and with outer steps."""

from __future__ import annotations

import copy
import io
from itertools import islice
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Muon

from tests.support.model_configs import batches, small_model
from tests.trainer.inner.test_loop import CPU, _bits
from trainer.errors import CheckpointMismatchError
from trainer.inner import InnerConfig, InnerLoop, lr_at, make_optimizer
from trainer.model import Transformer
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import LocalCollective

MUON = InnerConfig(optimizer="muon", lr=1e-2, warmup_steps=4, decay_end_step=100)


def _loop(model: Transformer, config: InnerConfig = MUON, skip: int = 0) -> InnerLoop:
    return InnerLoop(model, make_optimizer(model, config), config, islice(batches(1), skip, None), CPU)


def test_matrices_within_blocks_are_muons_and_embedding_output_and_norms_adamws():
    model = small_model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = make_optimizer(model, MUON).param_groups
    found = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
    assert all(name.startswith("layers.") and "norm" not in name for name in found[0])
    assert sorted(found[1]) == ["embedding.weight", "readout.output.weight"]
    assert all("norm" in name for name in found[2])
    assert sum(map(len, found)) == len(names)
    assert ["betas" in group for group in groups] == [False, True, True]


def test_its_steps_are_those_of_both_optimizers_and_it_learns():
    model = small_model()
    plain = copy.deepcopy(model)
    inner = _loop(model)
    tables = [plain.embedding.weight, plain.readout.output.weight]
    matrices = [p for n, p in plain.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    norms = [parameter for parameter in plain.parameters() if parameter.ndim == 1]
    optimizers = [
        Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        AdamW(
            [{"params": tables}, {"params": norms, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        ),
    ]
    losses = []
    for step, batch in enumerate(islice(batches(1), 20)):
        loss = plain(batch["input_ids"], batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*matrices, *tables, *norms], MUON.max_grad_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, MUON)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(inner.step().loss)
        assert losses[-1] == loss.item()
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_state_goes_on_bit_for_bit_with_outer_steps_between(stop):
    """A checkpoint's bytes, not the live tensors; rounds fall on steps 3, 6 and 9."""

    def node(skip: int = 0) -> tuple[Transformer, InnerLoop, DiLoCoTrainer]:
        model = small_model()
        return model, _loop(model, skip=skip), DiLoCoTrainer(model, DiLoCoConfig(inner_steps=3), LocalCollective())

    def train(inner: InnerLoop, diloco: DiLoCoTrainer, steps: int) -> int:
        committed = 0
        for _ in range(steps):
            inner.step()
            outcome = diloco.after_inner_step()
            committed += outcome is not None and outcome.committed
        return committed

    model, inner, diloco = node()
    train(inner, diloco, stop)
    saved = _saved({"model": model.state_dict(), "inner": inner.state_dict(), "diloco": diloco.state_dict()})
    before = [p.detach().clone() for p in model.parameters()]
    assert train(inner, diloco, 10 - stop) == 3 - stop // 3
    assert all(not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    again, restarted, again_diloco = node(skip=stop)
    again.load_state_dict(saved["model"])
    restarted.load_state_dict(saved["inner"])
    again_diloco.load_state_dict(saved["diloco"])
    train(restarted, again_diloco, 10 - stop)
    assert _bits(restarted, again) == _bits(inner, model)
    assert again_diloco.state_digest() == diloco.state_digest()


def test_a_state_of_the_other_optimizer_is_refused():
    with pytest.raises(CheckpointMismatchError, match=r"inner\.optimizer"):
        _loop(small_model()).load_state_dict(_loop(small_model(), InnerConfig()).state_dict())


def test_it_keeps_one_moment_of_a_matrix_and_counts_skipped_steps_as_ever():
    model = small_model()
    inner = _loop(model)
    inner.step()
    state = inner.state_dict()["optimizer"]["state"]
    kinds = [set(each) for each in state.values()]
    assert kinds.count({"momentum_buffer"}) == sum(
        n.startswith("layers.") and p.ndim == 2 for n, p in model.named_parameters()
    )
    assert len(state) == len(list(model.parameters()))
