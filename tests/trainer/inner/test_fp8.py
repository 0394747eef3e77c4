"""fp8 products through torchao: which, what they change, and where they are refused; emulated, since this is a CPU."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from tests.support.model_configs import batches, small_model
from trainer.errors import TrainerUsageError
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.inner.fp8 import LEAST_PARAMETERS, convert, use_fp8

CPU = torch.device("cpu")


def test_small_models_stay_as_they_are_and_a_device_without_fp8_is_refused(caplog):
    model = small_model()
    with caplog.at_level(logging.WARNING):
        assert not use_fp8(model, LEAST_PARAMETERS - 1, CPU)
    assert "below 1,000,000,000" in caplog.text
    with pytest.raises(TrainerUsageError, match=r"compute capability 8\.9"):
        use_fp8(model, LEAST_PARAMETERS, CPU)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_it_trains_as_in_fp32_to_the_rounding_of_fp8_with_the_same_state():
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    exact = small_model()
    model = copy.deepcopy(exact)
    convert(model, emulate=True)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["layers.0.attention.q_proj"] == "Float8Linear" and kinds["readout.output"] == "Linear"
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in exact.named_parameters()}
    config = InnerConfig(lr=1e-2, warmup_steps=2, decay_end_step=100, precision="bf16")
    losses = []
    for each in (exact, model):
        inner = InnerLoop(each, make_optimizer(each, config), config, batches(1), CPU)
        losses.append([inner.step().loss for _ in range(20)])
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert losses[1] != losses[0]
    assert sum(losses[1][-3:]) < 0.8 * sum(losses[1][:3])
    small_model().load_state_dict(model.state_dict())
