"""Curves for the page: what was recorded, brought down to some hundred points a curve.

A range of x (steps, tokens or time) is cut into equal parts; each has the mean of what fell into it, the lowest and the
highest, so that no spike is lost. Zooming asks for a smaller range, and gets its points anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Axis = Literal["step", "tokens", "time"]
CurveKind = Literal["loss", "speed", "nodes", "gradient_norm", "held_out", "seconds"]
"""The figure; the last three are of reports."""
Numbers = NDArray[np.float64]

MAX_POINTS: Final = 2_000
MAX_NODES: Final = 12
"""Curves of single nodes at once; of more the page has the band in which they lie."""
MAX_MARKS: Final = 200

Figure = Annotated[float | None, Field()]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class CourseRange(_Part):
    """What is asked for; ``begin`` and ``end`` None: all there is."""

    by: Axis = "step"
    begin: float | None = None
    end: float | None = None
    points: Annotated[int, Field(ge=10, le=MAX_POINTS)] = 600


class Curve(_Part):
    """A figure over the course; lists of one length, without points where there is none."""

    name: str
    what: CurveKind
    who: Literal["run", "self", "node"] = Field(description="run: over all nodes; self: the one that answers.")
    x: tuple[float, ...]
    y: tuple[float, ...] = Field(description="Mean of what fell into each part of the range.")
    low: tuple[float, ...] | None = Field(default=None, description="The lowest of it.")
    high: tuple[float, ...] | None = None
    breaks: tuple[int, ...] = Field(
        default=(), description="Points before which the line is broken: nothing was recorded."
    )


class RoundMark(_Part):
    """A round on the course."""

    x: float
    round_index: int
    stage: str
    is_failed: bool


class CourseView(_Part):
    """Curves in a range; x is steps, tokens, or seconds since 1970."""

    by: Axis
    begin: float | None = Field(description="Of all that is recorded; null: nothing is.")
    end: float | None
    curves: tuple[Curve, ...] = ()
    rounds: tuple[RoundMark, ...] = Field(default=(), description="The latest in the range, at most 200.")


def curve(
    name: str,
    what: CurveKind,
    who: Literal["run", "self", "node"],
    x: Numbers,
    y: Numbers,
    wanted: CourseRange,
    *,
    low: Numbers | None = None,
    high: Numbers | None = None,
    weights: Numbers | None = None,
) -> Curve | None:
    """Brings points down to a curve; None: there are none in the range.

    Args:
        name: of whom or what the curve is.
        what: the figure.
        who: whose it is.
        x: of the points, in any order.
        y: of the points; what is not finite is left out.
        wanted: the range, and how many parts it is cut into.
        low: the lowest that a point stands for; None: y.
        high: the highest that a point stands for; None: y.
        weights: how many values each point stands for; None: one.
    """
    low, high = y if low is None else low, y if high is None else high
    weights = np.ones_like(y) if weights is None else weights
    begin = -np.inf if wanted.begin is None else wanted.begin
    end = np.inf if wanted.end is None else wanted.end
    kept = np.isfinite(x) & np.isfinite(y) & (weights > 0) & (x >= begin) & (x <= end)
    if not kept.any():
        return None
    x, y, low, high, weights = (values[kept] for values in (x, y, low, high, weights))
    order = np.argsort(x, kind="stable")
    x, y, low, high, weights = (values[order] for values in (x, y, low, high, weights))
    first, last = float(x[0]), float(x[-1])
    # Several looks at one step are one point, as is all that falls into one part.
    parts = np.unique(x, return_inverse=True)[1]
    if parts[-1] >= wanted.points and last > first:
        parts = np.minimum(((x - first) * (wanted.points / (last - first))).astype(np.int64), wanted.points - 1)
    if parts[-1] + 1 < len(x):
        starts = np.flatnonzero(np.diff(parts, prepend=-1))
        sums = np.add.reduceat(weights, starts)
        x, y = np.add.reduceat(x * weights, starts) / sums, np.add.reduceat(y * weights, starts) / sums
        low, high = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
    has_band = bool(np.any(high > low))
    return Curve(
        name=name,
        what=what,
        who=who,
        x=_digits(x, 12),
        y=_digits(y, 6),
        low=_digits(low, 6) if has_band else None,
        high=_digits(high, 6) if has_band else None,
    )


def _digits(values: Numbers, digits: int) -> tuple[float, ...]:
    """So many significant digits, which is what an answer's size goes by."""
    return tuple(float(f"{value:.{digits}g}") for value in values.tolist())


def evenly(values: Sequence[RoundMark], limit: int = MAX_MARKS) -> tuple[RoundMark, ...]:
    """At most ``limit`` of marks, evenly picked; failed ones first."""
    if len(values) <= limit:
        return tuple(values)
    failed = [it for it in values if it.is_failed][-limit:]
    good = [it for it in values if not it.is_failed]
    count = limit - len(failed)
    picked = [good[index] for index in np.linspace(0, len(good) - 1, count).astype(int)] if count else []
    return tuple(sorted([*failed, *picked], key=lambda it: it.x))
