"""What the models of a swarm's checkpoints make of text that nobody trained on."""

from __future__ import annotations

import time

import torch
from torch.nn import functional

from loader import GenesisDataset
from tests.support.pipeline_swarm import PipelineSwarm
from trainer.checkpoint.stages import assemble, newest_set, time_us
from trainer.model import Transformer


def held_out_rows(swarm: PipelineSwarm, num_rows: int) -> torch.Tensor:
    """[num_rows, seq_len + 1] ids of the shards that the run leaves out (`data.holdout`)."""
    data, length = swarm.config.data, swarm.config.inner.seq_len + 1
    dataset = GenesisDataset(
        data.store, "reader", seq_len=length, batch_size=num_rows, holdout=data.holdout, split="holdout", plateau="off"
    )
    return next(iter(dataset))["input_ids"]


def held_out_loss(swarm: PipelineSwarm, rows: torch.Tensor, at_s: float | None = None) -> float:
    """Mean loss of the model that an export of a moment has; of now, if none is named.

    Args:
        swarm: whose checkpoints.
        rows: [n, seq_len + 1] ids.
        at_s: the moment, seconds since 1970.
    """
    config = swarm.config
    at_us = time_us(time.time() if at_s is None else at_s)
    whole = assemble(newest_set(config.swarm.checkpoint.directory, config.run_id, at_us))
    model = Transformer(whole.config)
    model.load_state_dict(dict(whole.state))
    model.eval()
    with torch.no_grad():
        losses = [
            functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            for part in rows.split(64)
        ]
    return float(torch.stack(losses).sum()) / rows[:, 1:].numel()
