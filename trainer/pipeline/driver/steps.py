"""The loss by optimizer steps, as micro-batches come in; weighed by tokens."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepLoss", "StepLosses"]


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A step's."""

    step: int
    """How many steps this driver had seen before it."""
    loss: float
    """Mean over the labels that count."""
    num_tokens: int
    micro_batches: int


class StepLosses:
    """Sums until a step's tokens are there.

    With one driver a step here is a step of the stages; with several, each sees its own share of every step.

    Args:
        target_tokens: of a step.
    """

    def __init__(self, target_tokens: int) -> None:
        self._target_tokens = target_tokens
        self._step = 0
        self._loss_sum = 0.0
        self._num_tokens = 0
        self._micro_batches = 0

    def add(self, loss_sum: float, num_tokens: int) -> StepLoss | None:
        """Counts a micro-batch; the step that it completes, if it does."""
        self._loss_sum += loss_sum
        self._num_tokens += num_tokens
        self._micro_batches += 1
        if self._num_tokens < self._target_tokens:
            return None
        loss = self._loss_sum / max(1, self._num_tokens)
        step = StepLoss(self._step, loss, self._num_tokens, self._micro_batches)
        self._step += 1
        self._loss_sum, self._num_tokens, self._micro_batches = 0.0, 0, 0
        return step
