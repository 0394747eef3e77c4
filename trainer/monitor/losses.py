"""The losses of one node: the first ones, the latest ones, and their trend.

A loss varies from batch to batch by more than it falls in a hundred steps. So windows are compared by the medians of
their eighths, which a spike of a few steps does not move; the difference must exceed how much those medians differ from
one to the next. That noise grows, as it should, where successive losses correlate. A verdict takes 1 ms.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LossTrend = Literal["improving", "stable", "degrading", "unknown"]

FIRST_LOSSES = 50  # The beginning, on which training has to improve.
_RECENT_LOSSES = 2_000
_SHORTEST = 40  # Losses in the shortest window that is compared with the one before it.
_NUM_BLOCKS = 8
_STANDARD_ERRORS = 4.5
"""By which a difference must exceed the noise. Independent noise does so less than once in a thousand comparisons,
noise whose neighbours correlate by 0.8 once in thirty in the shortest window, and once in a thousand in the next."""
_UPPER_QUARTILE = 1.1503 * math.sqrt(2.0)
"""Of the absolute difference of two normal variables, in their standard deviations."""
_MIN_SHARE = 1e-3  # A change by less than a thousandth of the loss does not count.
_EMA_WEIGHT = 0.02


def loss_trend(losses: Sequence[float]) -> LossTrend:
    """Returns the trend of losses, the latest last; ``unknown`` for fewer than 80.

    Windows of 40, 80, 160 ... are compared with as many before them: the shortest that shows a change decides.
    """
    values = np.asarray(losses, dtype=np.float64)
    longest = len(values) // 2
    half = _SHORTEST
    if longest < half:
        return "unknown"
    while True:
        change = _difference(values[-2 * half : -half], values[-half:])
        if change:
            return "improving" if change < 0 else "degrading"
        if half == longest:
            return "stable"
        half = min(2 * half, longest)


def has_fallen(first: Sequence[float], latest: Sequence[float]) -> bool:
    """Returns whether the latest losses are below the first ones by more than their noise."""
    return _difference(np.asarray(first, dtype=np.float64), np.asarray(latest, dtype=np.float64)) < 0


def _difference(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """Returns the change of the typical loss between two windows of at least 8 finite losses; 0 if it may be noise."""
    medians_before, medians_after = _medians(before), _medians(after)
    found = float(medians_after.mean() - medians_before.mean())
    steps = np.abs(np.concatenate([np.diff(medians_before), np.diff(medians_after)]))
    scatter = float(np.quantile(steps, 0.75)) / _UPPER_QUARTILE
    noise = scatter * math.sqrt(2.0 / _NUM_BLOCKS)
    least = max(_STANDARD_ERRORS * noise, _MIN_SHARE * abs(float(medians_before.mean())))
    return found if abs(found) > least else 0.0


def _medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    size = len(values) // _NUM_BLOCKS  # What does not divide is left out at the beginning.
    return np.asarray(np.median(values[-_NUM_BLOCKS * size :].reshape(_NUM_BLOCKS, size), axis=1))


class TrackedLosses:
    """The first losses of a run, its latest ones, and their moving average. What is not finite is left out."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.recent: deque[float] = deque(maxlen=_RECENT_LOSSES)
        self._sum = 0.0
        self._weight = 0.0

    def add(self, loss: float) -> None:
        """Adds a loss."""
        if not math.isfinite(loss):
            return
        if len(self.first) < FIRST_LOSSES:
            self.first.append(loss)
        self.recent.append(loss)
        self._sum += _EMA_WEIGHT * (loss - self._sum)
        self._weight += _EMA_WEIGHT * (1.0 - self._weight)

    @property
    def smoothed(self) -> float | None:
        """Exponential moving average over some 50 losses, without the bias of its start; None before the first."""
        return self._sum / self._weight if self._weight else None

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the history, for a checkpoint."""
        return {"first": list(self.first), "recent": list(self.recent), "average": [self._sum, self._weight]}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Resumes from a checkpoint."""
        self.first = [float(loss) for loss in state["first"]]
        self.recent = deque((float(loss) for loss in state["recent"]), maxlen=_RECENT_LOSSES)
        self._sum, self._weight = (float(number) for number in state["average"])
