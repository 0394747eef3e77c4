"""Async SPARTA: a slice of the parameters is averaged in the background while local steps go on.

A round is a transaction. *Prepare*: the slice's values are copied. *Collective*: the replicas agree on one average of
them, in a thread; nobody waits. *Commit*, between two steps: the slice becomes the average with the node's own progress
since (``averaging``). A result that fails, is late, damaged or no longer wanted leaves every bit as it was.

Only parameters are averaged. AdamW's moments stay each replica's own, and go to joiners alone (:meth:`shared_state`).

Weights: a replica counts by the batches its slice has taken in since that slice's last round; a joiner counts for
nothing in its first ``ghost_rounds``. Values are absolute, so a member that counts for nothing still sends its slice:
were all members newcomers, zeros would be averaged.

What the rules of the collective can and cannot do here: means, medians, trimming, Krum and centred clip work on
parameters as on any vectors, and so does validation among three or more members, which compares them with each other.
Of two it needs a reference that both share, which replicas that may miss rounds have not; the reference is zeros, and
validation says that there is nothing to compare with. Parameters
are best sent as fp32 or fp16: int8 leaves replicas some 1/250 of a block's largest value apart.

Memory: the slice, its average and their sum, 12 to 16 bytes for every ``num_slices``-th parameter, during a round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.errors import RoundFailedError, RoundLeftError, StateBehindError, TrainerUsageError
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.diloco.flight import BackgroundCall
from trainer.outer.diloco.fragments import synchronised_parameters
from trainer.outer.diloco.progress import FragmentProgress
from trainer.outer.engine.collective import Collective, Contribution, RoundResult
from trainer.outer.engine.strategy import OuterResult, StateValue
from trainer.outer.sparta.averaging import AsyncSliceRound, Round, is_finite, merged
from trainer.outer.sparta.config import SpartaConfig
from trainer.outer.sparta.moments import check_optimizer, gather_moments, install_moments
from trainer.outer.sparta.rounds import NOBODY, OtherRounds
from trainer.outer.sparta.slices import ParameterSlice, check_kept_axes, schedule_digest, slice_of
from trainer.outer.sparta.standing import RoundStanding
from trainer.outer.sparta.state import SavedProgress, SavedSparta, SpartaState

__all__ = ["SpartaTrainer"]

logger = logging.getLogger(__name__)


class SpartaTrainer:
    """Keeps one replica close to the others. For the training thread alone.

    Args:
        model: its trainable parameters are averaged; frozen ones are taken to be equal everywhere.
        config: how often, how much.
        collective: whom with; the caller closes it.
        optimizer: the AdamW that trains them; its memory goes to joiners.
        others: what is known of the others' rounds.
        after_average: called with the model after each average and each adoption (a subspace projects there). It must
            not fail: parameters have changed by then.
        kept_axes: by name of a matrix, the axis along which values are always averaged together (`slices`).
        vocab_rows: rows of embedding and output, told to joiners.

    Raises:
        TrainerUsageError: the model has fewer values than slices or is not laid out contiguously, or the optimizer is
            not one whose memory can be handed on.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SpartaConfig,
        collective: Collective,
        *,
        optimizer: Optimizer,
        others: OtherRounds = NOBODY,
        after_average: Callable[[nn.Module], None] | None = None,
        kept_axes: Mapping[str, int] | None = None,
        vocab_rows: int = 0,
    ) -> None:
        self._model = model
        self._config = config
        self._collective = collective
        self._optimizer = optimizer
        self._others = others
        self._after_average = after_average
        self._kept_axes = dict(kept_axes or {})
        self._vocab_rows = vocab_rows
        self._parameters = synchronised_parameters(model)
        self._layout = FlatLayout.of(self._parameters)
        check_kept_axes(self._layout, self._kept_axes)
        check_optimizer(optimizer, self._parameters)
        self._check_slices()
        self._digest = schedule_digest(self._layout, config.num_slices, config.salt, self._kept_axes)
        self._standing = RoundStanding(config.max_staleness_rounds, config.max_failed_rounds)
        self._progress = [FragmentProgress() for _ in range(config.num_slices)]
        self._steps_since_round = 0
        self._num_inner_steps = 0
        self._begin_again = False
        self._flight: AsyncSliceRound | None = None
        self._call: BackgroundCall[RoundResult] | None = None

    # -- where it stands -----------------------------------------------------------------------------------------------

    @property
    def layout(self) -> FlatLayout:
        """Where the parameters lie in the vectors of :meth:`shared_state`."""
        return self._layout

    @property
    def round_index(self) -> int:
        """The round that is next: rounds committed by the run, as far as this node knows."""
        return self._standing.round_index

    @property
    def outer_step(self) -> int:
        """Cycles in which every parameter had its turn."""
        return self.round_index // self._config.num_slices

    @property
    def inner_step(self) -> int:
        """Steps since the last round was begun."""
        return self._steps_since_round

    @property
    def num_inner_steps(self) -> int:
        """Steps behind the parameters, by which schedules go; a joiner takes up those of the state."""
        return self._num_inner_steps

    @property
    def failed_in_a_row(self) -> int:
        """Rounds tried in vain since the last committed one; one that is refused after it failed counts once."""
        return self._standing.failed_in_a_row

    @property
    def missed_rounds(self) -> int:
        """Rounds the others have made without this node since it was last with them."""
        return self._standing.missed_rounds

    @property
    def behind(self) -> bool:
        """Whether the others' state has to be taken up (:meth:`adopt`): too many rounds missed, or values not finite.

        Until then this node counts for nothing in the average.
        """
        return self._standing.must_adopt

    @property
    def must_rejoin(self) -> bool:
        """Behind, or ``max_failed_rounds`` failed in a row while the others went on."""
        return self._standing.must_rejoin

    @property
    def is_ghost(self) -> bool:
        """Whether this node takes the average and counts for nothing in it."""
        return not self._standing.counts

    def state_digest(self) -> str:
        """SHA-256 of what members of a round must have alike: parameters' layout and slices. Their values differ."""
        return self._digest

    # -- training ------------------------------------------------------------------------------------------------------

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Count an inner step; begin a round, or apply one that is back.

        A round is due ``every_steps`` after the one before was begun, and at once when others wait for this node. One
        round at most is in flight; if it takes longer than that, the next begins when it is over.

        Args:
            num_batches: batches that changed the parameters in this step; 0 for a skipped step.

        Returns:
            The round that ended now, if one did; a failed one says why.

        Raises:
            TrainerError: anything but a failed round that the collective raises; parameters are as before the round.
        """
        self._steps_since_round += 1
        self._num_inner_steps += 1
        for progress in self._progress:
            progress.add(num_batches)
        if self._flight is not None:
            return self._land(self._flight) if self._flight.is_over() else None
        if self._standing.see(self._others.frontier()):
            if self.behind:
                return self._failed(
                    "the others have made more rounds than may be missed; their state has to be taken up"
                )
            self._move()
        if self._call is not None and not self._call.done():
            return None  # A round that was given up still runs, and the collective is for one at a time.
        due = self._steps_since_round >= self._config.every_steps or self._begin_again
        if self._standing.damaged or not (due or self._collective.requested()):
            return None
        return self._begin()

    def drain(self) -> OuterResult | None:
        """Wait for the round in flight, if there is one, and apply it now."""
        return None if self._flight is None else self._land(self._flight)

    # -- joining and resuming ------------------------------------------------------------------------------------------

    def shared_state(self) -> SpartaState:
        """What a joiner adopts: a copy, to be read from any thread, of 12 bytes a parameter."""
        moments = gather_moments(self._layout, self._parameters, self._optimizer)
        return SpartaState(
            round_index=self.round_index,
            num_inner_steps=self._num_inner_steps,
            vocab_rows=self._vocab_rows,
            layout_digest=self._layout.digest(),
            parameters=self._layout.gather(self._parameters),
            exp_avg=moments.exp_avg,
            exp_avg_sq=moments.exp_avg_sq,
            steps=moments.steps,
        )

    def adopt(self, shared: SpartaState) -> None:
        """Take another replica's state in place of one's own, parameters and moments; a round in flight is dropped.

        For the next ``ghost_rounds`` committed rounds this node counts for nothing in the average.

        Args:
            shared: the state; its tensors are copied.

        Raises:
            IncompatiblePeerError: it is not of this model, or not sound. Nothing was changed.
        """
        shared.check(self._layout, vocab_rows=self._vocab_rows)
        self._flight = None
        self._layout.scatter(shared.parameters, self._parameters)
        install_moments(shared.moments, self._layout, self._parameters, self._optimizer)
        self._standing.adopted(shared.round_index, self._config.ghost_rounds)
        self._progress = [FragmentProgress() for _ in self._progress]
        self._num_inner_steps = shared.num_inner_steps
        self._steps_since_round, self._begin_again = 0, False
        if self._after_average is not None:
            self._after_average(self._model)
        self._others.move_to(self.round_index)

    def grow(self, model: nn.Module, vocab_rows: int) -> None:
        """Refuse: the slices of all replicas would have to change at one round, which they do not agree on.

        Raises:
            TrainerUsageError: always. Nothing was changed.
        """
        raise TrainerUsageError(
            f"async_sparta keeps its {self._vocab_rows} rows of vocabulary, found {vocab_rows}; begin a new run to grow"
        )

    def state_dict(self) -> dict[str, StateValue]:
        """Everything to go on from here beside parameters and optimizer, also with a round in flight."""
        standing = self._standing
        return SavedSparta(
            schedule_digest=self._digest,
            round_index=standing.round_index,
            reached=standing.reached,
            failed_in_a_row=standing.failed_in_a_row,
            failed_round=standing.failed_round,
            ghost_rounds_left=standing.ghost_rounds_left,
            behind=standing.behind,
            damaged=standing.damaged,
            num_inner_steps=self._num_inner_steps,
            steps_since_round=self._steps_since_round,
            begin_again=self._begin_again or self._flight is not None,
            progress=[SavedProgress(num_batches=it.num_batches, since_s=it.since_s) for it in self._progress],
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Go on from a saved state; parameters and optimizer are the caller's to restore.

        Nobody is talked to: a round that was in flight begins again with the next inner step.

        Raises:
            CheckpointMismatchError: another version, model or schedule. Nothing was changed.
        """
        saved = SavedSparta.from_dict(state, self._digest, self._config.num_slices)
        self._flight = None
        self._standing = RoundStanding(
            self._config.max_staleness_rounds,
            self._config.max_failed_rounds,
            round_index=saved.round_index,
            reached=saved.reached,
            failed_in_a_row=saved.failed_in_a_row,
            failed_round=saved.failed_round,
            ghost_rounds_left=saved.ghost_rounds_left,
            behind=saved.behind,
            damaged=saved.damaged,
        )
        self._num_inner_steps = saved.num_inner_steps
        self._steps_since_round = saved.steps_since_round
        self._begin_again = saved.begin_again
        self._progress = [FragmentProgress(it.num_batches, it.since_s) for it in saved.progress]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_slices(self) -> None:
        for name, parameter in self._parameters.items():
            if not parameter.is_contiguous():
                raise TrainerUsageError(f"async_sparta: expected contiguous parameters, found {name!r} otherwise")
        num_slices = self._config.num_slices
        slices = [slice_of(it, self._layout, num_slices, kept_axes=self._kept_axes) for it in range(num_slices)]
        if not all(values.pieces for values in slices):
            raise TrainerUsageError(
                f"sparta.num_slices: expected at most as many as the model has values to cut between, "
                f"found {num_slices} with {self._layout.num_values} values"
            )

    def _values(self) -> ParameterSlice:
        """What the next round averages."""
        config = self._config
        return slice_of(self.round_index, self._layout, config.num_slices, config.salt, self._kept_axes)

    def _begin(self) -> OuterResult | None:
        """Try a round, or start one in the background."""
        values = self._values()
        self._steps_since_round, self._begin_again = 0, False
        attempt = self._prepared(values)
        if not is_finite(attempt.contribution.vector):
            # Nothing here to heal from: what is not finite came with a step, and is in the moments too.
            self._standing.damaged = True
            return self._failed("parameters are not finite; the others' state has to be taken up")
        if not self._config.background:
            return self._conclude(attempt, lambda: self._collective.reduce(attempt.contribution))
        self._call = BackgroundCall.start(lambda: self._collective.reduce(attempt.contribution), "sparta-round")
        self._flight = AsyncSliceRound(attempt, self._call, time.monotonic() + self._config.round_timeout_s)
        return None

    def _prepared(self, values: ParameterSlice) -> Round:
        vector = values.gather(self._parameters)
        progress = self._progress[values.index]
        contribution = Contribution(
            round_index=self.round_index,
            vector=vector,
            num_batches=progress.num_batches if self._standing.counts else 0,
            age_s=progress.age_s(),
            reference=torch.zeros_like(vector),
            state_digest=self._digest,
        )
        return Round(values, contribution, progress.num_batches)

    def _land(self, flight: AsyncSliceRound) -> OuterResult:
        self._flight = None
        return self._conclude(flight.attempt, flight.result)

    def _conclude(self, attempt: Round, obtain: Callable[[], RoundResult]) -> OuterResult:
        """Apply what ``obtain`` returns, or say why there is nothing to apply."""
        started_s = time.monotonic()
        try:
            result = obtain()
            now = attempt.values.gather(self._parameters)
            new = merged(now, attempt.contribution.vector, result)
        except RoundFailedError as error:
            told = self._failed(str(error), attempt, waited_s=time.monotonic() - started_s, level=_level_of(error))
            if isinstance(error, StateBehindError):
                self._standing.missed(self._others.frontier())
                self._move()
            else:
                self._standing.failed()
            return told
        attempt.values.scatter(new, self._parameters)
        if self._after_average is not None:
            self._after_average(self._model)
        self._progress[attempt.values.index].settle(attempt.num_batches, self._steps_since_round)
        self._standing.committed()
        return OuterResult(
            round_index=attempt.contribution.round_index,
            fragment=attempt.values.index,
            outer_step=self.outer_step,
            committed=True,
            num_batches=attempt.contribution.num_batches,
            waited_s=time.monotonic() - started_s,
            report=result.report,
            contributed_steps_ago=self._steps_since_round if attempt.contribution.num_batches else None,
        )

    def _failed(
        self, error: str, attempt: Round | None = None, *, waited_s: float = 0.0, level: int = logging.WARNING
    ) -> OuterResult:
        logger.log(level, "round %d: no average, parameters stay as they are: %s", self.round_index, error)
        return OuterResult(
            round_index=self.round_index,
            fragment=self._values().index,
            outer_step=self.outer_step,
            committed=False,
            num_batches=attempt.contribution.num_batches if attempt is not None else 0,
            waited_s=waited_s,
            error=error,
        )

    def _move(self) -> None:
        """Go on with a round the others are at: at once, since they may wait for it already."""
        if not self.behind:
            self._begin_again = True
            self._others.move_to(self.round_index)


def _level_of(error: RoundFailedError) -> int:
    """A round that the others had without this node is no failure: nobody waits for anybody's steps, and it goes on
    with theirs. Too many of them in a row, and it is said to have lost touch.
    """
    return logging.INFO if isinstance(error, StateBehindError | RoundLeftError) else logging.WARNING
