"""What of a run a person should look at: pure functions from figures to alarms.

An alarm stands while its condition does. A monitor decides nothing by a single look where that can be helped: a node
counts as quiet after three missed reports, and rounds as failing when most of the latest ones did, four or more.
A loss spikes when it is above the median of the last 60 looks by six of their normal-consistent median absolute
deviations, and by 10 % at least: on a loss that falls with 2 % of noise none of 10,000 looks raised it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from trainer.monitor.run_view import AlarmStatus, NodeSummary, StageSummary
from trainer.monitor.status import SwarmAccount

_MIN_ROUNDS: Final = 4
_LOOKS: Final = 60
_MIN_LOOKS: Final = 10
_SPIKE_DEVIATIONS: Final = 6.0
_SPIKE_SHARE: Final = 0.1
_NORMAL: Final = 1.4826  # Standard deviations in a median absolute deviation, of a normal distribution.


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmLimits:
    """From when on something is an alarm."""

    min_replicas: int = 2
    """Workers that a stage should have: with one, its state is lost with a machine."""
    checkpoint_s: float = 3600.0
    """Age of the newest checkpoint of a stage, or of a node that holds a whole model."""
    clock_s: float = 30.0
    """By which a clock may be off; requests are refused beyond `rpc.max_clock_skew_s`, 120 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What alarms are decided from."""

    stages: Sequence[StageSummary] = ()
    nodes: Sequence[NodeSummary] = ()
    losses: Sequence[float] = ()  # Of the latest looks, the newest last.
    recent_rounds: Sequence[tuple[str, bool]] = ()
    """Of the latest rounds that nodes reported: the stage (or empty), and whether it had a result."""
    account: SwarmAccount | None = None


def alarms_of(facts: RunFacts, limits: AlarmLimits) -> tuple[AlarmStatus, ...]:
    """Returns what is wrong, the gravest first."""
    found = [
        *_of_stages(facts.stages, limits),
        *_of_checkpoints(facts, limits),
        *_of_loss(facts.losses),
        *_of_rounds(facts.recent_rounds),
        *_of_nodes(facts.nodes, limits),
    ]
    if facts.account is not None and not (facts.account.micro_batches.adds_up and facts.account.tokens.adds_up):
        found.insert(0, AlarmStatus(kind="account", subject="run", text="leased is not done + lost + open"))
    return tuple(found)


def _of_stages(stages: Iterable[StageSummary], limits: AlarmLimits) -> Iterator[AlarmStatus]:
    for stage in stages:
        if not stage.num_replicas:
            joining = f"; {stage.num_joining} on the way" if stage.num_joining else ""
            yield AlarmStatus(kind="empty-stage", subject=stage.stage, text=f"nobody serves it{joining}")
        elif stage.num_replicas < limits.min_replicas:
            text = f"{stage.num_replicas} replica, {limits.min_replicas} expected: its state is lost with a machine"
            yield AlarmStatus(kind="one-replica", subject=stage.stage, text=text)


def _of_checkpoints(facts: RunFacts, limits: AlarmLimits) -> Iterator[AlarmStatus]:
    """One fresh checkpoint of a stage, or of any whole-model node, is enough."""
    ages: dict[str, list[float]] = {}
    for node in facts.nodes:
        if node.role in ("node", "worker") and node.checkpoint_age_s is not None:
            ages.setdefault(node.stage, []).append(node.checkpoint_age_s)
    for stage, known in ages.items():
        if (newest_s := min(known)) > limits.checkpoint_s:
            text = f"no checkpoint for {newest_s / 60:.0f} min"
            yield AlarmStatus(kind="no-checkpoint", subject=stage or "run", text=text)


def _of_loss(losses: Sequence[float]) -> Iterator[AlarmStatus]:
    before, latest = losses[-1 - _LOOKS : -1], losses[-1:]
    if len(before) < _MIN_LOOKS:
        return
    middle = median(before)
    deviation = _NORMAL * median(abs(loss - middle) for loss in before)
    limit = middle + max(_SPIKE_DEVIATIONS * deviation, _SPIKE_SHARE * abs(middle))
    if latest[0] > limit:
        text = f"{latest[0]:.3f} nats a token after a median of {middle:.3f}"
        yield AlarmStatus(kind="loss-spike", subject="run", text=text)


def _of_rounds(rounds: Sequence[tuple[str, bool]]) -> Iterator[AlarmStatus]:
    by_stage: dict[str, list[bool]] = {}
    for stage, has_result in rounds:
        by_stage.setdefault(stage, []).append(has_result)
    for stage, results in by_stage.items():
        num_failed = len(results) - sum(results)
        if len(results) >= _MIN_ROUNDS and 2 * num_failed > len(results):
            text = f"{num_failed} of the latest {len(results)} rounds reported had no result"
            yield AlarmStatus(kind="failing-rounds", subject=stage or "run", text=text)


def _of_nodes(nodes: Iterable[NodeSummary], limits: AlarmLimits) -> Iterator[AlarmStatus]:
    for node in nodes:
        name = node.node_id
        if node.clock_offset_s is not None and abs(node.clock_offset_s) > limits.clock_s:
            way = "ahead of" if node.clock_offset_s > 0 else "behind"
            text = f"its clock is {abs(node.clock_offset_s):.0f} s {way} this one; one of the two is wrong"
            yield AlarmStatus(kind="clock", subject=name, text=text)
        if node.doubts:
            yield AlarmStatus(kind="contribution", subject=name, text="; ".join(node.doubts))
        if node.health == "unreachable":
            text = "announces an address at which it does not answer this monitor"
            yield AlarmStatus(kind="unreachable", subject=name, text=text)
        elif node.health == "quiet":
            age = "none" if node.report_age_s is None else f"the last {node.report_age_s:.0f} s ago"
            yield AlarmStatus(kind="quiet", subject=name, text=f"announces itself, but sends no reports ({age})")
