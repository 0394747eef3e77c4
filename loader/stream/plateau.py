"""Plateau rules: when a shard is left early.

`absolute` is both readings of spec L-14 together: of the last 50 losses the last 20 have a variance below 0.02 and a
mean below 0.05, at least 100 steps into the shard. No language model on real text reaches 0.05, so in practice it
detects a memorised shard only. `relative` asks whether the loss still falls: it compares the mean of the last 20 losses
with the mean of the up to 30 before them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from loader.errors import LoaderUsageError

PlateauKind = Literal["absolute", "relative", "off"]


@dataclass(frozen=True, slots=True)
class Plateau:
    """The losses for which a rule fired."""

    mean: float
    variance: float


@dataclass(frozen=True, slots=True)
class PlateauRule:
    """When to rotate early; the defaults are those of spec L-14.

    Raises:
        LoaderUsageError: a value makes no sense.
    """

    kind: PlateauKind = "absolute"
    history: int = 50
    """Number of losses remembered (spec L-14)."""
    window: int = 20
    """Number of last losses that are compared (spec L-14)."""
    max_variance: float = 0.02
    """`absolute` only (spec L-14)."""
    max_mean: float = 0.05
    """`absolute` only, nats (spec L-14)."""
    min_steps: int = 100
    """Batches a shard is given before the rule is asked (spec L-14)."""
    min_improvement: float = 0.005
    """`relative` only: a mean that fell by less than this share of itself has plateaued."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(PlateauKind):
            raise LoaderUsageError(
                f"expected a plateau rule of {', '.join(get_args(PlateauKind))}, found {self.kind!r}"
            )
        if not 2 <= self.window < self.history:
            raise LoaderUsageError(f"expected 2 <= window < history, found {self.window} and {self.history}")
        if self.min_steps < 0:
            raise LoaderUsageError(f"expected min_steps of 0 or more, found {self.min_steps}")

    def plateau(self, losses: Sequence[float]) -> Plateau | None:
        """The plateau of the losses on the current shard; None without one.

        Args:
            losses: the latest last, at most `history` of them.
        """
        if self.kind == "off" or len(losses) < self.window:
            return None
        recent = losses[-self.window :]
        mean = math.fsum(recent) / len(recent)
        variance = math.fsum((loss - mean) * (loss - mean) for loss in recent) / len(recent)
        if self.kind == "absolute":
            return Plateau(mean, variance) if variance < self.max_variance and mean < self.max_mean else None
        if len(losses) < self.history:
            return None
        earlier = losses[: -self.window]
        before = math.fsum(earlier) / len(earlier)
        return Plateau(mean, variance) if before - mean < self.min_improvement * abs(before) else None


class LossHistory:
    """The latest losses on the current shard, without those that are not finite."""

    def __init__(self, length: int, losses: Iterable[float] = ()) -> None:
        self._losses: deque[float] = deque(losses, maxlen=length)

    def add(self, loss: float) -> None:
        """Adds a loss."""
        if math.isfinite(loss):
            self._losses.append(float(loss))

    def clear(self) -> None:
        """Forgets the losses of a shard that was left."""
        self._losses.clear()

    def losses(self) -> list[float]:
        """The losses, the latest last."""
        return list(self._losses)
