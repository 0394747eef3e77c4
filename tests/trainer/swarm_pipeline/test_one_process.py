"""Three stages, a worker each, train as one process does; their stages are one Hugging Face model, and begin with one.

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

from tests.support.pipeline_swarm import STAGES, OneProcess, PipelineSwarm, micro_batches_given, records_of, steps_of
from tests.support.small_store import text_store
from tests.support.token_store import TokenStore
from tests.support.trainer_command import TrainerCommand
from tests.support.training_swarm import TERMINATED
from trainer.run.swarm.building import BuiltStage, build_stage_site
from trainer.run.swarm.shape import shape_of

STEP_TOLERANCE, TENSOR_TOLERANCE = 1e-4, 1e-3
SYNCHRONOUS = {"driver": {"synchronous": True}}


def saved_stage(swarm: PipelineSwarm, stage: str) -> BuiltStage:
    """A stage with the state of its last checkpoint."""
    built = build_stage_site(swarm.config, shape_of(swarm.config), stage)
    built.replica.load_state_dict(swarm.checkpoints().files[stage].read().state.for_replica())
    return built


def train(swarm: PipelineSwarm, num_steps: int) -> None:
    """Has a driver and a worker of each stage do so many steps, and stops the workers."""
    driver = swarm.begin_driver("driver-1", "--max-steps", str(num_steps))
    swarm.begin_workers(*STAGES)
    assert driver.exit_code(400) == 0
    assert swarm.stop(*STAGES) == [TERMINATED] * 3


def difference(one: Tensor, other: Tensor) -> float:
    """Relative to the other's norm."""
    with torch.no_grad():
        return float((one - other).norm() / other.norm())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hub_and_chain_train_as_one_process_does(tmp_path: Path) -> None:
    """Ten steps by hub, and by the next driver ten more by chain, from where the first left data and count."""
    store = TokenStore.of(tmp_path / "store", 3).folder
    with PipelineSwarm(tmp_path / "swarm", store, swarm={**SYNCHRONOUS, "join": {"first_peers_s": 0.5}}) as swarm:
        driver = swarm.begin_driver("driver-1", "--max-steps", "10")
        workers = swarm.begin_workers(*STAGES)
        assert driver.exit_code() == 0
        swarm.begin_driver("driver-1", "--max-steps", "20", "--set", "swarm.driver.routing=chain")
        assert swarm["driver-1"].exit_code() == 0
        assert swarm.stop(*STAGES) == [TERMINATED] * 3
        steps = steps_of(swarm["driver-1"])
        single = OneProcess(swarm.config, records_of(swarm.journal))
        expected = list(single.steps())
        assert len(steps) == len(expected) == 20
        assert [step["num_tokens"] for step in steps] == [step.num_tokens for step in expected]
        losses = [step["loss"] for step in steps]
        assert losses == pytest.approx([step.loss for step in expected], rel=STEP_TOLERANCE)
        weights, moments = dict(single.model.named_parameters()), single.moments()
        for stage in STAGES:
            norms = [event.number("grad_norm") for event in swarm[stage].events("step")]
            assert norms == pytest.approx([step.grad_norms[stage] for step in expected], rel=STEP_TOLERANCE), stage
            built = saved_stage(swarm, stage)
            assert built.replica.version == 20
            trained = [(name, each) for name, each in built.module.named_parameters() if each.requires_grad]
            for name, parameter in trained:
                assert difference(parameter, weights[name]) < TENSOR_TOLERANCE, name
                assert difference(built.optimizer.state[parameter]["exp_avg"], moments[name]) < TENSOR_TOLERANCE, name
            assert trained
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert all("Traceback" not in worker.output() for worker in workers)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of transformers' own imports.
def test_export_loads_in_transformers_and_another_swarm_starts_from_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    store = text_store()
    command = TrainerCommand(store, tmp_path)
    with PipelineSwarm(tmp_path / "first", store, swarm=SYNCHRONOUS) as swarm:
        train(swarm, 20)
        command.other("export", "--run", swarm.run_file, "--at", "now", "--to", "hf", tmp_path / "model")
        ids = torch.randint(10, 900, (2, 24), generator=torch.Generator().manual_seed(3))
        expected, untrained = ids, steps_of(swarm["driver-1"])[0]["loss"]
        for stage in STAGES:
            with torch.no_grad():
                expected = saved_stage(swarm, stage).module.eval()(expected)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(ids).logits
    # Exported are the ids there are, without the rows that fill the embedding up to a multiple of 1,024.
    torch.testing.assert_close(logits, expected[..., : logits.shape[-1]], rtol=1e-4, atol=1e-4)

    options = {**SYNCHRONOUS, "start_from": str(tmp_path / "model")}
    with PipelineSwarm(tmp_path / "second", store, seed=12, swarm=options) as swarm:
        train(swarm, 2)
        first = steps_of(swarm["driver-1"])[0]
        # The rows that fill the embedding up are in no loss: the exported model, which lacks them, computes the same.
        assert first["loss"] == pytest.approx(loss_on_first_step(swarm, model, first["num_tokens"]), rel=1e-4)
    assert first["loss"] < untrained - 0.2


def loss_on_first_step(swarm: PipelineSwarm, model: torch.nn.Module, num_tokens: int) -> float:
    """Of transformers' model, on what the first step of a swarm was made of."""
    records = records_of(swarm.journal)
    rows = OneProcess(swarm.config, records).rows
    loss_sum, seen = 0.0, 0
    for micro_batch in micro_batches_given(records):
        if seen >= num_tokens:
            break
        inputs, labels = rows.read(micro_batch)
        with torch.no_grad():
            logits = model(inputs).logits
        loss_sum += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        seen += labels.numel()
    assert seen == num_tokens
    return loss_sum / seen
