"""Checkpoints of nodes, and of stages by the real writer; processes that save them and die as told (forkserver)."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.model_configs import small_config
from trainer.checkpoint.node import Checkpointer, load_newest
from trainer.checkpoint.stages import StageCheckpoints, StageState, StagewiseConfig, newest_set, time_us
from trainer.model import Transformer
from trainer.model.plan import StagePlan
from trainer.model.stages import stage_shapes

WALLET = "ab12"
NUM_VALUES = 100_000


@dataclass(frozen=True)
class Death:
    """How a process ends within a save; by default not at all."""

    at_event: int = 0
    """By SIGKILL at so many-th time that it asks the system to open, link, rename or remove one of the files."""
    at_bytes: int = 0
    """By the kernel (SIGXFSZ) when a file would grow beyond this."""


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def contents(step: int) -> dict[str, Any]:
    values = torch.arange(NUM_VALUES, dtype=torch.float32) + step
    return {"training_rounds": step, "layers": {"0": {"w": values}}, "loader": {"position": step}}


def check(found: dict[str, Any]) -> int:
    step: int = found["training_rounds"]
    assert found["loader"] == {"position": step}
    assert torch.equal(found["layers"]["0"]["w"], contents(step)["layers"]["0"]["w"])
    return step


def rewritten(path: Path, document: object) -> None:
    """Replaces a file, of which another name keeps the contents, by bytes or by what torch makes of a document."""
    path.unlink()
    if isinstance(document, bytes):
        path.write_bytes(document)
    else:
        torch.save(document, path)


def newest_step(folder: Path, instance: str = "") -> int | None:
    found = load_newest(folder, WALLET, instance)
    return None if found is None else check(found)


def save(directory: str, step: int, death: Death) -> None:
    torch.set_num_threads(1)
    with Checkpointer(directory, WALLET, keep=2) as checkpointer:
        arrange_death(directory, death)
        checkpointer.save(contents(step), wait=True)


def arrange_death(directory: str, death: Death) -> None:
    """Makes this process end as said, in what it does to files below a folder from now on."""
    if death.at_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (death.at_bytes, death.at_bytes))
    if death.at_event:
        counter = count(1)

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            concerned = event in {"open", "os.link", "os.rename", "os.remove"}
            if concerned and any(isinstance(each, str | Path) and directory in str(each) for each in arguments):  # noqa: SIM102
                if next(counter) == death.at_event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)


INTERVAL_S = 600.0
ACTOR_RUN = "killed"


def stage_parameters(state: Mapping[str, Tensor], plan: StagePlan, stage: str) -> dict[str, Tensor]:
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


def actor_value(directory: Path) -> int:
    found = newest_set(directory, ACTOR_RUN, time_us(1e9), stages=("head",)).files["head"].read()
    values = {float(value) for tensor in found.state.parameters.values() for value in tensor.unique()}
    assert values == {float(found.header.version)}
    return found.header.version
