"""Where and how precisely the model computes."""

from __future__ import annotations

import pytest
import torch

from tests.support.small_model import batches, small_model
from trainer.errors import TrainerUsageError
from trainer.inner import InnerConfig, InnerLoop, autocast_for, choose_device, compiled, make_optimizer

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def test_the_cpu_is_there_when_asked_for() -> None:
    assert choose_device("cpu") == CPU


@without_gpu
def test_without_a_gpu_it_is_the_cpu() -> None:
    assert choose_device() == CPU


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:999", "mps", ""])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(TrainerUsageError, match=f"device: expected .*{name!r}"):
        choose_device(name)


@with_gpu
def test_a_rank_of_torchrun_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count() - 1))
    assert choose_device() == torch.device("cuda", torch.cuda.device_count() - 1)


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_on_a_cpu_everything_is_fp32_unless_asked(precision: str) -> None:
    with autocast_for(CPU, precision)():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_bf16_on_a_cpu_when_asked_with_parameters_moments_and_loss_in_fp32() -> None:
    model, config = small_model(), InnerConfig(precision="bf16", warmup_steps=1)
    loop = InnerLoop(model, make_optimizer(model, config), config, batches(1), CPU)
    exact_model, exact = small_model(), InnerConfig(warmup_steps=1)
    exactly = InnerLoop(exact_model, make_optimizer(exact_model, exact), exact, batches(1), CPU)
    for _ in range(3):
        half, full = loop.step(), exactly.step()
    assert half.loss == pytest.approx(full.loss, rel=1e-2)
    assert half.loss != full.loss
    moments = [value for state in loop.state_dict()["optimizer"]["state"].values() for value in state.values()]
    assert {tensor.dtype for tensor in [*model.parameters(), *moments]} == {torch.float32}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while dynamo is imported
def test_nothing_is_compiled_on_a_cpu_unless_asked() -> None:
    model = small_model()
    assert compiled(model, "auto", CPU) is model
    assert compiled(model, "off", CPU) is model
    wrapped = compiled(model, "on", CPU)
    assert wrapped is not model
    assert {id(each) for each in wrapped.parameters()} == {id(each) for each in model.parameters()}


@with_gpu
def test_a_gpu_trains_like_the_cpu_in_fp32() -> None:
    losses = []
    for device in (CPU, choose_device("cuda")):
        model = small_model().to(device)
        config = InnerConfig(precision="fp32", compile="off", warmup_steps=1, lr=1e-3)
        loop = InnerLoop(model, make_optimizer(model, config), config, batches(1), device)
        losses.append([loop.step().loss for _ in range(10)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@with_gpu
@pytest.mark.slow
def test_a_gpu_trains_compiled_in_bf16_by_default() -> None:
    device = choose_device()
    model, config = small_model().to(device), InnerConfig(warmup_steps=4, lr=1e-2)
    loop = InnerLoop(model, make_optimizer(model, config), config, batches(1), device)
    losses = [loop.step().loss for _ in range(60)]
    assert losses[-1] < 2.0
