"""One micro-batch in flight: what is known of it so far, and so which outcomes are possible.

Whether it may be handed back, is lost, or has to be left to the ledger server follows from two facts that are kept
here: which stages have acknowledged that they counted it, and whether one may have counted it without acknowledging.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.pipeline.driver.asking import Answered, credit_of
from trainer.pipeline.driver.results import HopTime, MicroBatchResult, Outcome, Verdict
from trainer.pipeline.protocol.messages import StageAnswer
from trainer.pipeline.protocol.work import MicroBatch, StageCredit, boottime_s

__all__ = ["MicroBatchEndedError", "MicroBatchInFlight"]

_OF_THE_DATA = frozenset(("malformed", "nonfinite"))
"""Refusals that the next driver would get as well."""


class MicroBatchEndedError(Exception):
    """A micro-batch goes no further.

    Args:
        outcome: what became of it.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.fate}: {outcome.reason} at {outcome.stage}")
        self.outcome = outcome


class MicroBatchInFlight:
    """A micro-batch's.

    Args:
        micro_batch: whose.
        max_attempts: failures in one stage after which it ends.
        on_set_aside: called when it begins to wait for a worker that does not answer.
    """

    def __init__(
        self, micro_batch: MicroBatch, max_attempts: int, on_set_aside: Callable[[], None] = lambda: None
    ) -> None:
        self.micro_batch = micro_batch
        self.num_retries = 0
        self.is_unclear = False
        """Whether a worker was asked to count it that has not answered yet."""
        self.is_set_aside = False
        """Whether it waits for a worker that does not answer; others may go on in its place meanwhile."""
        self._on_set_aside = on_set_aside
        self._max_attempts = max_attempts
        self._attempts: dict[str, float] = {}
        self._num_failed: dict[str, int] = {}
        self._begun_s = time.monotonic()
        self._hops: list[HopTime] = []
        self._credits: dict[str, StageCredit] = {}
        self._loss_sum = 0.0
        self._num_tokens = 0

    def left_s(self) -> float:
        """Seconds in which it may still be sent."""
        return self.micro_batch.send_before_s - boottime_s()

    def set_aside(self, is_set_aside: bool) -> None:
        """It begins to wait for a worker that does not answer, or goes on."""
        self.is_set_aside = is_set_aside
        if is_set_aside:
            self._on_set_aside()

    def passed(self, answered: Answered) -> None:
        """A request of it was answered."""
        self._hops.append(answered.hop)

    def counted(self, stage: str, body: StageAnswer) -> None:
        """A stage has counted it."""
        self.acknowledged(credit_of(stage, body))
        if body.loss_sum is not None:
            self._loss_sum, self._num_tokens = body.loss_sum, body.num_tokens

    def acknowledged(self, credit: StageCredit) -> None:
        """A stage is said to have counted it."""
        self._credits[credit.stage] = credit

    def num_failed(self, stage: str) -> int:
        """Requests in a stage that have failed, with nothing counted."""
        return self._num_failed.get(stage, 0)

    def attempt_failed(self, stage: str, verdict: Verdict) -> None:
        """A request in a stage has failed, with nothing counted there.

        One too many, and the micro-batch is handed back where no stage can have counted it, and else lost: while its
        lease is renewed, nobody else would ever find out.

        Raises:
            MicroBatchEndedError: it was one too many.
        """
        self.num_retries += 1
        self._num_failed[stage] = self.num_failed(stage) + 1
        self._attempts[stage] = self._attempts.get(stage, 0.0) + verdict.attempts
        if self._attempts[stage] < self._max_attempts:
            return
        if self._credits or self.is_unclear or verdict.reason in _OF_THE_DATA:
            raise self.lost(stage, verdict.reason)
        raise self.stopped(verdict.reason)

    def done(self) -> Outcome:
        """Every stage has counted it."""
        return Outcome("done", tuple(self._credits.values()), self._loss_sum, self._num_tokens)

    def lost(self, stage: str, reason: str) -> MicroBatchEndedError:
        """Not, or perhaps not, counted in a stage, while others have or may have."""
        credits = tuple(self._credits.values())
        return MicroBatchEndedError(Outcome("lost", credits, self._loss_sum, self._num_tokens, stage, reason))

    def stopped(self, reason: str) -> MicroBatchEndedError:
        """It may be sent no longer: handed back if that cannot make anybody count it twice."""
        is_touched = self.is_unclear or bool(self._credits)
        credits = tuple(self._credits.values())
        fate = Outcome("left" if is_touched else "handed-back", credits, self._loss_sum, self._num_tokens, None, reason)
        return MicroBatchEndedError(fate)

    def result(self, outcome: Outcome) -> MicroBatchResult:
        """What is told of it."""
        wall_s = time.monotonic() - self._begun_s
        return MicroBatchResult(self.micro_batch.key, outcome, wall_s, tuple(self._hops), self.num_retries)
