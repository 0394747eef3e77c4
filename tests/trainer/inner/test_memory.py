"""The model of memory against the bytes of tensors that real steps hold."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice

import pytest
import torch

from tests.support.tensor_bytes import TensorBytes
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.inner.memory import peak_bytes, shortage, state_bytes
from trainer.model import ModelConfig, build_model, num_parameters, preset

TINY, MIDDLE = preset("tiny", 4096), preset("15m", 8192)


def _measured(config: ModelConfig, inner: InnerConfig) -> int:
    """The peak of the third step: parameters and moments are there, and counted."""
    model = build_model(config, 0, activation_checkpointing=inner.activation_checkpointing)
    ids = torch.randint(0, config.vocab_size, (inner.micro_batch_size, inner.seq_len + 1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    optimizer = make_optimizer(model, inner)
    loop = InnerLoop(model, optimizer, inner, islice(iter(lambda: batch, None), 12), torch.device("cpu"))
    loop.step(), loop.step()
    with TensorBytes() as counted:
        for parameter in model.parameters():
            counted.add(parameter)
            for moment in optimizer.state[parameter].values():
                counted.add(moment)
        loop.step()
    return counted.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (TINY, {}),
        (TINY, {"activation_checkpointing": "selective"}),
        (TINY, {"activation_checkpointing": "full"}),
        (TINY, {"accumulation_steps": 2, "micro_batch_size": 2}),
        (MIDDLE, {"micro_batch_size": 2}),
        (MIDDLE, {"micro_batch_size": 1, "optimizer": "muon"}),
        (replace(TINY, tie_embeddings=True), {}),
    ],
)
def test_the_peak_of_a_step_is_what_is_planned_with(config, options):
    inner = InnerConfig(**{"micro_batch_size": 4, "seq_len": 256, **options})
    assert peak_bytes(config, inner, inner.micro_batch_size) == pytest.approx(_measured(config, inner), rel=0.1)


def test_a_parameter_takes_sixteen_bytes_and_twelve_where_muon_moves_it():
    tables = 2 * TINY.vocab_size * TINY.dim
    assert state_bytes(TINY, InnerConfig()) == 16 * num_parameters(TINY)
    found = state_bytes(TINY, InnerConfig(optimizer="muon"))
    norms = (2 * TINY.num_layers + 1) * TINY.dim
    assert found == 12 * num_parameters(TINY) + 4 * (tables + norms)


def test_a_batch_that_will_not_fit_is_told_before_it_is_tried():
    """Four layers keep some 300 MB of 4,096 tokens; weights, moments and the loss are 150 MB."""
    inner = InnerConfig(micro_batch_size=8, seq_len=512)
    assert shortage(TINY, inner, 2_000_000_000) == ""
    said = shortage(TINY, inner, 200_000_000)
    assert re.search(r"8 rows takes up to 0\.[3-7]\d GB, 0\.20 GB are available; .*--batch-size", said)
    assert "takes up to 2." in shortage(TINY, inner, 2_000_000_000, beside_bytes=1_900_000_000)
