"""Parameters and AdamW's memory wherever they are, slices and states on the CPU; with the run's own optimizer."""

from __future__ import annotations

import pytest
import torch

from tests.support.sparta_replicas import Scripted
from trainer.inner import InnerConfig, make_optimizer
from trainer.model import ModelConfig, Transformer, build_model
from trainer.outer.engine.collective import LocalCollective
from trainer.outer.sparta import SpartaConfig, SpartaTrainer

SHAPE = ModelConfig(vocab_size=64, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, max_seq_len=32)


def learn(model: Transformer, optimizer: torch.optim.Optimizer, num_steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    for _ in range(num_steps):
        ids = torch.randint(0, 64, (4, 17), generator=generator).to(device)
        optimizer.zero_grad()
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("trains_on", "joins_on"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda", "cuda", marks=ON_GPU),
        pytest.param("cuda", "cpu", marks=ON_GPU),
    ],
)
def test_a_state_moves_between_devices(trains_on: str, joins_on: str) -> None:
    config = SpartaConfig(every_steps=1, num_slices=5, background=False)
    model = build_model(SHAPE, 0).to(trains_on)
    optimizer = make_optimizer(model, InnerConfig())
    collective = Scripted(lambda contribution: contribution.vector + 0.5)
    trainer = SpartaTrainer(model, config, collective, optimizer=optimizer)
    learn(model, optimizer, 3, seed=1)
    before = trainer.shared_state()
    for _ in range(5):
        trainer.after_inner_step()
    shared = trainer.shared_state()
    assert torch.allclose(shared.parameters, before.parameters + 0.5, atol=1e-6)
    assert torch.equal(shared.exp_avg_sq, before.exp_avg_sq) and set(shared.steps.tolist()) == {3.0}

    twin = build_model(SHAPE, 1).to(joins_on)
    theirs = make_optimizer(twin, InnerConfig())
    joiner = SpartaTrainer(twin, config, LocalCollective(), optimizer=theirs)
    joiner.adopt(shared)
    again = joiner.shared_state()
    for name in ("parameters", "exp_avg", "exp_avg_sq", "steps"):
        assert torch.equal(getattr(again, name), getattr(shared, name))
    if joins_on == trains_on:
        learn(model, optimizer, 2, seed=2)
        learn(twin, theirs, 2, seed=2)
        assert torch.allclose(joiner.shared_state().parameters, trainer.shared_state().parameters, atol=1e-5)
