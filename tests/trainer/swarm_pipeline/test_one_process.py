"""Three stages, a worker each, driven step by step: the losses, gradients and weights of one process.

fp32, the same micro-batches, nothing clipped on either side. Products and sums are grouped differently (a micro-batch
at a time against one graph; gradients added up before they are divided, or after), so figures differ by a few units of
rounding a step, and AdamW's division by the root of a small second moment makes more of it: losses and norms have to
agree to 1e-4 of themselves, weights and AdamW's mean gradients to 1e-3 of their tensor's norm.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.one_process import OneProcess, records_of
from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from tests.support.text_store import text_store
from tests.support.token_store import TokenStore
from trainer.run.swarm.building import build_stage_site
from trainer.run.swarm.shape import shape_of

STEP_TOLERANCE, TENSOR_TOLERANCE = 1e-4, 1e-3


def check_equal_training(swarm: PipelineSwarm, num_steps: int) -> list[float]:
    """Compares what the swarm's processes left behind with the same run in one process; returns the losses."""
    steps = steps_of(swarm["driver-1"])
    records = records_of(swarm.journal)
    single = OneProcess(swarm.config, records)
    expected = list(single.steps())
    assert len(steps) == len(expected) == num_steps
    assert [step["num_tokens"] for step in steps] == [step.num_tokens for step in expected]
    losses = [step["loss"] for step in steps]
    assert losses == pytest.approx([step.loss for step in expected], rel=STEP_TOLERANCE)
    for stage in STAGES:
        norms = [event.number("grad_norm") for event in swarm[stage].events("step")]
        assert norms == pytest.approx([step.grad_norms[stage] for step in expected], rel=STEP_TOLERANCE), stage
        check_equal_stage(swarm, stage, single, num_steps)
    return losses


def check_equal_stage(swarm: PipelineSwarm, stage: str, single: OneProcess, num_steps: int) -> None:
    """The stage's last checkpoint holds the one process' weights and moments."""
    built = build_stage_site(swarm.config, shape_of(swarm.config), stage)
    built.replica.load_state_dict(swarm.checkpoints().files[stage].read().state.for_replica())
    assert built.replica.version == num_steps
    weights, moments = dict(single.model.named_parameters()), single.moments()
    trained = [(name, parameter) for name, parameter in built.module.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        assert difference(parameter, weights[name]) < TENSOR_TOLERANCE, name
        assert difference(built.optimizer.state[parameter]["exp_avg"], moments[name]) < TENSOR_TOLERANCE, name
    assert trained


def difference(one: Tensor, other: Tensor) -> float:
    """Relative to the other's norm."""
    with torch.no_grad():
        return float((one - other).norm() / other.norm())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hub_and_chain_train_as_one_process_does(tmp_path: Path) -> None:
    """Ten steps by hub, and by the next driver ten more by chain, from where the first left data and count."""
    store = TokenStore.of(tmp_path / "store", 3).folder
    options = {"driver": {"synchronous": True}, "join": {"first_peers_s": 0.5}}
    with PipelineSwarm(tmp_path / "swarm", store, swarm=options) as swarm:
        driver = swarm.begin_driver("driver-1", "--max-steps", "10")
        workers = swarm.begin_workers(*STAGES)
        assert driver.exit_code() == 0
        swarm.begin_driver("driver-1", "--max-steps", "20", "--set", "swarm.driver.routing=chain")
        assert swarm["driver-1"].exit_code() == 0
        assert swarm.stop(*STAGES) == [143] * 3
        losses = check_equal_training(swarm, 20)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert all("Traceback" not in worker.output() for worker in workers)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("routing", ["hub", "chain"])
def test_three_hundred_steps_on_text(routing: str, tmp_path: Path) -> None:
    """The loss falls, and stays the one process' loss on the way."""
    options = {"synchronous": True, "routing": routing}
    with PipelineSwarm(tmp_path, text_store(), swarm={"driver": options}) as swarm:
        driver = swarm.begin_driver("driver-1", "--max-steps", "300")
        swarm.begin_workers(*STAGES)
        assert driver.exit_code(400) == 0
        assert swarm.stop(*STAGES) == [143] * 3
        losses = check_equal_training(swarm, 300)
    assert sum(losses[-20:]) / 20 < sum(losses[:20]) / 20 - 1
