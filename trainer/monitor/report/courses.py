"""A report's curves: of each node while there are few, of all together, brought down to some hundred points.

A node's buckets (`StepCourse`) become arrays once its log is read: 0.5 MB a node, whatever it did. Speed is tokens over
the time from step to step, rounds and waits included, the time between two lives left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import numpy as np

from trainer.monitor.pages.course import (
    MAX_NODES,
    Axis,
    CourseRange,
    CourseView,
    Curve,
    CurveKind,
    Numbers,
    RoundMark,
    curve,
    evenly,
)
from trainer.monitor.pages.seen_course import from_first
from trainer.monitor.pages.step_course import StepCourse
from trainer.monitor.report.model import HeldOutPoint, ReportedRound, WatchedPoint

_BUCKETS: Final = 4_096
_POINTS: Final = 600
_SPEED_PARTS: Final = 300
_GAP_S: Final = 2.0  # More than this between two lives is seen on a chart.


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A node's buckets; arrays of one length. Means, lows and highs are NaN where there was no finite figure."""

    firsts: Numbers  # The first step of each.
    steps: Numbers  # The last of each.
    tokens: Numbers  # Of the run, at its end.
    at: Numbers
    means: Numbers
    lows: Numbers
    highs: Numbers
    counts: Numbers  # Of finite figures.
    num_tokens: Numbers
    seconds: Numbers

    @classmethod
    def of(cls, course: StepCourse) -> StepColumns:
        """Takes what a course has of all steps."""
        buckets = course.between(0, math.inf, _BUCKETS)
        rows: list[tuple[float, ...]] = [
            (
                it.first_step,
                it.last_step,
                it.tokens,
                it.at,
                it.loss_sum,
                it.low,
                it.high,
                it.num_losses,
                it.num_tokens,
                it.seconds,
            )
            for it in buckets
        ]
        firsts, steps, tokens, at, sums, lows, highs, counts, num_tokens, seconds = np.array(
            rows or [(0.0,) * 10], dtype=np.float64
        )[: len(rows)].T
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.where(counts > 0, sums / counts, np.nan)
        return cls(firsts, steps, tokens, at, means, lows, highs, counts, num_tokens, seconds)


@dataclass(frozen=True, slots=True)
class NodeCourse:
    """What a node's curves are drawn from."""

    name: str
    stage: str
    losses: StepColumns
    gradients: StepColumns
    marks: tuple[tuple[int, float, int, bool], ...]
    """Of rounds: the step before, when (seconds since 1970), the index, and whether it failed."""


_X: Final[dict[Axis, Callable[[StepColumns], Numbers]]] = {
    "step": lambda it: it.steps + 1,  # Steps done.
    "tokens": lambda it: it.tokens,
    "time": lambda it: it.at,
}


def losses(nodes: Sequence[NodeCourse], by: Axis) -> CourseView:
    """Returns the loss of each node, or of all together where there are many, and the rounds."""
    return _view(by, _curves([(it.name, it.losses) for it in nodes], by), _marks(nodes, by))


def gradient_norms(nodes: Sequence[NodeCourse]) -> CourseView:
    """Returns the gradient norm over steps."""
    return _view("step", _curves([(it.name, it.gradients) for it in nodes], "step", "gradient_norm"), ())


def held_out(points: Sequence[HeldOutPoint]) -> CourseView:
    """Returns the loss on held-out shards over steps, a curve a node; of the first nodes only."""
    wanted = CourseRange(by="step", points=_POINTS)
    names = list(dict.fromkeys(point.node for point in points))[:MAX_NODES]
    found = []
    for name in names:
        own = [(point.step, point.loss) for point in points if point.node == name]
        x, y = np.array(own, dtype=np.float64).T
        found.append(curve(name, "held_out", "node", x, y, wanted))
    return _view("step", [each for each in found if each is not None], ())


def round_seconds(rounds: Sequence[ReportedRound]) -> CourseView:
    """Returns what rounds took over time: as a whole, and by phase where that was logged."""
    wanted = CourseRange(by="time", points=_POINTS)
    found = []
    for name, value_of in _ROUND_PARTS.items():
        known = [(datetime.fromisoformat(it.ended_at).timestamp(), value_of(it)) for it in rounds]
        own = [(at, seconds) for at, seconds in known if seconds is not None]
        if own:
            x, y = np.array(own, dtype=np.float64).T
            found.append(curve(name, "seconds", "self" if name == "whole round" else "node", x, y, wanted))
    return _view("time", [each for each in found if each is not None], ())


def over_time(nodes: Sequence[NodeCourse]) -> CourseView:
    """Returns loss and speed over time."""
    shown = _curves([(it.name, it.losses) for it in nodes], "time")
    return _view("time", (*shown, *_speeds(nodes)), _marks(nodes, "time"))


def watched(points: Sequence[WatchedPoint]) -> CourseView:
    """Returns loss, speed and nodes over time as a monitor saw them."""
    wanted = CourseRange(by="time", points=_POINTS)
    at = np.array([datetime.fromisoformat(it.at).timestamp() for it in points])
    parts: dict[CurveKind, list[float]] = {
        "loss": [np.nan if it.loss is None else it.loss for it in points],
        "speed": from_first(np.array([it.tokens_per_s for it in points])).tolist(),
        "nodes": [float(it.nodes) for it in points],
    }
    found = (curve("the run", what, "run", at, np.array(values), wanted) for what, values in parts.items())
    return _view("time", [each for each in found if each is not None], ())


_ROUND_PARTS: Final[dict[str, Callable[[ReportedRound], float | None]]] = {
    "whole round": lambda it: it.seconds,
    "agreeing": lambda it: it.agree_s,
    "tensors": lambda it: it.reduce_s,
    "vote": lambda it: it.vote_s,
}


def _curves(columns: Sequence[tuple[str, StepColumns]], by: Axis, what: CurveKind = "loss") -> tuple[Curve, ...]:
    wanted, x_of = CourseRange(by=by, points=_POINTS), _X[by]
    known = [(name, it) for name, it in columns if it.counts.any()]
    found: list[Curve | None] = []
    if len(known) > 1:
        parts = [np.concatenate([get(it) for _, it in known]) for get in (x_of, _means, _lows, _highs, _counts)]
        x, y, low, high, weights = parts
        found.append(curve("all nodes", what, "run", x, y, wanted, low=low, high=high, weights=weights))
    for name, it in known[:MAX_NODES]:
        band = {"low": it.lows, "high": it.highs, "weights": it.counts}
        drawn = curve(name, what, "node", x_of(it), it.means, wanted, **band)
        found.append(None if drawn is None else _broken(drawn, _gaps(it, by)))
    return tuple(each for each in found if each is not None)


def _gaps(it: StepColumns, by: Axis) -> Numbers:
    """Returns where a curve goes on after steps that this node did not do, or time in which it did not live."""
    if by == "step":
        jumps = it.firsts[1:] - it.steps[:-1]
        usual = float(np.median(jumps)) if len(jumps) else 1.0  # Of several drivers each has only some of the steps.
        return _X["step"](it)[1:][jumps > max(1.0, 8.0 * usual)]
    if by == "time":
        return it.at[1:][it.at[1:] - it.seconds[1:] > it.at[:-1] + _GAP_S]
    return np.array([])


def _broken(drawn: Curve, gaps: Numbers) -> Curve:
    breaks = {int(index) for index in np.searchsorted(drawn.x, gaps) if 0 < index < len(drawn.x)}
    return drawn.model_copy(update={"breaks": tuple(sorted(breaks))})


def _means(it: StepColumns) -> Numbers:
    return it.means


def _lows(it: StepColumns) -> Numbers:
    return it.lows


def _highs(it: StepColumns) -> Numbers:
    return it.highs


def _counts(it: StepColumns) -> Numbers:
    return it.counts


def _speeds(nodes: Sequence[NodeCourse]) -> tuple[Curve, ...]:
    known = [it for it in nodes if len(it.losses.at)]
    if not known:
        return ()
    first = min(float((it.losses.at - it.losses.seconds).min()) for it in known)
    last = max(float(it.losses.at.max()) for it in known)
    # Parts of some steps, or the line would show how many happened to fall into each.
    typical_s = max(float(np.median(it.losses.seconds)) for it in known)
    num_parts = int(np.clip((last - first) / max(1e-3, 8 * typical_s), 4, _SPEED_PARTS))
    edges = np.linspace(first, max(last, first + 1e-3), num_parts + 1)
    of_nodes = {it.name: _spread(it.losses, edges) for it in known}
    middles, wanted = (edges[:-1] + edges[1:]) / 2, CourseRange(by="time", points=_POINTS)
    found: list[Curve | None] = []
    if len(of_nodes) > 1:
        found.append(curve("all nodes", "speed", "run", middles, np.nansum(list(of_nodes.values()), axis=0), wanted))
    for it in known[:MAX_NODES]:
        drawn = curve(it.name, "speed", "node", middles, of_nodes[it.name], wanted)
        found.append(None if drawn is None else _broken(drawn, _gaps(it.losses, "time")))
    return tuple(each for each in found if each is not None)


def _spread(columns: StepColumns, edges: Numbers) -> Numbers:
    """Returns tokens a second between the edges, each bucket's evenly over its time; NaN before and after them."""
    begins, ends = columns.at - columns.seconds, columns.at
    widths = np.maximum(ends - begins, 1e-6)
    # Tokens up to each edge: of each bucket the share of its time that has passed.
    upto = np.array([float(np.sum(columns.num_tokens * np.clip((edge - begins) / widths, 0.0, 1.0))) for edge in edges])
    speed = np.diff(upto) / np.diff(edges)
    outside = (edges[1:] < begins.min()) | (edges[:-1] > ends.max())
    return np.where(outside, np.nan, speed)


def _marks(nodes: Sequence[NodeCourse], by: Axis) -> tuple[RoundMark, ...]:
    """Returns the rounds on an axis, each once: as the first node that tells of it, failed if it failed for all."""
    found: dict[tuple[str, int], RoundMark] = {}
    for node in nodes:
        for step, at, index, failed in node.marks:
            if by == "tokens":
                columns = node.losses
                x = float(np.interp(step, columns.steps, columns.tokens)) if len(columns.steps) else 0.0
            else:
                x = at if by == "time" else float(step + 1)
            known = found.get((node.stage, index))
            if known is None or (known.is_failed and not failed):
                found[node.stage, index] = RoundMark(x=x, round_index=index, stage=node.stage, is_failed=failed)
    return evenly(sorted(found.values(), key=lambda it: it.x))


def _view(by: Axis, curves: Iterable[Curve], marks: tuple[RoundMark, ...]) -> CourseView:
    curves = tuple(curves)
    xs = [x for each in curves for x in (each.x[0], each.x[-1])]
    return CourseView(by=by, begin=min(xs, default=None), end=max(xs, default=None), curves=curves, rounds=marks)
