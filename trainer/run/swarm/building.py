"""A stage of a run, built from its configuration: module, optimizer, arithmetic, and the codec of its links."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.stages import StageState, newest_set, time_us
from trainer.checkpoint.stages.naming import named_files, run_folder
from trainer.compression.activations import ActivationCodec, activation_codec
from trainer.errors import CheckpointError
from trainer.inner import choose_device, make_optimizer
from trainer.model import Stage, build_stage, limit_ids
from trainer.model.subspace import SubspaceConstraint, basis_of, fixed_table_of
from trainer.model.subspace.constraint import EMBEDDING
from trainer.pipeline.stage import StageReplica
from trainer.run.config import RunConfig
from trainer.run.swarm.shape import SwarmShape

__all__ = ["BuiltStage", "build_stage_site", "codec_of", "saved_state"]


@dataclass(frozen=True, slots=True)
class BuiltStage:
    """A stage with everything that trains it."""

    name: str
    module: Stage
    optimizer: Optimizer
    replica: StageReplica
    codec: ActivationCodec
    after_average: Callable[[nn.Module], None] | None
    """Projects weights that an average has rounded back into the subspace."""
    kept_axes: Mapping[str, int]
    """By name, the axis along which a matrix of a subspace may only be averaged whole: rows of tables, else columns."""
    began_from: str = ""
    """Fingerprint of the model that its first weights are from; empty: of none, or it has checkpoints."""


def codec_of(config: RunConfig, shape: SwarmShape, device: torch.device | str = "cpu") -> ActivationCodec:
    """The codec of a run's links; raises `TrainerUsageError` if there is no such codec, or it needs a subspace."""
    model, name = shape.model, config.swarm.activation_codec
    if not name.startswith("subspace"):
        return activation_codec(name, device=device)
    basis = basis_of(model.dim, model.subspace_rank, model.subspace_seed)
    return activation_codec(name, basis, fixed_table_of(model), device=device)


def build_stage_site(config: RunConfig, shape: SwarmShape, stage: str) -> BuiltStage:
    """Builds a stage with its first weights, or those of the model that the run starts from.

    That model is not read if there are checkpoints of the stage already; see `saved_state`.

    Raises:
        TrainerError: options that make no sense, or a model that does not fit.
    """
    device = choose_device(config.device)
    plan, index = shape.plan, shape.plan.index(stage)
    checkpointing = config.inner.activation_checkpointing
    module = build_stage(
        plan.config, plan.ranges, index, config.seed, device=device, activation_checkpointing=checkpointing
    )
    began_from = ""
    if config.swarm.start_from and not _has_checkpoints(config, stage):
        # Here, since torch.distributed.checkpoint imports sympy: a third of a worker's start.
        from trainer.checkpoint.stages import fingerprint, load_initial_state

        began_from = fingerprint(config.swarm.start_from)
        module.load_state_dict(load_initial_state(config.swarm.start_from, plan, stage, seed=config.seed))
    limit_ids(module, shape.num_ids)
    optimizer = make_optimizer(module, config.inner)
    after_average: Callable[[nn.Module], None] | None = None
    kept_axes: dict[str, int] = {}
    if shape.model.subspace_rank:
        constraint = SubspaceConstraint(module, shape.model)
        constraint.ensure()
        constraint.attach(optimizer)
        kept_axes = {name: 1 if name == EMBEDDING else 0 for name in constraint.names}

        def ensure(_: nn.Module) -> None:
            constraint.ensure()

        after_average = ensure
    replica = StageReplica(
        module,
        optimizer,
        config.inner,
        config.swarm.stage,
        kind="head" if index == 0 else "tail" if index == plan.num_stages - 1 else "body",
        num_stages=plan.num_stages,
        after_update=after_average,
    )
    codec = codec_of(config, shape, device)
    return BuiltStage(stage, module, optimizer, replica, codec, after_average, kept_axes, began_from)


def saved_state(config: RunConfig, shape: SwarmShape, stage: str) -> StageState | None:
    """The newest state of a stage on this disk, None without checkpoints; `CheckpointError` if none can be used."""
    directory = config.swarm.checkpoint.directory
    if not _has_checkpoints(config, stage):
        return None
    found = newest_set(directory, config.run_id, time_us(time.time()), plan=shape.plan, stages=(stage,))
    if found.shape.vocabulary != shape.tokenizer_lineage:
        raise CheckpointError(
            f"{run_folder(directory, config.run_id)}: expected checkpoints of the store's vocabulary "
            f"{shape.tokenizer_lineage[:12]}, found some of {found.shape.vocabulary[:12]}; name the store they were "
            "trained from, or another run_id"
        )
    return found.files[stage].read().state


def _has_checkpoints(config: RunConfig, stage: str) -> bool:
    return any(found.stage == stage for found in named_files(config.swarm.checkpoint.directory, config.run_id))
