"""The model of memory against the bytes of tensors that real steps hold."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice

import pytest
import torch

from tests.support.tensor_bytes import TensorBytes
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.inner.memory import largest_preset, peak_bytes, shortage, state_bytes
from trainer.model import PRESETS, ModelConfig, build_model, num_parameters, preset

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


GB = 1_000_000_000


@pytest.mark.parametrize(
    "inner",
    [
        InnerConfig(),
        InnerConfig(seq_len=1024, micro_batch_size=8),
        InnerConfig(seq_len=1024, micro_batch_size=8, activation_checkpointing="full"),
        InnerConfig(optimizer="muon", accumulation_steps=4),
    ],
)
@pytest.mark.parametrize("num_shards", [1, 8])
@pytest.mark.parametrize("available", [8 * GB, 24 * GB, 80 * GB, 141 * GB])
def test_the_largest_preset_is_the_last_of_which_a_step_fits(inner: InnerConfig, num_shards: int, available: int):
    found = largest_preset(available, 32_768, inner, num_ranks=num_shards, num_shards=num_shards)
    assert found == largest_preset(available + GB // 3, 32_768, inner, num_ranks=num_shards, num_shards=num_shards), (
        "memory counts in tiers"
    )
    rows = max(1, inner.micro_batch_size // num_shards)
    ladder = [preset(name, 32_768) for name in PRESETS]
    needed = [peak_bytes(each, inner, rows, num_shards=num_shards) for each in ladder]
    place = ladder.index(found)
    assert needed[place] <= 0.9 * available
    assert place + 1 == len(ladder) or needed[place + 1] > 0.9 * available


def test_larger_models_fit_with_less_to_keep_and_in_shards_and_smaller_ones_beside_something():
    def found(available: int = 80 * GB, beside: int = 0, num_shards: int = 1, **options) -> int:
        inner = InnerConfig(**{"seq_len": 2048, "micro_batch_size": 8, **options})
        return num_parameters(
            largest_preset(available, 32_768, inner, num_ranks=num_shards, num_shards=num_shards, beside=beside)
        )

    assert found() < found(activation_checkpointing="full")
    assert found() < found(num_shards=8)
    assert found(activation_checkpointing="full", beside=16) < found(activation_checkpointing="full")
    assert found(available=0) == num_parameters(preset("tiny", 32_768))
