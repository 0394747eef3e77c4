"""What of a worker is on the disk: checkpoints of its stage, and whose work is in them."""

from __future__ import annotations

import logging
import time

from trainer.checkpoint.stages import StageCheckpoints, StageState
from trainer.model.subspace import basis_of
from trainer.pipeline.stage import StepInfo
from trainer.pipeline.worker import StageWorker
from trainer.run.config import RunConfig
from trainer.run.swarm.building import BuiltStage, saved_state
from trainer.run.swarm.shape import SwarmShape
from trainer.run.swarm.synchroniser import ReplicaSynchroniser

__all__ = ["WorkerSaving"]

logger = logging.getLogger(__name__)


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
        self._num_changes = 0
        """Changes of the state by something else than a step."""

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
