"""Async SPARTA: a slice of the parameters is averaged in the background while local steps go on.

A round is a transaction: the slice's values are copied, the replicas agree on one average of them in a thread, and
between two steps the slice becomes the average with the node's own progress since (`slices.merged`). A joiner counts
for nothing in its first ``ghost_rounds``, but sends its slice: values are absolute, so zeros would be averaged if all
were newcomers. Validation between two members alone needs a reference that both share, which replicas do not have;
int8 leaves replicas some 1/250 of a block's largest value apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.errors import RoundFailedError, RoundLeftError, StateBehindError, TrainerUsageError
from trainer.outer.diloco.flat import FlatLayout, is_finite, synchronised_parameters
from trainer.outer.engine.collective import Collective, Contribution, RoundResult
from trainer.outer.engine.daemon_call import start_daemon
from trainer.outer.engine.strategy import OuterResult, PendingWork, StateValue
from trainer.outer.sparta.config import SpartaConfig
from trainer.outer.sparta.rounds import NOBODY, OtherRounds, RoundStanding
from trainer.outer.sparta.slices import ParameterSlice, check_slices, merged, schedule_digest, slice_of
from trainer.outer.sparta.state import (
    SavedPendingWork,
    SavedSparta,
    SpartaState,
    check_optimizer,
    gather_moments,
    install_moments,
)

logger = logging.getLogger(__name__)

_ROUND_TIMEOUT_S = 3600.0  # A round that is not back by then is given up (engines have deadlines of their own).


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """A round under way, in a thread unless training waits for it."""

    values: ParameterSlice
    contribution: Contribution  # The slice's values when it began.
    num_batches: int  # Batches in them since the slice's last round, also of a node that counts for nothing.
    deadline_s: float  # Of the monotonic clock; then it is given up.
    call: Future[RoundResult] | None = None

    def is_over(self) -> bool:
        return self.call is None or self.call.done() or time.monotonic() >= self.deadline_s


class SpartaTrainer:
    """Keeps one replica close to the others. For the training thread alone.

    Args:
        model: its trainable parameters are averaged; frozen ones are assumed to be equal everywhere.
        config: options.
        collective: the caller closes it.
        optimizer: the AdamW of the model; its moments, and ``vocab_rows``, go to joiners.
        others: what is known of the others' rounds.
        after_average: called with the model after each average and each adoption (a subspace projects there). It must
            not fail: parameters have changed by then.
        kept_axes: by name of a matrix, the axis along which values are always averaged together (`slices`).

    Raises:
        TrainerUsageError: the model has fewer values than slices or is not laid out contiguously, or the optimizer's
            moments cannot be handed on.
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
        self.layout = FlatLayout.of(self._parameters)  # Layout of the vectors of :meth:`shared_state`.
        check_optimizer(optimizer, self._parameters)
        check_slices(self._parameters, self.layout, config.num_slices, self._kept_axes)
        self._digest = schedule_digest(self.layout, config.num_slices, self._kept_axes)
        self.standing = RoundStanding(config.max_staleness_rounds, config.max_failed_rounds)
        self._pending = [PendingWork() for _ in range(config.num_slices)]
        self.inner_step = 0  # Steps since the last round was begun.
        self.num_inner_steps = 0  # Steps behind the parameters, for schedules; a joiner takes up those of the state.
        self._begin_again = False
        self._background: _Round | None = None
        self._last_call: Future[RoundResult] | None = None

    def configure(self, config: SpartaConfig) -> None:
        """Goes on by another number of steps between rounds; all members have to, from one round on."""
        self._config = replace(self._config, every_steps=config.every_steps)

    @property
    def round_index(self) -> int:
        """The next round: rounds committed by the run, as far as this node knows."""
        return self.standing.round_index

    @property
    def outer_step(self) -> int:
        """Cycles in which every parameter was averaged."""
        return self.round_index // self._config.num_slices

    @property
    def behind(self) -> bool:
        """Whether the others' state has to be taken up; until then this node counts for nothing in the average."""
        return self.standing.must_adopt

    @property
    def must_rejoin(self) -> bool:
        """Behind, or ``max_failed_rounds`` failed in a row while the others went on."""
        return self.standing.must_rejoin

    def state_digest(self) -> str:
        """Returns the SHA-256 of what members of a round have alike: the parameters' layout and slices."""
        return self._digest

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Counts an inner step; begins a round, or applies one that is back, and returns the one that ended.

        A round is due ``every_steps`` after the one before was begun, and at once if others wait for this node. At most
        one round is under way; if it takes longer than that, the next begins when it is over.

        Raises:
            TrainerError: the collective raised anything but a failed round; parameters are as before the round.
        """
        self.inner_step += 1
        self.num_inner_steps += 1
        for work in self._pending:
            work.add(num_batches)
        if self._background is not None:
            return self.drain() if self._background.is_over() else None
        if self.standing.see(self._others.frontier()):
            if self.behind:
                return self._failed(
                    "the others have made more rounds than may be missed; their state has to be taken up"
                )
            self._move()
        if self._last_call is not None and not self._last_call.done():
            return None  # A round that was given up still runs, and the collective allows one at a time.
        due = self.inner_step >= self._config.every_steps or self._begin_again
        if self.standing.damaged or not (due or self._collective.requested()):
            return None
        return self._begin()

    def drain(self) -> OuterResult | None:
        """Waits for the round under way, if there is one, and applies it now."""
        background, self._background = self._background, None
        return None if background is None else self._conclude(background)

    def shared_state(self) -> SpartaState:
        """Returns what a joiner adopts: a copy of 12 bytes a parameter, for any thread."""
        return SpartaState(
            round_index=self.round_index,
            num_inner_steps=self.num_inner_steps,
            vocab_rows=self._vocab_rows,
            layout_digest=self.layout.digest(),
            parameters=self.layout.gather(self._parameters),
            **gather_moments(self.layout, self._parameters, self._optimizer),
        )

    def adopt(self, shared: SpartaState) -> None:
        """Replaces parameters and moments by a copy of another replica's; drops a round under way.

        Raises:
            IncompatiblePeerError: it does not belong to this model, or is not sound. Nothing was changed.
        """
        shared.check(self.layout, vocab_rows=self._vocab_rows)
        self._background = None
        self.layout.scatter(shared.parameters, self._parameters)
        install_moments(shared, self.layout, self._parameters, self._optimizer)
        self.standing.adopted(shared.round_index, self._config.ghost_rounds)
        self._pending = [PendingWork() for _ in self._pending]
        self.num_inner_steps = shared.num_inner_steps
        self.inner_step, self._begin_again = 0, False
        if self._after_average is not None:
            self._after_average(self._model)
        self._others.move_to(self.round_index)

    def grow(self, model: nn.Module, vocab_rows: int) -> None:
        """Refuses: the slices of all replicas would have to change at one round, on which they do not agree."""
        raise TrainerUsageError(
            f"async_sparta keeps its {self._vocab_rows} rows of vocabulary, found {vocab_rows}; begin a new run to grow"
        )

    def state_dict(self) -> dict[str, StateValue]:
        """Returns everything to go on from here beside parameters and optimizer, also with a round under way."""
        return SavedSparta(
            schedule_digest=self._digest,
            **self.standing.counters(),
            num_inner_steps=self.num_inner_steps,
            steps_since_round=self.inner_step,
            begin_again=self._begin_again or self._background is not None,
            progress=[SavedPendingWork(num_batches=it.num_batches, since_s=it.since_s) for it in self._pending],
        ).model_dump()

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Goes on from a saved state, without contacting anybody; the caller restores parameters and optimizer.

        Raises:
            CheckpointMismatchError: another version, model or schedule. Nothing was changed.
        """
        saved = SavedSparta.from_dict(state, self._digest, self._config.num_slices)
        self._background = None
        self.standing = replace(self.standing, **{name: getattr(saved, name) for name in self.standing.counters()})
        self.num_inner_steps = saved.num_inner_steps
        self.inner_step = saved.steps_since_round
        self._begin_again = saved.begin_again
        self._pending = [PendingWork(it.num_batches, it.since_s) for it in saved.progress]

    def _next_slice(self) -> ParameterSlice:
        return slice_of(self.round_index, self.layout, self._config.num_slices, self._kept_axes)

    def _begin(self) -> OuterResult | None:
        """Tries a round, or starts one in the background."""
        self.inner_step, self._begin_again = 0, False
        values = self._next_slice()
        vector = values.gather(self._parameters)
        if not is_finite(vector):
            # There is no anchor to restart from: what is not finite came with a step, and is in the moments too.
            self.standing.damaged = True
            return self._failed("parameters are not finite; the others' state has to be taken up")
        work = self._pending[values.index]
        contribution = Contribution(
            round_index=self.round_index,
            vector=vector,
            num_batches=work.num_batches if self.standing.counts else 0,
            age_s=work.age_s(),
            reference=torch.zeros_like(vector),
            state_digest=self._digest,
        )
        deadline_s = time.monotonic() + _ROUND_TIMEOUT_S
        begun = _Round(values, contribution, work.num_batches, deadline_s)
        if not self._config.background:
            return self._conclude(begun)
        self._last_call = start_daemon(lambda: self._collective.reduce(contribution), "sparta-round")
        self._background = replace(begun, call=self._last_call)
        return None

    def _obtain(self, begun: _Round) -> RoundResult:
        if begun.call is None:
            return self._collective.reduce(begun.contribution)
        try:
            return begun.call.result(max(0.0, begun.deadline_s - time.monotonic()))
        except TimeoutError as error:
            raise RoundFailedError("the round in the background is not back in time, and given up") from error

    def _conclude(self, begun: _Round) -> OuterResult:
        """Applies the result of a round, or reports why there is nothing to apply."""
        started_s = time.monotonic()
        num_batches = begun.contribution.num_batches
        try:
            result = self._obtain(begun)
            new = merged(begun.values.gather(self._parameters), begun.contribution.vector, result)
        except RoundFailedError as error:
            failed = self._failed(error, num_batches, waited_s=time.monotonic() - started_s)
            if isinstance(error, StateBehindError):
                self.standing.missed(self._others.frontier())
                self._move()
            else:
                self.standing.failed()
            return failed
        begun.values.scatter(new, self._parameters)
        if self._after_average is not None:
            self._after_average(self._model)
        self._pending[begun.values.index].settle(begun.num_batches, self.inner_step)
        self.standing.committed()
        return OuterResult(
            round_index=begun.contribution.round_index,
            fragment=begun.values.index,
            outer_step=self.outer_step,
            committed=True,
            num_batches=num_batches,
            waited_s=time.monotonic() - started_s,
            report=result.report,
            contributed_steps_ago=self.inner_step if num_batches else None,
        )

    def _failed(self, error: RoundFailedError | str, num_batches: int = 0, *, waited_s: float = 0.0) -> OuterResult:
        # A round that the others made without this node is no failure: the node goes on with their next one.
        level = logging.INFO if isinstance(error, StateBehindError | RoundLeftError) else logging.WARNING
        logger.log(level, "round %d: no average, parameters stay as they are: %s", self.round_index, error)
        return OuterResult(
            round_index=self.round_index,
            fragment=self._next_slice().index,
            outer_step=self.outer_step,
            committed=False,
            num_batches=num_batches,
            waited_s=waited_s,
            error=str(error),
        )

    def _move(self) -> None:
        """Goes on with the round the others are at: at once, since they may wait for it already."""
        if not self.behind:
            self._begin_again = True
            self._others.move_to(self.round_index)
