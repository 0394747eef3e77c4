"""From logs to curves: what `plot` draws, as arrays.

A node that was killed goes on from its last checkpoint and logs some steps a second time: of a step the last record
counts, since that is the one the model has. Tokens are summed from step 0 on; where steps are missing before the log's
first (rotated away, or logged elsewhere), as many tokens are taken for each as the first one there had.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.errors import TrainerUsageError
from trainer.monitor.reading import Event, read_events

__all__ = ["NodeCurve", "Round", "envelope", "read_curves", "smoothed", "speed"]

Array = NDArray[np.float64]

_BLOCK = 25


@dataclass(frozen=True, slots=True)
class Round:
    """When a round ended, and how."""

    step: int
    """Latest step before it; 0 if there is none."""
    time_s: float
    has_failed: bool


@dataclass(frozen=True, slots=True)
class NodeCurve:
    """The steps of one node, in the order of their index. All arrays have one length."""

    label: str
    steps: Array
    tokens: Array
    """Trained on up to and with the step."""
    num_tokens: Array
    """Of each step."""
    losses: Array
    """NaN where it was not finite."""
    times_s: Array
    """When the step ended, seconds since the epoch."""
    rounds: tuple[Round, ...]


@dataclass(slots=True)
class _Gathered:
    """Of one node, while its log is read."""

    steps: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    latest_step: int = 0

    def add(self, event: Event) -> None:
        if event.kind == "step":
            index = event.number("step")
            if np.isfinite(index):
                self.latest_step = int(index)
                numbers = (event.time.timestamp(), event.number("num_tokens"), event.number("loss"))
                self.steps[self.latest_step] = numbers
        elif event.kind in ("round", "round_failed"):
            has_failed = event.kind == "round_failed"
            self.rounds.append(Round(self.latest_step, event.time.timestamp(), has_failed))

    def curve(self, label: str) -> NodeCurve:
        steps = np.array(sorted(self.steps), dtype=np.float64)
        times_s, tokens, losses = np.array([self.steps[int(step)] for step in steps], dtype=np.float64).T
        tokens = np.where(np.isfinite(tokens), tokens, 0.0)
        return NodeCurve(
            label=label,
            steps=steps,
            tokens=tokens[0] * steps[0] + np.cumsum(tokens),
            num_tokens=tokens,
            losses=np.where(np.isfinite(losses), losses, np.nan),
            times_s=times_s,
            rounds=tuple(self.rounds),
        )


def read_curves(log_dirs: Sequence[Path]) -> list[NodeCurve]:
    """The curves of all nodes in these logs, by name.

    Args:
        log_dirs: directories (or files) as `read_events` takes them. A node's name in two of them makes two curves,
            which then have the directory's name in theirs.

    Raises:
        TrainerUsageError: nothing there, or no step in it.
    """
    if not log_dirs:
        raise TrainerUsageError("expected a log's directory or more, found none; give what --log-dir said")
    gathered: dict[tuple[Path, str], _Gathered] = {}
    for directory in dict.fromkeys(log_dirs):
        for event in read_events(directory):
            gathered.setdefault((directory, event.node), _Gathered()).add(event)
    with_steps = {key: found for key, found in gathered.items() if found.steps}
    if not with_steps:
        shown = ", ".join(str(directory) for directory in log_dirs)
        found_else = f"events of {len(gathered)} nodes but no step" if gathered else "no events"
        raise TrainerUsageError(
            f"expected events-*.jsonl with steps in {shown}, found {found_else}; give what --log-dir said"
        )
    nodes = [node for _, node in with_steps]
    labels = {
        (directory, node): node if nodes.count(node) == 1 else f"{directory.name}: {node}"
        for directory, node in with_steps
    }
    return sorted(
        (found.curve(labels[key]) for key, found in with_steps.items()), key=lambda curve: _natural(curve.label)
    )


def _natural(label: str) -> list[tuple[int, str]]:
    """So that gpu-2 comes before gpu-10."""
    return [(int(digits), "") if digits else (-1, text) for digits, text in re.findall(r"(\d+)|(\D+)", label)]


def smoothed(values: Array, *, span: float) -> Array:
    """Exponential moving average without the bias of its start; what is NaN leaves it where it was.

    A value counts as twice the median of the `_BLOCK` values around it at most: one spike does not hide what follows
    it, and a loss that stays high is seen as high.

    Args:
        values: in their order, above 0.
        span: how many of them the average looks back, about.
    """
    values = _without_spikes(values)
    keep = np.exp(-1.0 / max(span, 1.0))

    def step(state: tuple[float, float], value: float) -> tuple[float, float]:
        total, weight = state
        return state if np.isnan(value) else (keep * total + (1 - keep) * value, keep * weight + (1 - keep))

    states = np.array(list(accumulate(values.tolist(), step, initial=(0.0, 0.0)))[1:]).reshape(-1, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(states[:, 1] > 0, states[:, 0] / states[:, 1], np.nan)


def _without_spikes(values: Array) -> Array:
    blocks = np.array_split(values, max(1, len(values) // _BLOCK))
    medians = [np.median(found) if len(found := block[np.isfinite(block)]) else np.inf for block in blocks]
    return np.minimum(values, 2.0 * np.repeat(medians, [len(block) for block in blocks]))


def envelope(x: Array, y: Array, *, max_points: int) -> tuple[Array, Array]:
    """A curve by fewer points, with the least and the greatest value of each stretch: spikes stay to be seen."""
    if len(x) <= max_points:
        return x, y
    kept: list[int] = []
    for block in np.array_split(np.arange(len(x)), max_points // 2):
        finite = block[np.isfinite(y[block])]
        if len(finite):
            kept += sorted({int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])})
    return x[kept], y[kept]


def speed(curve: NodeCurve, edges_s: Array) -> Array:
    """Tokens a second in each stretch of time, waits included; NaN where it is not all within the node's steps.

    Args:
        curve: of a node.
        edges_s: where the stretches begin and end, seconds since the epoch.
    """
    tokens, _ = np.histogram(curve.times_s, bins=edges_s, weights=curve.num_tokens)
    found = tokens / np.diff(edges_s)
    slack_s = 0.01 * (edges_s[1] - edges_s[0])
    outside = (edges_s[:-1] < curve.times_s.min() - slack_s) | (edges_s[1:] > curve.times_s.max() + slack_s)
    return np.where(outside, np.nan, found)
