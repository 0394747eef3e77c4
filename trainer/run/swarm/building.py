"""A stage of a run: built from its configuration or begun from what is on the disk, and saved there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.stages import StageCheckpoints, StageState, newest_set, time_us
from trainer.checkpoint.stages.naming import named_files, run_folder
from trainer.compression.activations import ActivationCodec, activation_codec
from trainer.errors import CheckpointError
from trainer.inner import choose_device, make_optimizer
from trainer.model import Stage, build_stage, limit_ids
from trainer.model.init import EMBEDDING
from trainer.model.subspace import SubspaceConstraint, basis_of, fixed_table_of
from trainer.pipeline.stage import StageReplica, StepInfo
from trainer.pipeline.worker import StageWorker
from trainer.run.config import RunConfig
from trainer.run.swarm.shape import SwarmShape

if TYPE_CHECKING:
    from trainer.run.swarm.synchroniser import ReplicaSynchroniser

logger = logging.getLogger(__name__)


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


class WorkerSaving:
    """Checkpoints of one worker; for its compute thread, except `resume` and what is read.

    ``who`` names its files; no two workers that run at a time have the same.
    """

    def __init__(
        self,
        config: RunConfig,
        shape: SwarmShape,
        built: BuiltStage,
        synchroniser: ReplicaSynchroniser,
        worker: StageWorker,
        who: str,
    ) -> None:
        self.checkpoints = StageCheckpoints(config.swarm.checkpoint, config.run_id, shape.plan, built.name, who)
        """A context manager, to be entered before `resume`."""
        self.resumed: tuple[str, int] = ("", 0)
        """The incarnation whose work it goes on with, and how much of it, until another state is taken up. It is
        announced, so that the account does not call perished what has come back."""
        self._config = config
        self._shape = shape
        self._built = built
        self._synchroniser = synchroniser
        self._worker = worker
        self._resumed_version = 0
        self._num_tokens = 0
        self._num_changes = 0  # Changes of the state by something else than a step.

    @property
    def version(self) -> int:
        """Optimizer steps of the newest state that is on the disk."""
        return max(self._resumed_version, self.checkpoints.last_version)

    def resume(self) -> bool:
        """Goes on from this machine's newest checkpoint of the stage, if there is one; before anything else runs."""
        self.checkpoints.open(time.time())  # Reports a folder that cannot be written to before it matters.
        state = saved_state(self._config, self._shape, self._built.name)
        if state is not None:
            self._built.replica.load_state_dict(state.for_replica())
            self._synchroniser.load_state_dict(state.strategy)
            self._num_tokens, self._resumed_version = state.num_tokens, state.version
            self.resumed = (state.incarnation, state.applied)
            logger.info("going on from version %d of %s", state.version, self._built.name)
        self.checkpoints.last_mark = self._mark()  # The state it begins with can be had again.
        return state is not None

    def changed(self, *, adopted: bool = False) -> None:
        """Notes that a round has changed the state, or that another worker's was adopted."""
        self.resumed = ("", 0) if adopted else self.resumed
        self._num_changes += 1

    def stepped(self, info: StepInfo) -> None:
        """Notes a step, and saves if it is time."""
        self._num_tokens += info.num_tokens
        if self._worker.service.status != "leaving":  # A worker that leaves saves at the end.
            self.checkpoints.maybe_save(time.time(), self._state, self._mark())
        self._worker.shared.saved(self.checkpoints.last_version)

    def save_changes(self) -> None:
        """Saves what is not on the disk yet; raises `CheckpointError` if it could not be written."""
        self.checkpoints.save_changes(time.time(), self._state, self._mark())
        self._worker.shared.saved(self.checkpoints.last_version)

    def _mark(self) -> tuple[object, ...]:
        """Differs from state to state."""
        return (self._built.replica.version, self._num_changes, *self._synchroniser.place())

    def _state(self) -> StageState:
        model = self._shape.model
        basis = basis_of(model.dim, model.subspace_rank, model.subspace_seed).digest() if model.subspace_rank else ""
        return StageState.of_replica(
            model,
            self._built.replica.state_dict(),
            strategy=self._synchroniser.trainer.state_dict(),
            num_tokens=self._num_tokens,
            vocabulary=self._shape.tokenizer_lineage,
            basis=basis,
            incarnation=self._worker.replies.incarnation,
            applied=self._worker.shared.in_weights,
        )
