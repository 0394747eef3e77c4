"""DiLoCo among four nodes against DDP among four ranks: the same data, tokens, steps and model, as a user runs them.

Both begin with the same weights and read the same rows (names decide shards, and nodes have the names of the ranks).
DiLoCo talks every 20th step only. Each has the best rate of those tried for it alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manifests import decode_shard
from tests.support.text_store import MERGES, text_store
from tests.support.trainer_command import TrainerCommand
from tests.support.training_swarm import SETTINGS, TrainingSwarm
from trainer.model import ModelConfig, build_model
from trainer.monitor import read_events
from trainer.run.node.replica import parameters_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

NAMES = ("pod-0", "pod-1", "pod-2", "pod-3")
INNER_STEPS = 20
STEPS = 10 * INNER_STEPS
ROWS, SEQ_LEN = 32, 32
DDP_LR = 6e-3
DILOCO_LR = 8e-3
OUTER = {"outer_lr": 1.0, "outer_momentum": 0.4}
RUN_S = 600.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(NAMES)))


def inner(lr: float) -> dict[str, Any]:
    return {"lr": lr, "warmup_steps": 20, "decay_end_step": STEPS, "seq_len": SEQ_LEN, "micro_batch_size": ROWS}


def held_out_loss(saved: Mapping[str, Any]) -> float:
    """Of a checkpoint's parameters, on the shard that no node trains on."""
    model = build_model(ModelConfig.from_dict(dict(saved["architecture"])), seed=0)
    model.load_state_dict(parameters_of(saved["layers"]))
    ids = torch.from_numpy(decode_shard((text_store() / "shard_0.pt").read_bytes()).astype(np.int64))
    rows = ids[: len(ids) // (SEQ_LEN + 1) * (SEQ_LEN + 1)].view(-1, SEQ_LEN + 1)
    with torch.no_grad():
        return float(model(rows[:, :-1], rows[:, 1:]))


def trained_tokens(log: Path) -> int:
    return sum(int(event.number("num_tokens")) for event in read_events(log) if event.kind == "step")


def options(lr: float) -> list[str]:
    """What a swarm's configuration has, as options of the command line."""
    chosen = [("data", SETTINGS["data"]), ("inner", inner(lr))]
    spelled = [f"{section}.{name}={value}" for section, values in chosen for name, value in values.items()]
    return [part for text in spelled for part in ("--set", text)]


def ddp(folder: Path) -> dict[str, Any]:
    """The checkpoint of a rank at the end; all ranks have the same parameters."""
    command = TrainerCommand(text_store(), folder, common=(), starter=(*TORCHRUN, "-m", "trainer"))
    common = ["--preset", "tiny", "--seed", str(SETTINGS["seed"]), "--threads", "1", "--device", "cpu", "--no-api"]
    run = ["--engine", "torch", "--strategy", "ddp", "--node-id", "pod", "--max-steps", str(STEPS)]
    command(*common, *run, *options(DDP_LR), "--log-dir", folder / "log", timeout_s=RUN_S)
    return command.saved("pod", "rank-0")


def diloco(folder: Path) -> dict[str, Any]:
    """The checkpoint of a node at the end; all nodes have the same parameters."""
    settings = {"inner": inner(DILOCO_LR), "diloco": {"inner_steps": INNER_STEPS, **OUTER}}
    patient = {"collective": {"min_members": len(NAMES)}}
    with TrainingSwarm(folder, max_steps=STEPS, **settings, **patient) as swarm:
        swarm.begin(*NAMES)
        assert [swarm[name].exit_code(RUN_S) for name in NAMES] == [0] * len(NAMES)
        saved = [swarm[name].checkpoint() for name in NAMES]
    assert {checkpoint["diloco"]["outer_step"] for checkpoint in saved} == {STEPS // INNER_STEPS}
    return saved[0]


def test_held_out_loss_at_equal_tokens(tmp_path: Path) -> None:
    folders = {"ddp": tmp_path / "ddp", "diloco": tmp_path / "diloco"}
    for folder in folders.values():
        folder.mkdir()
    losses = {"ddp": held_out_loss(ddp(folders["ddp"])), "diloco": held_out_loss(diloco(folders["diloco"]))}
    tokens = {name: trained_tokens(folder / "log") for name, folder in folders.items()}
    assert tokens["ddp"] == tokens["diloco"] == len(NAMES) * STEPS * ROWS * SEQ_LEN
    assert losses["diloco"] < 1.02 * losses["ddp"], losses
    assert losses["ddp"] < np.log(MERGES) - 2, losses
