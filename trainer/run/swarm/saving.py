"""What of a worker is on the disk: checkpoints of its stage, and what they say of whose work is in them.

A checkpoint is of one incarnation of a worker, the first so many of whose micro-batches are in it. Whoever goes on from
it says so until it takes up another state, so that the account does not call perished what has come back.

All but `resume` and what is read of it belongs to the compute thread.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any, Self

from trainer.checkpoint.stages import StageState
from trainer.model.subspace import basis_of
from trainer.network.discovery.stage_report import MAX_REASON
from trainer.pipeline.stage import StepInfo
from trainer.pipeline.worker import StageWorker
from trainer.run.config import RunConfig
from trainer.run.swarm.building import BuiltStage, checkpoints_of, saved_state
from trainer.run.swarm.shape import SwarmShape
from trainer.run.swarm.synchroniser import ReplicaSynchroniser

__all__ = ["WorkerSaving"]

logger = logging.getLogger(__name__)


class WorkerSaving:
    """One worker's; a context manager.

    Args:
        config: of the run.
        shape: what all of the swarm agree on.
        built: the worker's stage.
        keeping: how it stays together with the others of it.
        worker: what is told how much of its work is saved.
        who: names its files; no two workers that run at a time have the same.
    """

    def __init__(
        self,
        config: RunConfig,
        shape: SwarmShape,
        built: BuiltStage,
        keeping: ReplicaSynchroniser[Any],
        worker: StageWorker,
        who: str,
    ) -> None:
        self.resumed: tuple[str, int] = ("", 0)
        """The incarnation whose work it goes on with, and how much of it, until it takes up another state."""
        self._config = config
        self._shape = shape
        self._built = built
        self._keeping = keeping
        self._worker = worker
        self._checkpoints = checkpoints_of(config, shape, built.name, who)
        self._resumed_version = 0
        self._num_tokens = 0
        self._num_changes = 0
        """Of the state by something else than a step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpoints.__exit__(kind, error, trace)

    @property
    def version(self) -> int:
        """Optimizer steps of the newest state that is on the disk."""
        return max(self._resumed_version, self._checkpoints.last_version)

    @property
    def failure(self) -> str:
        """Why the checkpoint that was due last is not there; empty: it is."""
        return self._checkpoints.failure[:MAX_REASON]

    @property
    def unsaved_s(self) -> float:
        """See `StageCheckpoints.unsaved_s`."""
        return self._checkpoints.unsaved_s(time.time())

    def resume(self) -> bool:
        """Goes on from this machine's newest checkpoint of the stage, if there is one; before anything else runs.

        Raises:
            CheckpointError: the folder cannot be written to, or what is there not be used.
        """
        self._checkpoints.open(time.time())  # A folder that cannot be written to is said before it matters.
        state = saved_state(self._config, self._shape, self._built.name)
        if state is not None:
            self._built.replica.load_state_dict(state.for_replica())
            self._keeping.load_state_dict(state.strategy)
            self._num_tokens, self._resumed_version = state.num_tokens, state.version
            self.resumed = (state.incarnation, state.applied)
            logger.info("going on from version %d of %s", state.version, self._built.name)
        self._checkpoints.last_mark = self._mark()  # What it begins with can be had again.
        return state is not None

    def adopted(self) -> None:
        """The state is another's from now on."""
        self.resumed = ("", 0)
        self._num_changes += 1

    def shared(self) -> None:
        """A round has changed the state."""
        self._num_changes += 1

    def stepped(self, info: StepInfo) -> None:
        """A step was taken; saves if it is time."""
        self._num_tokens += info.num_tokens
        if self._worker.service.status != "leaving":  # It saves what it knows in the end.
            self._checkpoints.maybe_save(time.time(), self._state, self._mark())
        self._worker.shared.saved(self._checkpoints.last_version)

    def save_changes(self) -> None:
        """Saves what is new, on the way out.

        Raises:
            CheckpointError: it could not be written.
        """
        self._checkpoints.save_changes(time.time(), self._state, self._mark())
        self._worker.shared.saved(self._checkpoints.last_version)

    def _mark(self) -> tuple[object, ...]:
        """Differs from state to state."""
        return (self._built.replica.version, self._num_changes, *self._keeping.place())

    def _state(self) -> StageState:
        model = self._shape.model
        basis = basis_of(model.dim, model.subspace_rank, model.subspace_seed).digest() if model.subspace_rank else ""
        return StageState.of_replica(
            model,
            self._built.replica.state_dict(),
            strategy=self._keeping.state_dict(),
            num_tokens=self._num_tokens,
            vocabulary=self._shape.tokenizer_lineage,
            basis=basis,
            incarnation=self._worker.replies.incarnation,
            applied=self._worker.shared.in_weights,
        )
