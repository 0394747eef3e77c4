"""A swarm's stages as one Hugging Face model, and a swarm that begins with such a model."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.one_process import OneProcess, micro_batches_given, records_of
from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from tests.support.text_store import text_store
from tests.support.trainer_command import TrainerCommand
from trainer.model import build_model
from trainer.run.swarm.building import build_stage_site
from trainer.run.swarm.shape import shape_of

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Of transformers' own imports.
]

TERMINATED = 128 + signal.SIGTERM
SYNCHRONOUS = {"driver": {"synchronous": True}}


def logits_of_stages(swarm: PipelineSwarm, ids: Tensor) -> Tensor:
    """Through the stages' newest checkpoints, one after the other."""
    hidden = ids
    for stage in STAGES:
        built = build_stage_site(swarm.config, shape_of(swarm.config), stage)
        built.replica.load_state_dict(swarm.checkpoints().files[stage].read().state.for_replica())
        built.module.eval()
        with torch.no_grad():
            hidden = built.module(hidden)
    return hidden


def test_export_loads_in_transformers_and_another_swarm_starts_from_it(tmp_path: Path) -> None:
    store = text_store()
    command = TrainerCommand(store, tmp_path)
    with PipelineSwarm(tmp_path / "first", store, swarm=SYNCHRONOUS) as swarm:
        driver = swarm.begin_driver("driver-1", "--max-steps", "20")
        swarm.begin_workers(*STAGES)
        assert driver.exit_code() == 0
        assert swarm.stop(*STAGES) == [TERMINATED] * 3
        command.other("export", "--run", swarm.run_file, "--at", "now", "--to", "hf", tmp_path / "model")
        ids = torch.randint(10, 900, (2, 24), generator=torch.Generator().manual_seed(3))
        expected, untrained = logits_of_stages(swarm, ids), steps_of(driver)[0]["loss"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(ids).logits
    # Exported are the ids there are, without the rows that fill the embedding up to a multiple of 1,024.
    torch.testing.assert_close(logits, expected[..., : logits.shape[-1]], rtol=1e-4, atol=1e-4)

    options = {**SYNCHRONOUS, "start_from": str(tmp_path / "model")}
    with PipelineSwarm(tmp_path / "second", store, seed=12, swarm=options) as swarm:
        driver = swarm.begin_driver("driver-1", "--max-steps", "2")
        swarm.begin_workers(*STAGES)
        assert driver.exit_code() == 0
        assert swarm.stop(*STAGES) == [TERMINATED] * 3
        first = steps_of(driver)[0]
        with_all_rows(model, swarm)
        assert first["loss"] == pytest.approx(loss_on_first_step(swarm, model, first["num_tokens"]), rel=1e-4)
    assert first["loss"] < untrained - 0.2


def with_all_rows(model: Any, swarm: PipelineSwarm) -> None:
    """Gives transformers' model the rows a swarm fills up with: those it would have begun with itself."""
    fresh = build_model(shape_of(swarm.config).model, swarm.config.seed)
    known = model.config.vocab_size
    model.resize_token_embeddings(fresh.config.vocab_size, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[known:] = fresh.embedding.weight[known:]
        model.get_output_embeddings().weight[known:] = fresh.readout.output.weight[known:]


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
