"""Stages of a model as checkpoints of a moment, written by the real writer; a process that writes one and dies."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoint_actor import Death, arrange_death
from tests.support.model_configs import small_config
from trainer.checkpoint.stages import StageCheckpoints, StageState, StagewiseConfig, newest_set, time_us
from trainer.model import Transformer
from trainer.model.plan import StagePlan
from trainer.model.stages import stage_shapes

INTERVAL_S = 600.0
ACTOR_RUN = "killed"


def stage_parameters(state: Mapping[str, Tensor], plan: StagePlan, stage: str) -> dict[str, Tensor]:
    """A stage's part of a whole model's state."""
    return {name: state[name] for name in stage_shapes(plan, stage)}


def write_stage(
    directory: Path,
    plan: StagePlan,
    stage: str,
    at: float,
    state: StageState,
    *,
    run_id: str = "run",
    who: str = "worker",
    keep: int = 100,
) -> None:
    """One file, whatever the time is."""
    config = StagewiseConfig(directory=str(directory), interval_s=INTERVAL_S, keep=keep)
    with StageCheckpoints(config, run_id, plan, stage, who) as checkpoints:
        checkpoints.save(at, state)


def write_model(
    directory: Path,
    model: Transformer,
    plan: StagePlan,
    times: Mapping[str, float],
    *,
    run_id: str = "run",
    who: str = "worker",
    version: int = 1,
    vocabulary: str = "",
    stages: Iterable[str] = (),
) -> None:
    """The stages of a model, each of its own time."""
    parameters = model.state_dict()
    for stage in tuple(stages) or plan.names:
        state = StageState(
            config=model.config,
            version=version,
            parameters=stage_parameters(parameters, plan, stage),
            vocabulary=vocabulary,
        )
        write_stage(directory, plan, stage, times[stage], state, run_id=run_id, who=who)


def save_as_actor(directory: str, version: int, death: Death) -> None:
    """Saves the head of a run of two stages at ``version`` intervals since 1970, and dies on the way."""
    torch.set_num_threads(1)
    plan = StagePlan.of(small_config(vocab_size=4096), 2)
    parameters = {name: torch.full(shape, float(version)) for name, shape in stage_shapes(plan, "head").items()}
    config = StagewiseConfig(directory=directory, interval_s=INTERVAL_S, keep=2)
    with StageCheckpoints(config, ACTOR_RUN, plan, "head", "actor") as checkpoints:
        arrange_death(directory, death)
        checkpoints.save(version * INTERVAL_S, StageState(config=plan.config, version=version, parameters=parameters))


def hold_stage(directory: str, ready: Any) -> None:
    """Holds the lock of a writer of the tail of a run of two stages until it is killed."""
    config = StagewiseConfig(directory=directory)
    with StageCheckpoints(config, "run", StagePlan.of(small_config(), 2), "tail", "other") as checkpoints:
        checkpoints.open(0.0)
        ready.set()
        signal.pause()


def actor_value(directory: Path) -> int:
    """Which version of the actor's the newest whole file has."""
    found = newest_set(directory, ACTOR_RUN, time_us(1e9), stages=("head",)).files["head"].read()
    values = {float(value) for tensor in found.state.parameters.values() for value in tensor.unique()}
    assert values == {float(found.header.version)}
    return found.header.version
