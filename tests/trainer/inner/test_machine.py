"""Where and how precisely the model computes, how many rows fit, and random generators that go on where they were."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.model_configs import batches, small_model
from trainer.errors import CheckpointMismatchError, TrainerUsageError
from trainer.inner import (
    InnerConfig,
    InnerLoop,
    autocast_for,
    batch_size_for,
    choose_device,
    make_optimizer,
    rng_state,
    set_rng_state,
    use_device,
)
from trainer.inner.config import activation_bytes
from trainer.model import ModelConfig, build_model, num_parameters, preset

GIB = 1 << 30
TINY = preset("tiny", 32_000)
CPU = torch.device("cpu")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def _loop(model: nn.Module, device: torch.device, **options: Any) -> InnerLoop:
    config = InnerConfig(**{"warmup_steps": 1, **options})
    return InnerLoop(model, make_optimizer(model, config), config, batches(1), device)


def test_the_cpu_is_there_when_asked_for_and_where_there_is_no_gpu_and_others_are_refused() -> None:
    assert choose_device("cpu") == CPU
    assert torch.cuda.is_available() or choose_device() == CPU
    for name in ("gpu", "cuda:", "cuda:x", "cuda:999", "mps", ""):
        with pytest.raises(TrainerUsageError, match=f"device: expected .*{name!r}"):
            choose_device(name)


def test_the_gpu_that_was_named_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else events are recorded on the first GPU, where nothing runs, and its free memory decides."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert use_device("cpu") == CPU and not current
    assert use_device("cuda:1") == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]


@with_gpu
def test_a_rank_of_torchrun_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count() - 1))
    assert choose_device() == torch.device("cuda", torch.cuda.device_count() - 1)


def test_bf16_on_a_cpu_when_asked_alone_with_parameters_moments_and_loss_in_fp32() -> None:
    for precision in ("auto", "fp32"):
        with autocast_for(CPU, precision)():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    model = small_model()
    loop, exactly = _loop(model, CPU, precision="bf16"), _loop(small_model(), CPU)
    for _ in range(3):
        half, full = loop.step(), exactly.step()
    assert half.loss == pytest.approx(full.loss, rel=1e-2)
    assert half.loss != full.loss
    moments = [value for state in loop.state_dict()["optimizer"]["state"].values() for value in state.values()]
    assert {tensor.dtype for tensor in [*model.parameters(), *moments]} == {torch.float32}


@with_gpu
def test_a_gpu_trains_like_the_cpu_in_fp32() -> None:
    losses = []
    for device in (CPU, choose_device("cuda")):
        loop = _loop(small_model().to(device), device, precision="fp32", compile="off", lr=1e-3)
        losses.append([loop.step().loss for _ in range(10)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_typical_node_reaches_the_upper_end_and_a_model_that_hardly_fits_or_does_not_gets_one_row() -> None:
    assert batch_size_for(4 * GIB, TINY, 512) == 8
    assert batch_size_for(1 << 50, preset("7.5b", 32_000), 4096) == 8
    for memory_bytes in (1, 10**6, 16 * num_parameters(TINY)):
        assert batch_size_for(memory_bytes, TINY, 512) == 1
    for memory_bytes, seq_len in ((0, 512), (GIB, 0)):
        with pytest.raises(TrainerUsageError, match="1 or more"):
            batch_size_for(memory_bytes, TINY, seq_len)
    for rows in (1, 2, 5, 8):  # With checkpointed activations it is the rule of the specification.
        enough = 16 * num_parameters(TINY) + int(rows * 512 * TINY.dim * TINY.num_layers * 8 / 0.3) + 4
        assert batch_size_for(enough, TINY, 512, activation_checkpointing=True) == rows
        assert batch_size_for(enough - 1000, TINY, 512, activation_checkpointing=True) == max(1, rows - 1)


@given(
    memory_bytes=st.integers(1, 1 << 42),
    more_bytes=st.integers(0, 1 << 40),
    seq_len=st.integers(1, 1 << 16),
    checkpointing=st.booleans(),
)
def test_it_is_whole_within_bounds_and_grows_with_memory(memory_bytes, more_bytes, seq_len, checkpointing):
    rows, more = (
        batch_size_for(size_bytes, TINY, seq_len, activation_checkpointing=checkpointing)
        for size_bytes in (memory_bytes, memory_bytes + more_bytes)
    )
    assert isinstance(rows, int)
    assert 1 <= rows <= more <= 8


@pytest.mark.parametrize("shape", [replace(TINY, vocab_size=1024), preset("30m", 1024)])
def test_what_the_blocks_keep_is_what_is_counted_on(shape: ModelConfig) -> None:
    model = build_model(shape, seed=0)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.zeros(1, 256, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids)
    output_bytes = shape.vocab_size * shape.dim * 4
    total = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in parameters) - output_bytes
    assert total / (256 * shape.num_layers) == pytest.approx(activation_bytes(shape), rel=0.05)


def _draw() -> list[object]:
    """Normal draws too: each generator keeps the second of a pair for the next call."""
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), float(np.random.normal())]
    return [*numbers, torch.rand(3).tolist(), torch.randn(3).tolist()]


@pytest.fixture(autouse=True)
def as_before() -> object:
    state = rng_state()
    yield
    set_rng_state(state)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_all_generators_go_on_where_they_were() -> None:
    for seed in range(3):
        _seed(seed)
        _draw()
        file = io.BytesIO()
        torch.save(rng_state(), file)
        expected = [_draw() for _ in range(5)]
        _seed(99)
        file.seek(0)
        set_rng_state(torch.load(file, weights_only=True))
        assert [_draw() for _ in range(5)] == expected


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"python": (3, torch.zeros(3, dtype=torch.int64), None)},
        {"numpy": (torch.zeros(3, dtype=torch.int64), 0, 0, 0.0)},
        {"torch_cpu": torch.zeros(3, dtype=torch.uint8)},
    ],
)
def test_a_state_that_is_none_is_refused_before_any_generator_is_touched(damage: dict[str, object]) -> None:
    state = rng_state()
    expected = _draw()
    set_rng_state(state)
    rng_state()  # Taking the state draws nothing.
    with pytest.raises(CheckpointMismatchError, match="random"):
        set_rng_state({**state, **damage})
    assert _draw() == expected
