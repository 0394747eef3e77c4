"""A node's page: what one node, worker or driver knows of itself and has heard of the others.

It is put together when it is asked for, from what the tracker, the node's history and a driver's view hold anyway, at
most twice a second (1 ms for a node that knows 64 others, 4 ms for 256).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

import numpy as np

from trainer.monitor.pages.course import CourseRange, CourseView, Curve, Numbers, RoundMark, curve, evenly
from trainer.monitor.pages.log_lines import LogLines
from trainer.monitor.pages.node_history import NodeHistory, OwnRound
from trainer.monitor.pages.page_view import (
    CheckpointStatus,
    DataStatus,
    Gauge,
    Incident,
    LogLine,
    OwnStatus,
    PageNode,
    PageRound,
    PageStage,
    PageView,
    SwarmFlow,
)
from trainer.monitor.pages.seen_course import curves_of_nodes, curves_of_run, looks_in
from trainer.monitor.pages.step_course import Bucket
from trainer.monitor.pages.texts import NAME, harmless
from trainer.monitor.run_view import Budget
from trainer.monitor.status import NodeStatus, PipelineView, StageStatus, SwarmAccount, SwarmStages, TrainingStatus
from trainer.monitor.tracker import TrainingTracker
from trainer.monitor.work import WorkTally

Role = Literal["node", "worker", "driver"]

_FRESH_S: Final = 0.5
_ROUNDS_SHOWN: Final = 60
_INCIDENTS_SHOWN: Final = 60
_LINES_SHOWN: Final = 120
_SHARDS_SHOWN: Final = 64
_RATE_STEPS: Final = 50
_STALL_STEPS: Final = 20.0
_BUCKETS: Final = 8_000
_STEP_NAMES: Final[dict[Role, str]] = {
    "node": "inner steps, this node",
    "worker": "steps, this worker",
    "driver": "steps of the run",
}
_LOSS_OF: Final[dict[Role, str]] = {
    "node": "mean of some 50 steps a node",
    "worker": "mean of some 50 steps",
    "driver": "of this driver's latest step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What does not change while a node runs; 0: no such limit."""

    node_id: str
    run_id: str
    role: Role = "node"
    max_steps: int = 0
    max_tokens: int = 0
    stall_s: float = 60.0
    """Without a step for so long, and for 20 times the usual step, a node is said not to train."""


class NodePage:
    """Makes the page of one node; any thread may ask. ``gauges`` returns further figures (name, help, value)."""

    def __init__(
        self,
        facts: PageFacts,
        tracker: TrainingTracker,
        work: WorkTally,
        history: NodeHistory,
        lines: LogLines,
        gauges: Callable[[], Iterable[tuple[str, str, float]]] = tuple,
    ) -> None:
        self._facts = facts
        self._tracker = tracker
        self._work = work
        self._history = history
        self._lines = lines
        self._gauges = gauges
        self.pipeline: PipelineView | None = None
        """A driver's."""
        self._lock = threading.Lock()
        self._made: tuple[float, PageView] | None = None

    def view(self) -> PageView:
        """Returns the page as of now, or half a second ago."""
        with self._lock:
            now_s = time.monotonic()
            if self._made is None or now_s - self._made[0] > _FRESH_S:
                self._made = (now_s, self._make())
            return self._made[1]

    def course(self, wanted: CourseRange) -> CourseView:
        """Returns this node's steps, and the run as it has seen it, in a range."""
        history = self._history
        own = _steps_of(history, wanted)
        looks, _, _ = looks_in(history.read, wanted)
        curves = [
            *curves_of_run(looks, wanted),
            *_own_curves(own, wanted, f"this {self._facts.role}"),
            *curves_of_nodes(history.read, looks, wanted),
        ]
        x = _x_of(own.buckets, wanted)
        return CourseView(
            by=wanted.by,
            begin=own.begin,
            end=own.end,
            curves=tuple(curves),
            rounds=_marks(history.rounds(), own.buckets, x, wanted),
        )

    def _make(self) -> PageView:
        facts, status = self._facts, self._tracker.status()
        stages = self.pipeline.stages() if self.pipeline is not None else None
        account = self.pipeline.account() if self.pipeline is not None else None
        recent = self._history.latest_steps(_RATE_STEPS)
        names = {node.peer_id: harmless(node.node_id, NAME) for node in status.nodes}
        rounds = tuple(_page_round(it, names) for it in self._history.rounds()[: -_ROUNDS_SHOWN - 1 : -1])
        verdict, reasons = self._verdict(status)
        return PageView(
            scope="node",
            run_id=harmless(facts.run_id, NAME),
            node_id=harmless(facts.node_id, NAME),
            role=facts.role,
            time=status.time,
            kind="whole-model" if facts.role == "node" else "swarm",
            verdict=verdict,
            reasons=reasons,
            loss=_finite(stages.loss if stages is not None and stages.loss is not None else status.global_loss),
            loss_of=_LOSS_OF[facts.role],
            loss_trend=status.loss_trend,
            step=stages.step if stages is not None else recent[-1].last_step + 1 if recent else None,
            step_name=_STEP_NAMES[facts.role],
            tokens=account.trained_tokens if account is not None else recent[-1].tokens if recent else None,
            tokens_per_s=_finite(stages.tokens_per_s if stages is not None else status.tokens_per_s or None),
            num_nodes=status.training_nodes if facts.role != "worker" else None,
            total_steps=status.total_steps if facts.role == "node" else None,
            data_shards=status.data_shards if facts.role == "node" else None,
            convergence=status.model_convergence if facts.role == "node" else None,
            last_round=rounds[0] if rounds else None,
            budget=self._budget(recent, stages),
            own=self._own(status),
            gauges=tuple(
                Gauge(name=name, help=text, value=value) for name, text, value in self._gauges() if math.isfinite(value)
            ),
            stages=() if stages is None else tuple(map(_stage, stages.stages)),
            flow=None
            if stages is None
            else SwarmFlow(
                in_flight=stages.in_flight,
                held=stages.held,
                keeper=harmless(stages.keeper, NAME),
                keeper_away_s=stages.keeper_away_s,
            ),
            account=_harmless_account(account),
            nodes=_nodes(status) if facts.role == "node" else (),
            rounds=rounds,
            data=self._data(status) if facts.role == "node" else None,
            checkpoints=self._checkpoints(),
            incidents=tuple(
                Incident(time=_utc(it.at), kind=it.kind, text=it.text, is_bad=it.is_bad)
                for it in self._history.incidents(_INCIDENTS_SHOWN)
            ),
            log=tuple(
                LogLine(time=_utc(it.at), level=it.level, text=it.text) for it in self._lines.latest(_LINES_SHOWN)
            ),
            unverified=("what other nodes announce: their own word; impossible values are left out",),
        )

    def _verdict(
        self, status: TrainingStatus
    ) -> tuple[Literal["verified", "not-verified", "unknown"], tuple[str, ...]]:
        reasons = tuple(harmless(it) for it in status.reasons)
        age_s = self._tracker.health().last_step_age_s
        steps = self._history.latest_steps(_RATE_STEPS)
        usual_s = (steps[-1].at - steps[0].at) / (len(steps) - 1) if len(steps) > 1 else 0.0
        if age_s is not None and age_s > max(self._facts.stall_s, _STALL_STEPS * usual_s):
            return "not-verified", (f"no step for {age_s:.0f} s", *reasons)
        if not self._tracker.can_judge:
            if self._facts.role == "worker" and status.loss is None:
                return "unknown", ("this worker's stage knows no loss; the tail's and the drivers' pages do",)
            return "unknown", reasons
        return ("verified" if status.training_verified else "not-verified"), reasons

    def _own(self, status: TrainingStatus) -> OwnStatus:
        health, diloco = self._tracker.health(), status.diloco
        return OwnStatus(
            loss=_finite(status.loss),
            num_steps=self._tracker.num_steps,
            steps_skipped=status.steps_skipped,
            inner_step=diloco.inner_step,
            inner_steps=diloco.inner_steps,
            outer_step=diloco.outer_step,
            stages=diloco.stages,
            outer_syncs=diloco.outer_syncs,
            rounds_alone=diloco.rounds_alone,
            rounds_failed=diloco.rounds_failed,
            hash_agreement_rate=status.hash_agreement_rate,
            hash_agreement=status.hash_agreement,
            sync_success_rate=status.sync_success_rate,
            sync_success=status.sync_success,
            speed=status.speed,
            uptime_s=health.uptime_s,
            last_step_age_s=health.last_step_age_s,
        )

    def _budget(self, recent: Sequence[Bucket], stages: SwarmStages | None) -> Budget | None:
        facts = self._facts
        if not recent or facts.role == "worker" or not (facts.max_steps or facts.max_tokens):
            return None
        first, last = recent[0], recent[-1]
        unit: Literal["steps", "tokens"] = "steps" if facts.max_steps else "tokens"
        limit = facts.max_steps or facts.max_tokens
        made = last.last_step + 1 if stages is None else max(stages.step, last.last_step + 1)
        done = made if facts.max_steps else last.tokens
        gained = last.last_step - first.last_step if facts.max_steps else last.tokens - first.tokens
        rate = gained / (last.at - first.at) if last.at > first.at else 0.0
        eta_s = 0.0 if done >= limit else round((limit - done) / rate, 1) if rate > 0 else None
        return Budget(unit=unit, limit=limit, done=done, eta_s=eta_s)

    def _data(self, status: TrainingStatus) -> DataStatus:
        shards, num_rotations = self._tracker.shards
        return DataStatus(
            num_shards=status.data_shards,
            own_shards=shards[:_SHARDS_SHOWN],
            num_own_shards=len(shards),
            rotations=num_rotations,
        )

    def _checkpoints(self) -> tuple[CheckpointStatus, ...]:
        if self._facts.role != "node":
            return ()
        saved_at = self._work.done().checkpoint_at
        age_s = None if saved_at is None else round(max(0.0, time.time() - saved_at), 1)
        return (CheckpointStatus(subject="this node", age_s=age_s),)


# -- parts of a view ---------------------------------------------------------------------------------------------------


def _nodes(status: TrainingStatus) -> tuple[PageNode, ...]:
    newest: dict[str, int] = {}
    for node in status.nodes:
        newest[node.stage] = max(node.outer_step, newest.get(node.stage, 0))
    return tuple(_node(node, newest[node.stage]) for node in status.nodes)


def _node(node: NodeStatus, newest: int) -> PageNode:
    """Returns a node as the page shows it: a driver has no state, and of others over a bucket little is known."""
    has_state = node.role != "driver"
    is_told = node.is_self or node.last_round is None
    trains_whole = node.role == "node" and is_told
    return PageNode(
        node_id=harmless(node.node_id, NAME),
        peer_id=node.peer_id,
        is_self=node.is_self,
        role=node.role,
        stage=harmless(node.stage, NAME),
        step=node.outer_step if has_state else None,
        behind=newest - node.outer_step if has_state and is_told else None,
        last_round=node.last_round,
        weight=node.weight,
        inner_steps=node.inner_steps_trained if trains_whole else None,
        loss=_finite(node.loss),
        tokens_per_s=node.tokens_per_s if is_told else None,
        num_shards=node.num_shards if trains_whole else None,
        state_digest=node.state_digest[:16],
    )


def _stage(stage: StageStatus) -> PageStage:
    """Returns a stage as the page shows it."""
    workers = tuple(
        it.model_copy(update={"node_id": harmless(it.node_id, NAME), "unsaved_because": harmless(it.unsaved_because)})
        for it in stage.workers[:NAME]
    )
    serving = [it.busy for it in workers if it.status == "serving"]
    return PageStage(
        stage=stage.stage,
        num_layers=stage.num_layers,
        num_serving=stage.num_serving,
        num_joining=sum(it.status == "joining" for it in workers),
        version=stage.version,
        rows_per_s=stage.rows_per_s,
        busy=round(sum(serving) / len(serving), 3) if serving else None,
        empty_for_s=stage.empty_for_s,
        workers=workers,
    )


def _harmless_account(account: SwarmAccount | None) -> SwarmAccount | None:
    if account is None:
        return None
    lost = tuple(it.model_copy(update={"reason": harmless(it.reason)}) for it in account.lost[:NAME])
    own = {"node_id": harmless(account.node_id, NAME), "keeper": harmless(account.keeper, NAME)}
    return account.model_copy(update=own | {"lost": lost, "lanes": account.lanes[:NAME]})


def _page_round(it: OwnRound, names: dict[str, str]) -> PageRound:
    def named(key: str) -> str:
        return names.get(key, harmless(key[:12], NAME))

    agree_s, reduce_s, vote_s = it.phases
    return PageRound(
        stage=it.stage,
        round_index=it.round_index,
        ended_at=_utc(it.at),
        seconds=it.seconds,
        agree_s=agree_s,
        reduce_s=reduce_s,
        vote_s=vote_s,
        num_members=len(it.members),
        completeness=it.completeness,
        num_failed=bool(it.error),
        sent_bytes=it.sent_bytes,
        received_bytes=it.received_bytes,
        rule=harmless(it.rule, NAME),
        members=tuple(map(named, it.members)),
        left_out=tuple((named(who), why) for who, why in it.left_out),
        error=it.error,
    )


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# -- curves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OwnSteps:
    buckets: list[Bucket]
    begin: float | None
    end: float | None


def _steps_of(history: NodeHistory, wanted: CourseRange) -> _OwnSteps:
    """The node's own steps in a range of any axis; all that are kept tell where in steps that is."""
    everything = history.steps(-math.inf, math.inf, _BUCKETS)
    if not everything:
        return _OwnSteps([], None, None)
    x = _x_of(everything, wanted)
    begin, end = float(x[0]), float(x[-1])
    if wanted.begin is None and wanted.end is None:
        return _OwnSteps(everything, begin, end)
    first = max(0, int(np.searchsorted(x, begin if wanted.begin is None else wanted.begin)) - 1)
    last = min(len(x) - 1, int(np.searchsorted(x, end if wanted.end is None else wanted.end)))
    found = history.steps(everything[first].first_step, everything[last].last_step, _BUCKETS)
    return _OwnSteps(found, begin, end)


def _x_of(buckets: Sequence[Bucket], wanted: CourseRange) -> Numbers:
    if wanted.by == "time":
        return np.array([it.at for it in buckets], dtype=np.float64)
    if wanted.by == "tokens":
        return np.array([it.tokens for it in buckets], dtype=np.float64)
    return np.array([it.last_step + 1 for it in buckets], dtype=np.float64)  # Steps done, as all else counts them.


def _own_curves(own: _OwnSteps, wanted: CourseRange, name: str) -> list[Curve]:
    buckets = own.buckets
    if not buckets:
        return []
    x = _x_of(buckets, wanted)
    counts = np.array([it.num_losses for it in buckets], dtype=np.float64)
    loss = np.array([it.loss_sum / it.num_losses if it.num_losses else np.nan for it in buckets])
    low, high = np.array([it.low for it in buckets]), np.array([it.high for it in buckets])
    at = np.array([it.at for it in buckets], dtype=np.float64)
    waits = np.diff(at, prepend=at[0])
    tokens = np.array([it.num_tokens for it in buckets], dtype=np.float64)
    speed = np.divide(tokens, waits, out=np.full_like(tokens, np.nan), where=waits > 0)
    found = [
        curve(name, "loss", "self", x, loss, wanted, low=low, high=high, weights=counts),
        curve(name, "speed", "self", x, speed, wanted, weights=np.maximum(waits, 0.0)),
    ]
    return [it for it in found if it is not None]


def _marks(
    rounds: Sequence[OwnRound], buckets: Sequence[Bucket], x: Numbers, wanted: CourseRange
) -> tuple[RoundMark, ...]:
    if not buckets:
        return ()
    steps = np.array([it.last_step + 1 for it in buckets], dtype=np.float64)
    marks = []
    for it in rounds:
        place = it.at if wanted.by == "time" else float(np.interp(it.step, steps, x))
        begin = place if wanted.begin is None else wanted.begin
        end = place if wanted.end is None else wanted.end
        if it.step >= buckets[0].first_step and begin <= place <= end:
            marks.append(RoundMark(x=place, round_index=it.round_index, stage=it.stage, is_failed=bool(it.error)))
    return evenly(marks)
