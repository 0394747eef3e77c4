"""`GradStepper`: how the workers of a stage step together where they average gradients.

Progress is exchanged as for any stage (`stepping`). But no worker steps by itself: when the stage's target is reached,
all hand their sums over to one round, and its result moves all of them alike (`trainer.outer.grad`). A worker that
joins follows the rounds with nothing of its own, until it serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.outer.diloco import FlatLayout
from trainer.outer.grad import GradientSum, GradOutcome, GradStep, GradTrainer, Progress
from trainer.pipeline.protocol.messages import ProgressReport
from trainer.pipeline.stage import StepInfo
from trainer.pipeline.worker.replies import Mark
from trainer.pipeline.worker.stepping import StageStepper

_LAST_ROUND_S = 4.0  # Of a worker that leaves: what it has counted is saved then, in a round or not.


@dataclass(eq=False, repr=False, kw_only=True)
class GradStepper(StageStepper):
    """Steps one worker's replica by rounds of gradients; the source of them, for ``gradients``, is this object."""

    gradients: GradTrainer

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mark: Mark | None = None
        self._handed_tokens = 0  # In a round under way: the others count them until it is over.
        self.gradients.source = self
        self.gradients.progress = self._progress
        self.gradients.on_done = self._tell_news

    def between(self) -> None:
        """Begins, fills and ends rounds; for the compute thread, between two jobs."""
        self._look()
        if self.joining and not self.follows:
            self.gradients.leave()
            return
        while (outcome := self.gradients.look()) is not None:
            self._ended(outcome)
            if not outcome.result.committed:
                return

    def flush(self) -> None:
        """Has a last round with what is accumulated, if anything, before leaving. For the compute thread."""
        ends_s = self.clock() + _LAST_ROUND_S
        while (left_s := ends_s - self.clock()) > 0:
            outcome = self.gradients.drain(left_s)
            if outcome is None and self.replica.accumulated.num_tokens:
                outcome = self.gradients.take_part(left_s)
            if outcome is None:
                return
            self._ended(outcome)
            if not outcome.result.committed:
                return

    def take_gradient(self, layout: FlatLayout) -> GradientSum:
        """See `trainer.outer.grad.GradientSource`; what is counted from now on is for the next step."""
        self._mark = self.replies.mark()
        self._handed_tokens = self.replica.accumulated.num_tokens
        return self.replica.take_gradient(layout)

    def give_back(self, layout: FlatLayout, gradient: GradientSum) -> None:
        """See `trainer.outer.grad.GradientSource`."""
        self._mark, self._handed_tokens = None, 0
        self.replica.give_back(layout, gradient)

    def _progress(self) -> Progress:
        own_tokens = self.replica.accumulated.num_tokens
        return Progress(own_tokens, self._tracker.stage_tokens(self.replica.version, own_tokens))

    def _report(self) -> ProgressReport:
        report = super()._report()
        return report.model_copy(update={"num_tokens": report.num_tokens + self._handed_tokens})

    def _ended(self, outcome: GradOutcome) -> None:
        """Takes note of a round that ended, with or without a result."""
        step = outcome.step
        if step is not None:
            self._handed_tokens = 0
            self.replica.set_version(step.version)
            self._stepped_s = self.clock()
            mark, self._mark = self._mark, None
            if mark is None or step.own is None:  # Nothing of this worker is in it.
                mark = Mark(self.replies.incarnation, self.replies.shared.in_weights, frozenset())
            self.replies.stepped(step.version, mark)
        self.note(outcome.result)
        self._look()
        if step is not None and self.on_step is not None:
            self.on_step(self._info(step, outcome.result.waited_s))
        self._wake()

    def _info(self, step: GradStep, seconds: float) -> StepInfo:
        own = step.own
        has_loss = self.replica.kind == "tail" and own is not None and own.num_tokens > 0
        return StepInfo(
            version=step.version,
            lr=step.lr,
            grad_norm=step.grad_norm,
            clip_coefficient=step.clip_coefficient,
            num_tokens=0 if own is None else own.num_tokens,
            num_micro_batches=0 if own is None else own.num_micro_batches,
            loss=own.loss_sum / own.num_tokens if own is not None and has_loss else None,
            applied=step.applied,
            seconds=seconds,
        )
