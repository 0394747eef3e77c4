"""Curves of one or many nodes as a PNG: loss over steps, loss over tokens, speed over time, rounds marked.

Single losses are drawn thin and by at most 4,000 points a node, their moving average thick. 16 nodes of 3,000 steps
take 2 s. Of a step that a killed node logged twice the last record counts, since that is the one the model has. Tokens
are summed from step 0 on; steps missing before the log's first one count as many tokens as that one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from genesis.extras import with_extra
from trainer.errors import TrainerUsageError
from trainer.monitor.event_log import read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
_Dashes = tuple[float, tuple[float, ...]]
"""matplotlib's form: an offset, and the lengths of strokes and gaps; none for a solid line."""

_MAX_POINTS = 4_000
_MAX_NODES = 64
_MAX_MARKS = 100
_MAX_LABEL = 28
_BLOCK = 25
_SPAN_SHARE = 0.01  # The moving average looks back a hundredth of the run, at least 10 steps.
_UNITS = (("days", 86_400), ("hours", 3_600), ("minutes", 60), ("seconds", 1))
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#e08214", "#555555")
_STYLES: tuple[_Dashes, ...] = ((0, ()), (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
"""With 8 colours, 32 distinct lines; then they repeat."""


def plot(
    log_dirs: Sequence[Path], out_png: Path, *, title: str = "", size_inches: tuple[float, float] = (13.0, 8.5)
) -> Path:
    """Draws the curves of all nodes in these logs at 110 dots an inch; returns the picture's path.

    ``log_dirs`` are directories as given to `--log-dir`, or single files; the title is by default the number of nodes
    and steps. Raises `TrainerUsageError`: matplotlib is missing, there is nothing to draw, or the picture cannot be
    written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise TrainerUsageError(str(with_extra(error))) from None
    figure = Figure(figsize=size_inches, layout="constrained")
    FigureCanvasAgg(figure)  # Without matplotlib's global state, so no display is needed.
    curves = read_curves(log_dirs)
    if len(curves) > _MAX_NODES:
        raise TrainerUsageError(
            f"expected {_MAX_NODES} nodes at most to tell apart, found {len(curves)}; give fewer logs"
        )
    _draw(figure, curves, title)
    out_png = out_png.expanduser()
    try:
        out_png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out_png, format="png", dpi=110)
    except OSError as error:
        raise TrainerUsageError(f"cannot write the picture {out_png}: {error.strerror}; give another --out") from None
    return out_png


def _draw(figure: Figure, curves: Sequence[NodeCurve], title: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes = figure.subplot_mosaic([["steps", "tokens"], ["speed", "speed"]], height_ratios=(3, 2))
    averages = [smoothed(curve.losses, span=max(10.0, _SPAN_SHARE * len(curve.steps))) for curve in curves]
    for node, (curve, average) in enumerate(zip(curves, averages, strict=True)):
        _draw_loss(axes["steps"], node, curve, average, curve.steps)
        _draw_loss(axes["tokens"], node, curve, average, curve.tokens)
    _draw_speed(axes["speed"], curves)
    axes["speed"].yaxis.set_major_formatter(EngFormatter(sep=""))
    for name, label in (("steps", "inner step"), ("tokens", "tokens of the node")):
        axes[name].set(xlabel=label, ylabel="loss, nats a token", ylim=_loss_limits(curves, averages))
        axes[name].xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel in axes.values():
        panel.grid(alpha=0.25)
        panel.margins(x=0.01)
    num_steps = sum(len(curve.steps) for curve in curves)
    figure.suptitle(title or f"{len(curves)} node{'s' * (len(curves) > 1)}, {num_steps:,} steps")
    _legend(figure, curves, averages)


def _draw_loss(axes: Axes, node: int, curve: NodeCurve, average: Array, x: Array) -> None:
    colour, style = _look(node)
    axes.plot(*envelope(x, curve.losses, max_points=_MAX_POINTS), color=colour, linewidth=0.5, alpha=0.22, zorder=1)
    axes.plot(*envelope(x, average, max_points=_MAX_POINTS), color=colour, linestyle=style, linewidth=1.6, zorder=3)
    for has_failed, marker in ((False, "|"), (True, "x")):
        ended_at = [ended.step for ended in curve.rounds if ended.has_failed == has_failed]
        ended_at = ended_at[:: 1 + len(ended_at) // _MAX_MARKS]
        at = np.searchsorted(curve.steps, ended_at).clip(0, len(x) - 1)
        axes.plot(x[at], average[at], marker, color=colour, markersize=7, markeredgewidth=1.2, zorder=4)


def _loss_limits(curves: Sequence[NodeCurve], averages: Sequence[Array]) -> tuple[float, float]:
    """Returns limits from the least losses to the greatest average; a few losses far beyond are cut off."""
    losses, averaged = (
        values[np.isfinite(values)]
        for values in (np.concatenate([curve.losses for curve in curves]), np.concatenate(averages))
    )
    if not len(losses):
        return 0.0, 1.0
    low = float(np.quantile(losses, 0.002))
    high = min(float(averaged.max()), 3.0 * float(np.quantile(losses, 0.99)))
    margin = 0.05 * max(high - low, 1e-3)
    return low - margin, high + margin


def _draw_speed(axes: Axes, curves: Sequence[NodeCurve]) -> None:
    edges_s = _stretches(curves)
    begun_s, length_s = edges_s[0], edges_s[-1] - edges_s[0]
    unit, unit_s = next(found for found in _UNITS if length_s >= 2 * found[1] or found[1] == 1)
    middles = ((edges_s[:-1] + edges_s[1:]) / 2 - begun_s) / unit_s
    for node, curve in enumerate(curves):
        colour, style = _look(node)
        axes.plot(middles, speed(curve, edges_s), color=colour, linestyle=style, linewidth=1.4)
    rounds = [ended for curve in curves for ended in curve.rounds]
    for has_failed, colour in ((False, "0.55"), (True, "red")):
        at = np.array([ended.time_s - begun_s for ended in rounds if ended.has_failed == has_failed]) / unit_s
        axes.vlines(at, 0, 0.035, color=colour, linewidth=0.8, transform=axes.get_xaxis_transform())
    ticks = " (ticks: rounds; red ones failed)" if rounds else ""
    axes.set(xlabel=f"{unit} since the first step{ticks}", ylabel="tokens/s, waits included")
    axes.set_ylim(bottom=0)


def _stretches(curves: Sequence[NodeCurve]) -> Array:
    """Returns the edges of the stretches of time over which speed is averaged.

    Each is some steps long, or the line would show how many happened to fall into it; with many nodes they are longer,
    so that the dips of their rounds do not cover each other's lines.
    """
    begun_s = min(curve.times_s.min() for curve in curves)
    length_s = max(1.0, max(curve.times_s.max() for curve in curves) - begun_s)
    step_s = max(float(np.median(np.diff(np.sort(curve.times_s, axis=0), prepend=begun_s))) for curve in curves)
    most = max(30, min(200, 600 // len(curves)))
    return np.linspace(begun_s, begun_s + length_s, 1 + int(np.clip(length_s / max(10 * step_s, 1e-3), 4, most)))


def _legend(figure: Figure, curves: Sequence[NodeCurve], averages: Sequence[Array]) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for node, (curve, average) in enumerate(zip(curves, averages, strict=True)):
        colour, style = _look(node)
        name = curve.label if len(curve.label) <= _MAX_LABEL else f"{curve.label[: _MAX_LABEL - 1]}…"
        handles.append(Line2D([], [], color=colour, linestyle=style, label=f"{name}  {average[-1]:.3f}"))
    marks = (("|", "round"), ("x", "failed round"))
    if any(curve.rounds for curve in curves):
        handles += [Line2D([], [], color="0.3", linestyle="", marker=mark, label=label) for mark, label in marks]
    columns = 1 + len(curves) // 32
    title = "node, averaged loss"
    figure.legend(handles=handles, loc="outside right upper", title=title, fontsize="small", ncols=columns)


def _look(node: int) -> tuple[str, _Dashes]:
    return _COLOURS[node % len(_COLOURS)], _STYLES[node // len(_COLOURS) % len(_STYLES)]


@dataclass(frozen=True, slots=True)
class RoundMark:
    """When a round ended, and how; ``step`` is the latest before it, or 0."""

    step: int
    time_s: float
    has_failed: bool


@dataclass(frozen=True, slots=True)
class NodeCurve:
    """The steps of one node, in the order of their index, as arrays of one length."""

    label: str
    steps: Array
    tokens: Array  # Trained on up to and including the step.
    num_tokens: Array  # Of each step.
    losses: Array  # NaN where it was not finite.
    times_s: Array  # When the step ended, seconds since the epoch.
    rounds: tuple[RoundMark, ...]


def read_curves(log_dirs: Sequence[Path]) -> list[NodeCurve]:
    """Returns the curves of all nodes in these logs, by name.

    A node's name in two logs makes two curves, which then have the directory's name in theirs. Raises
    `TrainerUsageError`: there is no log, or no step in it.
    """
    if not log_dirs:
        raise TrainerUsageError("expected a log's directory or more, found none; give what --log-dir said")
    steps: dict[tuple[Path, str], dict[int, tuple[float, float, float]]] = {}
    rounds: dict[tuple[Path, str], list[RoundMark]] = {}
    for directory in dict.fromkeys(log_dirs):
        latest: dict[str, int] = {}
        for event in read_events(directory):
            key, time_s = (directory, event.node), event.time.timestamp()
            of_node, index = steps.setdefault(key, {}), event.number("step")
            if event.kind == "step" and np.isfinite(index):
                latest[event.node] = int(index)
                of_node[int(index)] = (time_s, event.number("num_tokens"), event.number("loss"))
            elif event.kind in ("round", "round_failed"):
                mark = RoundMark(latest.get(event.node, 0), time_s, event.kind == "round_failed")
                rounds.setdefault(key, []).append(mark)
    nodes = [node for (_, node), of_node in steps.items() if of_node]
    if not nodes:
        shown = ", ".join(str(directory) for directory in log_dirs)
        found_else = f"events of {len(steps)} nodes but no step" if steps else "no events"
        raise TrainerUsageError(
            f"expected events-*.jsonl with steps in {shown}, found {found_else}; give what --log-dir said"
        )
    curves = [
        _curve(
            node if nodes.count(node) == 1 else f"{directory.name}: {node}", of_node, rounds.get((directory, node), ())
        )
        for (directory, node), of_node in steps.items()
        if of_node
    ]
    return sorted(curves, key=lambda curve: _natural(curve.label))


def _natural(label: str) -> list[tuple[int, str]]:
    """Returns a sort key by which gpu-2 comes before gpu-10."""
    return [(int(digits), "") if digits else (-1, text) for digits, text in re.findall(r"(\d+)|(\D+)", label)]


def _curve(label: str, by_step: Mapping[int, tuple[float, float, float]], rounds: Sequence[RoundMark]) -> NodeCurve:
    steps = np.array(sorted(by_step), dtype=np.float64)
    times_s, tokens, losses = np.array([by_step[int(step)] for step in steps], dtype=np.float64).T
    tokens = np.where(np.isfinite(tokens), tokens, 0.0)
    return NodeCurve(
        label=label,
        steps=steps,
        tokens=tokens[0] * steps[0] + np.cumsum(tokens),
        num_tokens=tokens,
        losses=np.where(np.isfinite(losses), losses, np.nan),
        times_s=times_s,
        rounds=tuple(rounds),
    )


def smoothed(values: Array, *, span: float) -> Array:
    """Returns the exponential moving average over some ``span`` values, without the bias of its start; NaN is skipped.

    A value counts as at most twice the median of the `_BLOCK` values around it: one spike does not hide what follows
    it, and a loss that stays high is seen as high.
    """
    blocks = np.array_split(values, max(1, len(values) // _BLOCK))
    medians = [np.median(found) if len(found := block[np.isfinite(block)]) else np.inf for block in blocks]
    values = np.minimum(values, 2.0 * np.repeat(medians, [len(block) for block in blocks]))
    keep = np.exp(-1.0 / max(span, 1.0))

    def step(state: tuple[float, float], value: float) -> tuple[float, float]:
        total, weight = state
        return state if np.isnan(value) else (keep * total + (1 - keep) * value, keep * weight + (1 - keep))

    states = np.array(list(accumulate(values.tolist(), step, initial=(0.0, 0.0)))[1:]).reshape(-1, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(states[:, 1] > 0, states[:, 0] / states[:, 1], np.nan)


def envelope(x: Array, y: Array, *, max_points: int) -> tuple[Array, Array]:
    """Returns a curve of fewer points, with the least and the greatest value of each stretch: spikes stay visible."""
    if len(x) <= max_points:
        return x, y
    kept: list[int] = []
    for block in np.array_split(np.arange(len(x)), max_points // 2):
        finite = block[np.isfinite(y[block])]
        if len(finite):
            kept += sorted({int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])})
    return x[kept], y[kept]


def speed(curve: NodeCurve, edges_s: Array) -> Array:
    """Returns tokens a second between these times, waits included; NaN outside the node's steps."""
    tokens, _ = np.histogram(curve.times_s, bins=edges_s, weights=curve.num_tokens)
    found = tokens / np.diff(edges_s)
    slack_s = 0.01 * (edges_s[1] - edges_s[0])
    outside = (edges_s[:-1] < curve.times_s.min() - slack_s) | (edges_s[1:] > curve.times_s.max() + slack_s)
    return np.where(outside, np.nan, found)
