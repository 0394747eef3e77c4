"""What one round computes and checks, from the state it begins with to the state it ends with.

Nothing here reads or sets a parameter, or anything else that changes while the round is under way. So with overlap all
of it runs in the round's thread, beside training: the pseudo-gradient and its check, the outer step on copies, the new
state's digest. All checks come before there is a new state; the training thread takes that up by one assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.errors import RoundFailedError
from trainer.outer.diloco.config import DiLoCoConfig
from trainer.outer.diloco.flat import is_finite
from trainer.outer.diloco.outer import OuterOptimizer
from trainer.outer.diloco.state import FragmentState, ReplicaState, SavedRound
from trainer.outer.engine.collective import Collective, Contribution, RoundReport, RoundResult
from trainer.outer.engine.daemon_call import start_daemon
from trainer.outer.engine.strategy import PendingWork, StateValue


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A contribution, but for the digest of the state it begins with, which may still be being computed."""

    contribution: Contribution
    is_finite: bool = True  # If not, it counts for nothing, and the parameters have to restart from the anchor.


@dataclass(frozen=True, slots=True)
class AgreedChanges:
    """How a run changes while it goes on, by the number of a change that a round's members have agreed to go by."""

    config_by: Callable[[int], DiLoCoConfig]
    """Returns the options after so many changes; called in any thread."""
    begin_by: Callable[[int], None]
    """Called in the training thread before it takes up the round's outcome: it has to `configure` by this number."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a round that succeeded leads to."""

    state: ReplicaState
    digest: Future[str]
    anchor: Tensor  # Of the fragment, [P] fp32.
    report: RoundReport
    progress: float
    config: DiLoCoConfig  # By which the outer step was done.
    change: int | None  # Number of the newest change of the run in it; None: the round has no agreement.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoundWork:
    """One round of one node, begun with ``num_batches`` of ``num_steps`` steps; for any thread."""

    state: ReplicaState
    state_digest: Future[str]
    layout_digest: str
    config: DiLoCoConfig
    num_batches: int
    num_steps: int
    age_s: float
    lag: int = 0

    @property
    def anchor(self) -> Tensor:
        """From which the pseudo-gradient is measured."""
        return self.state.fragments[self.state.fragment].anchor

    def measured(self, difference: Tensor) -> Measured:
        """Returns the contribution for a pseudo-gradient, [P] fp32, which it keeps.

        Parameters that are not finite would never recover: nothing is contributed then.
        """
        finite = is_finite(difference)
        work = self if finite else replace(self, num_batches=0, num_steps=0, age_s=0.0)
        progress = min(1.0, work.num_steps / self.config.planned_steps(self.state.round_index))
        vector = difference if finite else difference.zero_()
        return Measured(work._contribution(vector, progress), finite)

    def resumed(self, saved: SavedRound) -> Measured:
        """Returns the contribution of a round that was under way when the state was saved.

        One that counted for nothing may have been saved before the parameters restarted from the anchor.
        """
        unchecked = saved.steps_left >= self.config.overlap_steps
        finite = not (unchecked and not saved.num_batches and not bool(saved.vector.any()))
        work = replace(self, num_batches=saved.num_batches, num_steps=saved.num_steps, age_s=saved.age_s, lag=saved.lag)
        return Measured(work._contribution(saved.vector, saved.progress), finite)

    def carried_out(self, measured: Measured, collective: Collective, changes: AgreedChanges | None = None) -> Outcome:
        """Goes through the round, and does the outer step on copies, by what the members have agreed to go by.

        Raises:
            RoundFailedError: there is no result, or none that can be applied.
            TrainerError: the collective raised anything else.
        """
        digest = self.state_digest.result(self.config.round_timeout_s)
        contribution = replace(measured.contribution, state_digest=digest)
        result = collective.reduce(contribution)
        config = self.config if changes is None or result.change is None else changes.config_by(result.change)
        return self._stepped(contribution, result, config)

    def _contribution(self, vector: Tensor, progress: float) -> Contribution:
        current = self.state.fragments[self.state.fragment]
        return Contribution(
            round_index=self.state.round_index,
            vector=vector,
            num_batches=self.num_batches,
            age_s=self.age_s,
            progress=progress,
            num_steps=self.num_steps,
            lag=self.lag,
            reference=current.reference,
            state_digest="",
            residual=current.residual,
            basis=current.basis,
        )

    def _stepped(self, contribution: Contribution, result: RoundResult, config: DiLoCoConfig) -> Outcome:
        """Applies an agreed pseudo-gradient to copies of anchor and momentum."""
        current = self.state.fragments[self.state.fragment]
        if result.vector.shape != current.anchor.shape or not is_finite(result.vector):
            raise RoundFailedError(
                f"expected {current.anchor.numel()} finite values as the round's result, "
                f"found {list(result.vector.shape)}, not all finite or not as many"
            )
        progress = contribution.progress if result.progress is None else result.progress
        optimizer = OuterOptimizer(config.outer_lr, config.outer_momentum)
        anchor, momentum = optimizer.stepped(current.anchor, current.momentum, result.vector, progress)
        if not is_finite(anchor):
            raise RoundFailedError(
                "the round's result is so large that the outer step overflows; check diloco.outer_lr"
            )
        num_inner_steps = round(progress * config.steps_before(self.state.fragment))
        new = FragmentState(anchor, momentum, result.vector, result.residual, result.basis)
        state = self.state.committed(new, num_inner_steps)
        digest = digest_of(state, self.layout_digest)
        return Outcome(state, digest, anchor, result.report, progress, config, result.change)


def work_of(
    state: ReplicaState, digest: Future[str], layout_digest: str, config: DiLoCoConfig, pending: PendingWork
) -> RoundWork:
    """Returns the work of the next round, with what there is to contribute now."""
    return RoundWork(
        state=state,
        state_digest=digest,
        layout_digest=layout_digest,
        config=config,
        num_batches=pending.num_batches,
        num_steps=pending.num_steps,
        age_s=pending.age_s(),
        lag=pending.lag,
    )


def digest_of(state: ReplicaState, layout_digest: str) -> Future[str]:
    """Returns the state's digest, which takes a second for 150 million parameters, from a thread of its own."""
    return start_daemon(lambda: state.digest(layout_digest), "diloco-digest")


@dataclass(slots=True)
class BackgroundRound:
    """A round under way in a thread, which works on the round's own tensors only."""

    work: RoundWork
    measured: Future[Measured]
    outcome: Future[tuple[Outcome, Callable[[float], None]]]  # With what merges it.
    steps_left: int  # Inner steps until its result is merged.
    is_checked: bool = False  # Whether its parameters were found finite, or restarted.

    def saved(self) -> Future[StateValue]:
        """Returns the values of `SavedRound`, to begin this round again, as soon as the contribution is there."""
        steps_left = self.steps_left
        found: Future[StateValue] = Future()

        def take(measured: Future[Measured]) -> None:
            error = measured.exception()
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(dict(SavedRound.of(measured.result().contribution, steps_left)))

        self.measured.add_done_callback(take)
        return found


@contextmanager
def arithmetic_threads(count: int) -> Iterator[None]:
    """Lets torch compute with so many threads here for as long as the ``with`` lasts; 0: with as many as before.

    What is computed here is elementwise or the extremes of values: the same bits with any number of threads.
    """
    before = torch.get_num_threads()
    if count in (0, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
